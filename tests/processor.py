"""A cache of DeepSpeed's query of the processor, made in a new process two or three times for each optimizer."""

from __future__ import annotations

import functools

import cpuinfo


def ask_it_once() -> None:
    """From now on, the answer is kept."""
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
