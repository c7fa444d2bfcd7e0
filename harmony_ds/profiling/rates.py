"""Measure the machine: the link, the host's memory and optimizer, and how compute and updates disturb each other.

Everything is measured the way the engine does it, on memory of its own; the model and the optimizer's state are not
touched. Takes well under a second, for a model of hundreds of millions of parameters some.
"""

from __future__ import annotations

import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from harmony_ds.device.base import Device, Stream
from harmony_ds.optim.cores import computing_with
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.scheduler.profile import UPDATE_BYTES_PER_ELEMENT, Machine

_SCRATCH_ELEMENTS = 2**20
_FEW_ELEMENTS = 2**16
_SCRATCH_ROWS = 2**10
_MOST_ELEMENTS = 2**25
"""So many elements take half a GiB to update with Adam, which no cache holds: servers' have up to 300 MiB."""
_REPEATS = 5
_MATRIX = 256
_BESIDE_SECONDS = 0.1

_known: dict[tuple[str, ...], Machine] = {}
"""Machines that this process has measured already; they do not change while it lives."""


def measure_rates(
    device: Device,
    optimizer: HostOptimizer | None,
    weight_dtype: torch.dtype,
    swaps: Sequence[tuple[int, float]],
    threads: int | None = None,
) -> Machine:
    """Measure the machine as it is now.

    Args:
        optimizer: of the engine (None: nothing is ever updated).
        weight_dtype: of the weights; masters are cast to it after an update.
        swaps: bytes and milliseconds of swap-ins that were timed.
        threads: that updates are made with (None: as many as torch computes with).
    """
    threads = threads or torch.get_num_threads()
    kind = "none" if optimizer is None else type(optimizer.optimizer).__name__
    elements = _host_elements(optimizer)
    key = (device.name, kind, str(weight_dtype), str(torch.get_num_threads()), str(threads), str(elements))
    if key not in _known:
        _known[key] = _measured(device, optimizer, weight_dtype, threads, elements)
    swap_ms, swap_in = _line(swaps)
    machine = replace(_known[key], swap_ms=swap_ms, swap_in_bytes_per_ms=swap_in, device_bytes=device.budget_bytes)
    if not machine.copies_overlap:
        machine = replace(machine, link_bytes_per_ms=swap_in + machine.swap_out_bytes_per_ms)
    return machine


