"""DeepSpeed asks what the processor is, in a process of its own, two or three times for each of its optimizers."""

from __future__ import annotations

import functools

import cpuinfo


def ask_it_once() -> None:
    """From now on, the answer is kept."""
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
