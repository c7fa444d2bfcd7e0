"""What is said when the device memory budget does not even hold what measuring a model takes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harmony_ds.device.base import Device
from harmony_ds.errors import DoesNotFitError


@contextmanager
def measured_within_budget(device: Device) -> Iterator[None]:
    """A context for measuring.

    Raises:
        DoesNotFitError: from any torch.OutOfMemoryError that leaves the context. Nothing that was on the device when it
            happened is held by the traceback.
    """
    before = device.allocated_bytes()
    device.reset_peak()
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = _explanation(device, before)
        _let_go(error)
        raise DoesNotFitError(message) from error


def _explanation(device: Device, before: int) -> str:
    budget, reserve, peak = device.budget_bytes, device.reserve_bytes(), device.peak_bytes()
    said, more = "there is no budget" if budget is None else f"the budget is {budget:,} bytes", ""
    if reserve:
        said += (
            f", of which {reserve:,} are the reserve of libraries (cuBLAS's workspaces) and of the allocator (which takes "
            "whole segments, for each stream its own)"
        )
        more = f" to well above {(reserve + peak) / 2**30:.2f}"
    if budget is not None and reserve >= budget:
        said += ": more than all of it"
    return (
        "the model cannot be measured in the device memory there is, though measuring holds one layer at a time, with one "
        f"micro-batch: {said}. Up to {peak:,} bytes were allocated, {before:,} of them before it began, when more were "
        f"asked for. Ways out: (1) raise harmony.device_memory_gib{more}; (2) lower train_micro_batch_size_per_gpu; (3) "
        "name smaller layers in harmony.layers."
    )


def _let_go(error: BaseException | None) -> None:
    """Of the variables of functions that have failed: they would hold device memory for as long as the error is held."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
