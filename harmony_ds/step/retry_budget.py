"""The device memory budget of a step that runs again, after memory ran out that should have been there."""

from __future__ import annotations

import logging

import torch

from harmony_ds.device.base import Device
from harmony_ds.errors import DoesNotFitError
from harmony_ds.runtime.garbage import release_frames
from harmony_ds.step.planner import Planner

_logger = logging.getLogger(__name__)
_SMALLER = (15, 16)
"""The share of a budget that the next plan may fill, where the device does not say how much memory it has left."""


class RetryBudget:
    """Lowers the budget each time that memory runs out in one run of a step, and restores it if the run fails.

    After a run that succeeded, the budget stays as low as the run needed it.
    """

    def __init__(self, device: Device, planner: Planner) -> None:
        self._device = device
        self._planner = planner
        self._before = device.budget_bytes
        self._first: torch.OutOfMemoryError | None = None

    def lower(self, error: torch.OutOfMemoryError) -> None:
        """Lower the budget after `error`, so that the next plan needs less; free what the frames of `error` hold."""
        self._first = self._first or error
        release_frames(error)
        budget, there = self._device.budget_bytes, self._device.available_bytes()
        assert budget is not None
        lower = budget * _SMALLER[0] // _SMALLER[1]
        if there is not None and there < budget:
            lower = there
        self._device.budget_bytes = lower
        _logger.warning(
            "the device ran out of memory in the middle of a step (%s). The step is undone and run again, planned for "
            "%s bytes instead of %s; set harmony.device_memory_gib lower to begin with that.",
            str(error).splitlines()[0],
            f"{lower:,}",
            f"{budget:,}",
        )

    def restore(self, error: BaseException) -> None:
        """Restore the budget after a run that failed with `error`.

        Raises:
            torch.OutOfMemoryError: the first one, where no smaller plan fits.
        """
        self._device.budget_bytes = self._before
        self._planner.reconsider_joining()
        if self._first is not None and isinstance(error, DoesNotFitError):
            raise self._first from error