def _host_elements(optimizer: HostOptimizer | None) -> int:
    """Return the number of elements whose update is timed: a model that caches do not hold is updated from memory."""
    trained = 0 if optimizer is None else optimizer.trained_elements
    return min(max(trained // 8 // _SCRATCH_ROWS * _SCRATCH_ROWS, _SCRATCH_ELEMENTS), _MOST_ELEMENTS)


def _measured(
    device: Device, optimizer: HostOptimizer | None, weight_dtype: torch.dtype, threads: int, elements: int
) -> Machine:
    """Measure all rates but those of swap-ins."""
    swap_out, link, copied = _device_bytes_per_ms(device)
    with computing_with(threads):
        few = _typical_ms(None, _update_of(optimizer, weight_dtype, _FEW_ELEMENTS))
        elements = elements if few * elements < 1e3 * _FEW_ELEMENTS else _FEW_ELEMENTS  # Muon, where bf16 is slow
        update = _update_of(optimizer, weight_dtype, elements)
        updated = elements / _typical_ms(None, update)
    beside = 1.0 if device.copies_overlap or optimizer is None else _beside(update)
    host, normed = _host_rates(elements)
    return Machine(
        name=f"{device.name} on {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        copies_overlap=device.copies_overlap,
        swap_in_bytes_per_ms=0.0,
        swap_out_bytes_per_ms=swap_out,
        link_bytes_per_ms=link,
        update_elements_per_ms=updated,
        norm_elements_per_ms=normed,
        host_bytes_per_ms=host,
        # An elementwise optimizer on the device is as fast as the device's memory.
        device_update_elements_per_ms=copied / UPDATE_BYTES_PER_ELEMENT if device.copies_overlap else updated,
        beside_update=beside,
    )


def _device_bytes_per_ms(device: Device) -> tuple[float, float, float]:
    """Return bytes per ms of swap-outs; of both directions at once, with page-locked memory; and of what the device
    reads and writes in a copy of its own.
    """
    most = _MOST_ELEMENTS if device.copies_overlap else _SCRATCH_ELEMENTS  # GPUs copy 4 MiB as fast as a host looks
    count = min(most, (device.budget_bytes or most * 64) // 64)
    host, there = (device.host_empty(count, torch.float32).zero_() for _ in range(2))
    here = device.upload(host)
    other = torch.empty_like(here)

    def both() -> None:
        _copy(device, Stream.SWAP_IN, other, there)
        _copy(device, Stream.SWAP_OUT, host, here)

    swap_out = here.nbytes / _typical_ms(device, lambda: _copy(device, Stream.SWAP_OUT, host, here))
    link = copied = 0.0
    if device.copies_overlap:
        link = 2 * here.nbytes / _typical_ms(device, both)
        copied = 16 * here.nbytes / _typical_ms(device, lambda: [other.copy_(here) for _ in range(8)])
    device.host_free(host)
    device.host_free(there)
    return swap_out, link, copied


def _update_of(optimizer: HostOptimizer | None, weight_dtype: torch.dtype, elements: int) -> Callable[[], None]:
    """Return what the update thread does for one parameter, on memory of its own."""
    shape = _SCRATCH_ROWS, elements // _SCRATCH_ROWS  # a matrix: some, as Muon, take nothing else
    dtype = torch.float32 if optimizer is None else optimizer.master_dtype
    master, gradient = nn.Parameter(torch.zeros(shape, dtype=dtype)), torch.full(shape, 1e-3, dtype=dtype)
    weight = None if weight_dtype == dtype else torch.zeros(shape, dtype=weight_dtype)
    scratch = None if optimizer is None else optimizer.scratch_optimizer(master)

    @torch.no_grad()
    def update() -> None:
        if scratch is not None:
            master.grad = gradient
            scratch.step()
        if weight is not None:
            weight.copy_(master.detach())

    return update


def _typical_ms(device: Device | None, work: Callable[[], object]) -> float:
    samples = []
    for _ in range(_REPEATS):
        _settle(device)
        begin = time.perf_counter()
        work()
        _settle(device)
        samples.append((time.perf_counter() - begin) * 1e3)
    return max(statistics.median(samples[1:]), 1e-6)


def _settle(device: Device | None) -> None:
    if device is not None:
        for stream in Stream:
            device.record(stream).synchronize()


def _copy(device: Device, stream: Stream, target: Tensor, source: Tensor) -> None:
    with device.on(stream):
        target.copy_(source, non_blocking=True)


def _host_rates(elements: int) -> tuple[float, float]:
    """Return bytes a millisecond of STREAM's triad (two arrays are read, one written), and elements whose norm is taken."""
    a, b, c = (torch.zeros(max(elements, 4 * _SCRATCH_ELEMENTS)) for _ in range(3))
    triad = 3 * a.nbytes / _typical_ms(None, lambda: torch.add(a, b, alpha=3.0, out=c))
    return triad, a.numel() / _typical_ms(None, lambda: torch.linalg.vector_norm(a, 2))


def _beside(update: Callable[[], None]) -> float:
    """Return the speeds of matrix products and of updates while both run, over their speeds alone (the mean of both)."""
    a = torch.zeros(_MATRIX, _MATRIX)

    def multiply() -> None:
        for _ in range(8):
            torch.mm(a, a)

    alone = _typical_ms(None, multiply), _typical_ms(None, update)
    counts = [0, 0]
    end = time.perf_counter() + _BESIDE_SECONDS

    def repeat(work: Callable[[], None], which: int) -> None:
        # Once at least, however late a busy machine lets it begin.
        while counts[which] == 0 or time.perf_counter() < end:
            work()
            counts[which] += 1

    thread = threading.Thread(target=repeat, args=(update, 1))
    begin = time.perf_counter()
    thread.start()
    repeat(multiply, 0)
    thread.join()
    took = (time.perf_counter() - begin) * 1e3
    speeds = [count * ms / took for count, ms in zip(counts, alone, strict=True)]
    return min(1.0, sum(speeds) / 2)


def _line(swaps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return fixed milliseconds, and bytes per millisecond, that fit `swaps` best (least squares of relative errors)."""
    known = np.array([(nbytes, ms) for nbytes, ms in swaps if nbytes > 0 and ms > 0])
    if not len(known):
        return 0.0, 1e9
    nbytes, ms = known.T
    slope, fixed = np.polyfit(nbytes, ms, 1, w=1 / ms) if np.ptp(nbytes) else (0.0, 0.0)
    if slope <= 0 or fixed < 0:
        return 0.0, float(nbytes.sum() / ms.sum())
    return float(fixed), float(1 / slope)
