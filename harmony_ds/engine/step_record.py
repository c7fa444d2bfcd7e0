"""What the last optimizer steps took, in bytes and time, against what was planned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.reports import MemoryReport, PlanReport, SwapReport
from harmony_ds.offload.ledger import SWAPPED, Traffic
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.swaps import lower_bound_bytes, zero3_offload_bytes
from harmony_ds.scheduler.trace import ExecutedStep

_STEPS_KEPT = 32


class StepRecord:
    """Measures steps, and makes the engine's reports of them."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._planner = assembly.runner.planner
        self._peaks: tuple[int, ...] = (0,)
        self._step_ms: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._plan: Plan | None = None  # that `_step_ms` is of
        self.traffic: Traffic | None = None
        """Of the last step; None before the first."""
        self.micro_batches = 0
        """In the last step."""
        self._sent_bytes = self._sent_before = 0

    @contextmanager
    def step(self, micro_batches: int, as_planned: bool) -> Iterator[None]:
        """Around an optimizer step; `as_planned`: a full group, run at once."""
        device = self._assembly.device
        device.reset_peak()
        begin = time.perf_counter()
        try:
            yield
        finally:  # the bytes of a step that fails are not the next one's
            traffic, sent = self._assembly.ledger.close(), self._assembly.parts.world.sent_bytes
            sent_bytes, self._sent_before = sent - self._sent_before, sent
        self._note_time((time.perf_counter() - begin) * 1e3, as_planned)
        self._peaks = device.peaks()
        self.traffic, self._sent_bytes, self.micro_batches = traffic, sent_bytes, micro_batches

    def _note_time(self, step_ms: float, as_planned: bool) -> None:
        """Keeps the times of the present plan; its first step touches memory for the first time."""
        if self._plan is not self._planner.plan:
            self._plan = self._planner.plan
            self._step_ms.clear()
        elif as_planned:
            self._step_ms.append(step_ms)

    def record_steps(self) -> AbstractContextManager[list[ExecutedStep]]:
        """Records when each task of every optimizer step in the context ran, on each stream.

        Yields:
            A list that holds the steps, in their order, once the context has been left without an error. Leaving it
            waits for updates that are still under way.

        Raises:
            RuntimeError: steps are being recorded already.
        """
        return self._assembly.runner.recording()

    def trace(self, executed: ExecutedStep | None = None) -> dict[str, Any]:
        """The predicted step, and beside it the `executed` one: saved as JSON, https://ui.perfetto.dev opens it.

        Raises:
            RuntimeError: there is no plan yet.
        """
        if self._planner.plan is None:
            raise RuntimeError("there is no plan before the first micro-batch: trace() draws the one that runs.")
        return self._planner.trace(executed)

    def swap_report(self) -> SwapReport:
        """Bytes between host and device in the last optimizer step.

        Raises:
            RuntimeError: there has been none.
        """
        plan, graph = self._planner.plan, self._planner.graph
        if self.traffic is None or plan is None:
            raise RuntimeError("there has been no optimizer step yet: swap_report() speaks of the last one.")
        weight_bytes = self._assembly.store.dtype.itemsize
        return SwapReport(
            {kind.value: nbytes for kind, nbytes in self.traffic.host_to_device.items()},
            {kind.value: nbytes for kind, nbytes in self.traffic.device_to_host.items()},
            lower_bound_bytes(plan, self._assembly.parts.world.local_rank),
            zero3_offload_bytes(graph, weight_bytes, self.micro_batches),
            self.micro_batches,
            self._sent_bytes,
            dict(self.traffic.between_devices),
            tuple(
                (self.traffic.links[number, True], self.traffic.links[number, False])
                for number in range(self._assembly.device.count)
            ),
        )

    def plan_report(self) -> PlanReport:
        """Predicted against measured step time, device peak and bytes, and the plans that were not chosen.

        Raises:
            RuntimeError: there has been no step.
        """
        if self.traffic is None or self._planner.plan is None:
            raise RuntimeError("there has been no optimizer step yet: plan_report() compares steps with their plan.")
        swapped = sum(
            side[kind] for side in (self.traffic.host_to_device, self.traffic.device_to_host) for kind in SWAPPED
        )
        return PlanReport(
            self._planner.choices,
            tuple(self._step_ms),
            max(self._peaks),
            swapped,
            self._sent_bytes,
            self._planner.swaps,
            sum(self.traffic.between_devices.values()),
            self._planner.advice,
        )

    def memory_report(self) -> MemoryReport:
        """Device peak of the last step against the plan and the budget; host bytes by kind."""
        self._assembly.wait_for_updates()
        plan, device = self._planner.plan, self._assembly.device
        return MemoryReport(
            device_peak_bytes=max(self._peaks),
            device_peaks=self._peaks,
            planned_peak_bytes=0 if plan is None else plan.peak_bytes,
            budget_bytes=device.budget_bytes,
            host_bytes=self._assembly.host_bytes(),
            counted="plan" if device.torch_device.type == "cpu" else "allocator",
            beside_bytes=self._planner.beside_bytes,
        )
