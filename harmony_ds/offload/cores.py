"""How many cores the host's updates compute with: beside a device that computes, not those that keep it busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEEPING_BUSY = 2
"""Threads of a process that issue work to its device: the program's own, and autograd's."""


def update_threads(processes: int) -> int:
    """Of this process, one of so many on this server: what torch computes with, but a core is left to each thread that
    keeps the device busy.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(torch.get_num_threads(), max(1, cores // processes - _KEEPING_BUSY))


def set_threads(threads: int) -> None:
    """Of the calling thread, and of threads that begin to compute from now on: not for two threads at once."""
    torch.get_num_threads()  # the first time that a thread asks, it takes the process's number
    torch.set_num_threads(threads)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """While open, the calling thread does so."""
    before = torch.get_num_threads()
    set_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
