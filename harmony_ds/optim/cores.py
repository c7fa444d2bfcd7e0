"""Threads of the host's updates: beside an accelerator, a core is left to the thread that feeds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEEPING_BUSY = 1
"""Threads of a process that issue work to its device: the program's own, on which backward passes run, too."""


def update_threads(processes: int) -> int:
    """Return the number of threads for updates of one of so many `processes` on this server."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(torch.get_num_threads(), max(1, cores // processes - _KEEPING_BUSY))


def set_threads(threads: int) -> None:
    """Set the number of compute threads of the calling thread, and of threads that begin to compute later."""
    torch.get_num_threads()  # a thread's first call takes over the process's number
    torch.set_num_threads(threads)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let the calling thread compute with `threads` while the context is open."""
    before = torch.get_num_threads()
    set_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
