"""The number of compute threads of updates on the host: one core is left to the thread that feeds the accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEEPING_BUSY = 1
"""Cores that a process needs to issue work to its device: for the program's own thread."""


def update_threads(processes: int) -> int:
    """Return the number of compute threads for updates in one of `processes` on this server."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(torch.get_num_threads(), max(1, cores // processes - _KEEPING_BUSY))


def set_threads(threads: int) -> None:
    """Set the number of compute threads of the calling thread, and of threads that are started later."""
    torch.get_num_threads()  # a thread's first call would set it to the process's number again
    torch.set_num_threads(threads)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let the calling thread compute with `threads` compute threads while open."""
    before = torch.get_num_threads()
    set_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
