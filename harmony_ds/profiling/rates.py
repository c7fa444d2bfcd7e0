"""Measure the machine's rates: copies between host and device, the host's memory, updates, and updates beside compute.

Each rate is measured as the engine does the work, on memory of its own; the model and the optimizer's state are not
touched. It takes well under a second; for a model of hundreds of millions of parameters, some seconds.
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

_measured_machines: dict[tuple[str, ...], Machine] = {}
"""What this process has measured already: a machine does not change while the process lives."""


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
    if key not in _measured_machines:
        _measured_machines[key] = _measure_machine(device, optimizer, weight_dtype, threads, elements)
    swap_ms, swap_in = _fit_line(swaps)
    machine = replace(
        _measured_machines[key], swap_ms=swap_ms, swap_in_bytes_per_ms=swap_in, device_bytes=device.budget_bytes
    )
    if not machine.copies_overlap:
        machine = replace(machine, link_bytes_per_ms=swap_in + machine.swap_out_bytes_per_ms)
    return machine


def _host_elements(optimizer: HostOptimizer | None) -> int:
    """Return the number of elements whose update is timed: a model that caches do not hold is updated from memory."""
    trained = 0 if optimizer is None else optimizer.trained_elements
    return min(max(trained // 8 // _SCRATCH_ROWS * _SCRATCH_ROWS, _SCRATCH_ELEMENTS), _MOST_ELEMENTS)


def _measure_machine(
    device: Device, optimizer: HostOptimizer | None, weight_dtype: torch.dtype, threads: int, elements: int
) -> Machine:
    """Measure all rates but those of swap-ins."""
    swap_out, link, copied = _device_bytes_per_ms(device)
    with computing_with(threads):
        few_ms = _typical_ms(None, _update_of(optimizer, weight_dtype, _FEW_ELEMENTS))
        if few_ms * elements / _FEW_ELEMENTS >= 1e3:  # more than a second: Muon, where bf16 is slow
            elements = _FEW_ELEMENTS
        update = _update_of(optimizer, weight_dtype, elements)
        updated = elements / _typical_ms(None, update)
    beside = 1.0 if device.copies_overlap or optimizer is None else _speed_beside_updates(update)
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
    on_host = device.host_empty(count, torch.float32).zero_()
    also_on_host = device.host_empty(count, torch.float32).zero_()
    # Memory of the compute stream: an upload's would stay in the pool of another stream, and be missing for plans.
    on_device = torch.zeros(count, device=device.torch_device)
    also_on_device = torch.empty_like(on_device)

    def swap_out() -> None:
        _copy(device, Stream.SWAP_OUT, on_host, on_device)

    def swap_both_ways() -> None:
        _copy(device, Stream.SWAP_IN, also_on_device, also_on_host)
        swap_out()

    def copy_on_device() -> None:
        for _ in range(8):
            also_on_device.copy_(on_device)

    nbytes = on_device.nbytes
    swapped_out = nbytes / _typical_ms(device, swap_out)
    both_ways = copied = 0.0
    if device.copies_overlap:
        both_ways = 2 * nbytes / _typical_ms(device, swap_both_ways)
        copied = 8 * 2 * nbytes / _typical_ms(device, copy_on_device)  # each copy reads and writes
    device.host_free(on_host)
    device.host_free(also_on_host)
    return swapped_out, both_ways, copied


def _update_of(optimizer: HostOptimizer | None, weight_dtype: torch.dtype, elements: int) -> Callable[[], None]:
    """Return a function that does what the update thread does for one parameter, on memory of its own."""
    shape = _SCRATCH_ROWS, elements // _SCRATCH_ROWS  # a matrix: some optimizers, as Muon, take nothing else
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
    """Return the median of the milliseconds that `work` takes, until `device` has done it; the first run does not count."""
    samples = []
    for _ in range(_REPEATS):
        _wait_for_streams(device)
        begin = time.perf_counter()
        work()
        _wait_for_streams(device)
        samples.append((time.perf_counter() - begin) * 1e3)
    return max(statistics.median(samples[1:]), 1e-6)


def _wait_for_streams(device: Device | None) -> None:
    if device is not None:
        for stream in Stream:
            device.record(stream).synchronize()


def _copy(device: Device, stream: Stream, target: Tensor, source: Tensor) -> None:
    with device.on(stream):
        target.copy_(source, non_blocking=True)


def _host_rates(elements: int) -> tuple[float, float]:
    """Return bytes a millisecond of STREAM's triad (two arrays are read, one written), and elements whose norm is taken."""
    a, b, c = (torch.zeros(max(elements, 4 * _SCRATCH_ELEMENTS)) for _ in range(3))

    def triad() -> None:
        torch.add(a, b, alpha=3.0, out=c)

    def norm() -> None:
        torch.linalg.vector_norm(a, 2)

    return 3 * a.nbytes / _typical_ms(None, triad), a.numel() / _typical_ms(None, norm)


def _speed_beside_updates(update: Callable[[], None]) -> float:
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


def _fit_line(swaps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return fixed milliseconds, and bytes per millisecond, that fit `swaps` best (least squares of relative errors)."""
    known = np.array([(nbytes, ms) for nbytes, ms in swaps if nbytes > 0 and ms > 0])
    if not len(known):
        return 0.0, 1e9
    nbytes, ms = known.T
    slope, fixed = np.polyfit(nbytes, ms, 1, w=1 / ms) if np.ptp(nbytes) else (0.0, 0.0)
    if slope <= 0 or fixed < 0:
        return 0.0, float(nbytes.sum() / ms.sum())
    return float(fixed), float(1 / slope)
