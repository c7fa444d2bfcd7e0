"""Steps in which the device's caching allocator was short of room, though the plan fits the budget.

Memory that is free in pieces may serve no request. The allocator then gives all that nothing uses back to the device and
asks for new memory (torch counts that as `num_alloc_retries`), while the device waits. A plan's first two steps may bring
that about: what was allocated before them, by measuring or by other plans, is in pieces of other sizes.
"""

from __future__ import annotations

from harmony_ds.device.base import Device
from harmony_ds.distributed import SingleProcess
from harmony_ds.scheduler.plan import Plan
from harmony_ds.step.one_time_warnings import OneTimeWarnings
from harmony_ds.step.planner import Planner

_FIRST_STEPS = 2
"""Steps of a plan in which the allocator may be short of room."""
_STEPS_BEFORE_LESS = 2
"""Later steps of a plan in which it was, after which the next plan leaves more of the budget free."""
_WARNING = (
    "torch's allocator was short of room in a step that ran as planned: %d times it gave back all memory that it held and "
    "nothing used (num_alloc_retries), for which the device waits, since no piece of it was large enough. If a plan does "
    "that twice, the next one leaves more of the budget free. Said once: memory_report().allocator_retries counts them."
)


class AllocatorRetries:
    """Watches the steps of each plan for retries of the allocator, and has the planner leave more of the budget free."""

    def __init__(self, device: Device, world: SingleProcess, planner: Planner, warnings: OneTimeWarnings) -> None:
        self._device = device
        self._world = world
        self._planner = planner
        self._warnings = warnings
        self._before = 0  # when the step began
        self._plan: Plan | None = None  # of which the steps are counted
        self._steps = 0
        self._short_steps = 0

    def begin_step(self) -> None:
        """Note that a step begins which runs as planned."""
        self._before = self._device.allocator_retries()

    def finish_step(self) -> None:
        """Note that this step is over; in all processes at once."""
        if self._device.reserved_bytes() is None:
            return
        plan, retries = self._planner.plan, self._device.allocator_retries() - self._before
        if plan is not self._plan:
            self._plan, self._steps, self._short_steps = plan, 0, 0
        self._steps += 1
        is_short = self._steps > _FIRST_STEPS and retries > 0
        if is_short:
            self._warnings.log(_WARNING, retries)
        if not self._world.any("allocator retries", is_short):  # all processes run one plan
            return
        self._short_steps += 1
        if self._short_steps >= _STEPS_BEFORE_LESS and self._planner.leave_more_free():
            self._short_steps = 0
