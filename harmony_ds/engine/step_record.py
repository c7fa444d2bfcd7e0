"""Bytes, memory and time of the last optimizer steps, against the plan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.reports import MemoryReport, PlanReport, SwapReport
from harmony_ds.offload.ledger import SWAPPED, Beside, Traffic
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.swaps import lower_bound_bytes, swaps_of, zero3_offload_bytes
from harmony_ds.scheduler.trace import ExecutedStep, trace_of

_STEPS_KEPT = 32


class StepRecord:
    """Measurements of optimizer steps, and the engine's reports of them.

    Attributes:
        micro_batches: in the last step.
        step_ms: its time.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._planner = assembly.runner.planner
        self._peaks: tuple[int, ...] = (0,)
        self._planned_ms: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._plan: Plan | None = None  # that `_planned_ms` is of
        self._traffic: Traffic | None = None  # of the last step
        self._beside = Beside()
        self.micro_batches, self.step_ms = 0, 0.0
        self._sent_bytes = self._sent_before = 0

    @contextmanager
    def step(self, micro_batches: int, as_planned: bool) -> Iterator[None]:
        """Measure an optimizer step; `as_planned`: a full group, run at once."""
        device = self._assembly.device
        device.watch_peak()
        begin = time.perf_counter()
        try:
            yield
        finally:  # the bytes of a step that fails are not the next one's
            traffic, sent = self._assembly.ledger.drain(), self._assembly.runtime.world.sent_bytes
            beside = self._assembly.ledger.drain_beside()
            sent_bytes, self._sent_before = sent - self._sent_before, sent
        self.step_ms = (time.perf_counter() - begin) * 1e3
        if self._plan is not self._planner.plan:  # the first step of a plan touches memory for the first time
            self._plan = self._planner.plan
            self._planned_ms.clear()
        elif as_planned:
            self._planned_ms.append(self.step_ms)
        self._peaks = device.peaks()
        self._traffic, self._beside, self._sent_bytes, self.micro_batches = traffic, beside, sent_bytes, micro_batches

    def record_steps(self) -> AbstractContextManager[list[ExecutedStep]]:
        """Record when each task of every optimizer step in the context ran, on each stream.

        Yields:
            A list that holds the steps, in their order, once the context has been left without an error. Leaving it
            waits for updates that are still under way.

        Raises:
            RuntimeError: steps are being recorded already.
        """
        runtime = self._assembly.runtime
        return runtime.timeline.recording(runtime.updater.wait_all)

    def trace(self, executed: ExecutedStep | None = None) -> dict[str, Any]:
        """Return the predicted step, and the `executed` one, as a Chrome trace: https://ui.perfetto.dev opens its JSON.

        Raises:
            RuntimeError: there is no plan yet.
        """
        if not self._planner.choices:
            raise RuntimeError("there is no plan before the first micro-batch: trace() draws the one that runs.")
        best, names = self._planner.choices[0], tuple(layer.name for layer in self._planner.graph.layers)
        return trace_of(best.plan, best.prediction, self._planner.costs[0], executed, names)

    def swap_report(self) -> SwapReport:
        """Return the bytes between host and device in the last optimizer step; RuntimeError before the first."""
        plan, traffic = self._last_step("swap_report() is of the last one")
        weight_bytes = self._assembly.store.dtype.itemsize
        return SwapReport(
            {kind.value: nbytes for kind, nbytes in traffic.host_to_device.items()},
            {kind.value: nbytes for kind, nbytes in traffic.device_to_host.items()},
            lower_bound_bytes(plan, self._assembly.runtime.world.local_rank),
            zero3_offload_bytes(self._planner.graph, weight_bytes, self.micro_batches),
            self.micro_batches,
            self._sent_bytes,
            dict(traffic.between_devices),
            tuple((traffic.links[one, True], traffic.links[one, False]) for one in range(self._assembly.device.count)),
            self._beside.calls,
            self._beside.weight_bytes,
        )

    def plan_report(self) -> PlanReport:
        """Return step time, device peak and bytes, predicted and measured, and the plans that were not chosen;
        RuntimeError before the first step.
        """
        plan, traffic = self._last_step("plan_report() compares steps with their plan")
        swapped = sum(side[kind] for side in (traffic.host_to_device, traffic.device_to_host) for kind in SWAPPED)
        return PlanReport(
            self._planner.choices,
            tuple(self._planned_ms),
            max(self._peaks),
            swapped,
            self._sent_bytes,
            swaps_of(plan, self._planner.costs[0], self._assembly.runtime.world.local_rank),
            sum(traffic.between_devices.values()),
            self._planner.advice,
        )

    def memory_report(self) -> MemoryReport:
        """Return the device peak of the last step, the plan's and the budget, and host bytes by kind."""
        self._assembly.runtime.updater.wait_all()
        plan, device, store = self._planner.plan, self._assembly.device, self._assembly.store
        return MemoryReport(
            device_peak_bytes=max(self._peaks),
            device_peaks=self._peaks,
            planned_peak_bytes=0 if plan is None else plan.peak_bytes,
            budget_bytes=device.budget_bytes,
            host_bytes=self._assembly.host_bytes(),
            counted="plan" if device.torch_device.type == "cpu" else "allocator",
            beside_bytes=self._planner.beside_bytes,
            disk_bytes=sum(disk.file.nbytes for disk in (store.disk, store.disk_weights) if disk is not None),
        )

    def _last_step(self, why: str) -> tuple[Plan, Traffic]:
        if self._traffic is None or self._planner.plan is None:
            raise RuntimeError(f"there has been no optimizer step yet over what engine(...) was called with: {why}.")
        return self._planner.plan, self._traffic
