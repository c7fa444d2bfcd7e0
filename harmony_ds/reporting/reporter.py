"""The engine's reports: what was measured of the last optimizer steps, against the plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from harmony_ds.offload.ledger import SWAPPED
from harmony_ds.reporting.reports import MemoryReport, PlanReport, SwapReport
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.swaps import lower_bound_bytes, swaps_of, zero3_offload_bytes
from harmony_ds.scheduler.trace import ExecutedStep, trace_of
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.step_record import MeasuredStep, StepRecord


class Reporter:
    """Makes the reports of an engine."""

    def __init__(self, state: EngineState, record: StepRecord) -> None:
        self._state = state
        self._record = record
        self._planner = state.planner

    def record_steps(self) -> AbstractContextManager[list[ExecutedStep]]:
        """Record when each task of every optimizer step in the context ran, on each stream.

        Yields:
            A list that holds the steps, in their order, once the context has been left without an error. Leaving it
            waits for updates that are still under way.

        Raises:
            RuntimeError: steps are being recorded already.
        """
        runtime = self._state.runtime
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
        plan, last = self._last_step("swap_report() is of the last one")
        traffic = last.traffic
        weight_bytes = self._state.store.dtype.itemsize
        return SwapReport(
            {kind.value: nbytes for kind, nbytes in traffic.host_to_device.items()},
            {kind.value: nbytes for kind, nbytes in traffic.device_to_host.items()},
            lower_bound_bytes(plan, self._state.runtime.world.local_rank),
            zero3_offload_bytes(self._planner.graph, weight_bytes, last.micro_batches),
            last.micro_batches,
            last.sent_bytes,
            dict(traffic.between_devices),
            tuple((traffic.links[one, True], traffic.links[one, False]) for one in range(self._state.device.count)),
            last.beside.calls,
            last.beside.weight_bytes,
        )

    def plan_report(self) -> PlanReport:
        """Return step time, device peak and bytes, predicted and measured, and the plans that were not chosen;
        RuntimeError before the first step.
        """
        plan, last = self._last_step("plan_report() compares steps with their plan")
        traffic = last.traffic
        swapped = sum(side[kind] for side in (traffic.host_to_device, traffic.device_to_host) for kind in SWAPPED)
        return PlanReport(
            self._planner.choices,
            tuple(self._record.planned_ms),
            max(last.peaks),
            swapped,
            last.sent_bytes,
            swaps_of(plan, self._planner.costs[0], self._state.runtime.world.local_rank),
            sum(traffic.between_devices.values()),
            self._planner.advice,
            last.step_ms,
            last.deviation,
        )

    def memory_report(self) -> MemoryReport:
        """Return the device peak of the last step, the plan's and the budget, and host bytes by kind."""
        self._state.runtime.updater.wait_all()
        plan, device, store = self._planner.plan, self._state.device, self._state.store
        return MemoryReport(
            device_peak_bytes=max(self._record.peaks),
            device_peaks=self._record.peaks,
            planned_peak_bytes=self._record.planned_peak_bytes,
            budget_bytes=device.budget_bytes,
            host_bytes=self._state.host_bytes(),
            counted="plan" if device.torch_device.type == "cpu" else "allocator",
            beside_bytes=self._planner.beside_bytes,
            reserved_bytes=device.reserved_bytes(),
            planned_reserved_bytes=None if plan is None else self._planner.choices[0].reserved_bytes,
            allocator_retries=device.allocator_retries(),
            disk_bytes=sum(disk.file.nbytes for disk in (store.disk, store.disk_weights) if disk is not None),
        )

    def _last_step(self, why: str) -> tuple[Plan, MeasuredStep]:
        if self._record.last is None or self._planner.plan is None:
            raise RuntimeError(
                f"no optimizer step has trained on a loss of engine(...) yet (calls of the model itself do not count), and "
                f"{why}."
            )
        return self._planner.plan, self._record.last
