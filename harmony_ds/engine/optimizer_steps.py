"""Optimizer steps: the open one is run, and counts, loss scale and schedule go on behind it."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

from harmony_ds.engine.by_hand import OptimizerByHand
from harmony_ds.engine.first_times import NOT_FINITE, SKIPPED, FirstTimes
from harmony_ds.engine.lifetime import while_alive
from harmony_ds.engine.open_step import OpenStep
from harmony_ds.engine.reporting import StepReports
from harmony_ds.engine.training import Training
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.updater import GradientNorm
from harmony_ds.runtime.updates import Outcome


class OptimizerSteps:
    """Takes optimizer steps, and knows how the last one went."""

    def __init__(self, training: Training, open_step: OpenStep, reports: StepReports) -> None:
        self._assembly = training.assembly
        self._settings = training.settings
        self._counts = training.counts
        self._scaler = training.scaler
        self._open = open_step
        self._trained_by = training.trained_by
        self._reports = reports
        self._applied = False
        self._norm: Future[GradientNorm] | None = None
        self._first_times = FirstTimes()
        host = training.assembly.host_optimizer
        self.by_hand = None if host is None else self._take(host)
        """What stands on the optimizer; None without one."""

    def _take(self, host: HostOptimizer) -> OptimizerByHand:
        opened = self._open
        return OptimizerByHand(
            host, while_alive(self.step_by_hand), opened.gradients.zero_by_hand, while_alive(opened.finish)
        )

    def step(self, schedule: dict[str, Any] | None) -> None:
        """One optimizer step from all that is queued and has gathered.

        Args:
            schedule: arguments of the scheduler's step; None: it is the caller's, and so is the call of this step.
        """
        assert self.by_hand is not None
        self.by_hand.follow(by_hand=schedule is None)
        group = self._open.group
        full = len(group) == self._settings.gradient_accumulation_steps() and not group.propagated
        with self._reports.step(len(group), full):
            ran = self._open.run()
        self._passed(self._assembly.runner.executor.updates.outcome if ran else Outcome(), schedule)

    def step_by_hand(self) -> None:
        """`optimizer.step()`: the update of what has gathered, as at a boundary; schedulers are the caller's.

        Gradients of parameters that are not the optimizer's stay, for another one to step.
        """
        host, counts, gradients = self._assembly.host_optimizer, self._counts, self._open.gradients
        queued = len(self._open.group)
        assert host is not None
        if not queued and not self._assembly.parts.user_gradients.exist(host.trained):
            gradients.used.check()
            return
        others = gradients.take_others()
        try:
            self.step(None)
        except BaseException:
            counts.rewind()
            raise
        counts.begin_group(counts.group_began + queued)
        gradients.note_used(others)

    def _passed(self, outcome: Outcome, schedule: dict[str, Any] | None) -> None:
        counts = self._counts
        self._norm, self._applied = outcome.norm, not outcome.overflow
        self._watch(outcome)
        if outcome.overflow:
            counts.skipped_steps += 1
        elif schedule is not None:
            self._trained_by.step_schedule(schedule)
        self._scaler.update(outcome.overflow)
        counts.global_steps += 1
        counts.global_samples += self._samples()
        self._open.gradients.step_passed()
        self._open.renew()
        self._trained_by.note_overflow(outcome.overflow)
        self._reports.boundary()

    def _watch(self, outcome: Outcome) -> None:
        """Says so the first time that gradients are not finite; without clipping, their norm is known later."""
        first, step = self._first_times, self._counts.global_steps + 1
        if outcome.overflow:
            first.log(SKIPPED, step)
        elif outcome.norm is not None:
            outcome.norm.add_done_callback(lambda norm: _check_finite(first, step, norm))

    def _samples(self) -> int:
        backwards, settings = self._counts.take_backwards(), self._settings
        if settings.now.values["managed_gradient_accumulation"]:
            return settings.train_batch_size()
        return backwards * settings.train_micro_batch_size_per_gpu()

    def forget(self) -> None:
        """There has been no step that anything is known of."""
        self._norm, self._applied = None, False
        self._trained_by.note_overflow(False)

    def not_applied(self) -> None:
        """A call of `step()` has updated nothing so far."""
        self._applied = False

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the weights (no boundary, or an overflow: it did not)."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping, unscaled; None before the first."""
        return None if self._norm is None else self._norm.result().total


def _check_finite(first: FirstTimes, step: int, norm: Future[GradientNorm]) -> None:
    if not norm.cancelled() and norm.exception() is None and not math.isfinite(norm.result().total):
        first.log(NOT_FINITE, step, norm.result().total)
