"""One model's training: what the parts of its engine share, and how far it has come."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

from torch import nn

from harmony_ds.config.engine_settings import EngineSettings
from harmony_ds.errors import UsageError
from harmony_ds.optim.optimizer_chain import parts_of
from harmony_ds.optim.schedules import ScheduleStep, build_scheduler, can_step_back
from harmony_ds.optim.updater import GradientNorm
from harmony_ds.optim.zero_optimizer import ZeroOptimizer
from harmony_ds.runtime.updates import Outcome
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.loss_scaling import LossScaler
from harmony_ds.step.one_time_warnings import NOT_FINITE, SKIPPED, OneTimeWarnings
from harmony_ds.step.while_alive import while_alive


class Training:
    """A model, its optimizer and schedule, DeepSpeed's counters, and the result of the last step.

    A step returns before it is known whether its gradients were finite. It counts as taken until somebody asks, or until
    the next step begins: then `settle` waits for the norm, and undoes what a skipped step must not have done.

    Attributes:
        optimizer: the optimizer under DeepSpeed's names; None without one.
        micro_steps: calls of `step()`, at a boundary or not.
        group_began: `micro_steps` when the group that is queued now began.
    """

    def __init__(self, model: nn.Module, state: EngineState, settings: EngineSettings, lr_scheduler: Any) -> None:
        """`lr_scheduler`: the user's, or a callable that makes it from the optimizer."""
        self.model, self.state, self.settings = model, state, settings
        self.scaler = LossScaler(settings.now.loss_scale)
        optimizer = state.optimizer
        self.optimizer: Any = None
        if optimizer is not None:
            self.optimizer = ZeroOptimizer(optimizer, settings, self.scaler.own, while_alive(self.has_overflowed))
        self._lr_scheduler = build_scheduler(settings.now.scheduler, lr_scheduler, optimizer)
        self.global_steps = self.global_samples = self.micro_steps = self._skipped_steps = 0
        self.group_began = 0
        self._backwards = 0  # backward passes of the group that is queued now
        self._norm: Future[GradientNorm] | None = None
        self._applied = self._overflow = False
        self._unsettled: Outcome | None = None  # of the last step
        self._schedule_step: ScheduleStep | None = None  # that is undone if this step is skipped
        self.warnings = OneTimeWarnings()

    # ---- optimizer

    def require_optimizer(self, what: str) -> None:
        """Raise UsageError if there is no optimizer for `what`."""
        if self.optimizer is None:
            raise UsageError(
                f"must provide optimizer during init in order to use {what}: name one in the ds_config or pass one"
            )

    def check_can_propagate(self) -> None:
        """Raise UsageError if parameters would get gradients, and there is no optimizer for them.

        A frozen model needs none: gradients go through it to what its inputs are made of.
        """
        if self.optimizer is None and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UsageError(
                "must provide optimizer during init in order to use backward: name one in the ds_config or pass one, or "
                "freeze the whole model (requires_grad_(False)) before initialize if gradients are to go through it alone. "
                "Gradients are gathered for the optimizer's parameters alone."
            )

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        return self._of_groups("momentum" if self.settings.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def get_type(self) -> list[Any]:
        """Return the "type" of each parameter group."""
        return self._of_groups("type")

    def _of_groups(self, name: str) -> list[Any]:
        self.settle_skip()
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    @property
    def lr_scheduler(self) -> Any:
        """The user's scheduler, else the ds_config's, else None."""
        self.settle_skip()
        return self._lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.settle_skip()
        self._lr_scheduler = scheduler

    # ---- the last step

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the weights: not without a boundary, or with an overflow."""
        self.settle_skip()
        return self._applied

    def has_overflowed(self) -> bool:
        """Return whether the last optimizer step was skipped for inf or NaN in its gradients."""
        self.settle_skip()
        return self._overflow

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped for inf or NaN in their gradients."""
        self.settle_skip()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.settle_skip()
        self._skipped_steps = count

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step, before clipping, unscaled; None before the first."""
        self.settle()
        return None if self._norm is None else self._norm.result().total

    def settle_skip(self) -> None:
        """Settle the last step if it may have been skipped."""
        if self._unsettled is not None and self._unsettled.may_skip:
            self.settle()

    def settle(self) -> None:
        """Wait for the norm of the last step: count the step as skipped, or warn, if its gradients were not finite.

        Raises:
            PeerFailedError: another process has not said its part of the norm.
            BaseException: what has ended this process's update thread before the norm was known.
        """
        outcome = self._unsettled
        if outcome is None:
            return
        try:
            norm = None if outcome.norm is None else outcome.norm.result()
        except Exception:
            self._unsettled = self._schedule_step = None  # said once
            self.state.runtime.updater.raise_failure()  # which notes that the caller has got it
            raise
        schedule_step, self._unsettled, self._schedule_step = self._schedule_step, None, None
        if norm is None:
            return
        if outcome.overflow:
            self._applied, self._overflow = False, True
            self._skipped_steps += 1
            if schedule_step is not None:
                schedule_step.undo()
            self.warnings.log(SKIPPED, self.global_steps)
        elif not math.isfinite(norm.total):
            self.warnings.log(NOT_FINITE, self.global_steps, norm.total)

    def finish_step(self, outcome: Outcome, schedule: dict[str, Any] | None) -> None:
        """Count an optimizer step, and step the scheduler with `schedule` (None: the caller does) and the loss scale."""
        self.settle()  # the step before, whose updates this one has waited for
        self.global_steps += 1
        self._norm, self._unsettled = outcome.norm, outcome
        self._applied, self._overflow = True, False
        assert self.state.optimizer is not None
        for optimizer in (self.optimizer, *parts_of(self.state.optimizer)):
            optimizer._opt_called = True  # torch's schedulers warn without it
        if self.scaler.own.dynamic:  # the next losses have another scale after an overflow
            self.settle_skip()
        if schedule is not None and self._lr_scheduler is not None:
            self._step_schedule(schedule)
        self.scaler.update(self._overflow)
        if self.settings.now.values["managed_gradient_accumulation"]:
            self.global_samples += self.settings.train_batch_size()
        else:
            self.global_samples += self._backwards * self.settings.train_micro_batch_size_per_gpu()

    def _step_schedule(self, schedule: dict[str, Any]) -> None:
        """Step the scheduler after a step that was not skipped; undo it later if that turns out to have been."""
        if not can_step_back(self._lr_scheduler):
            self.settle_skip()
        if self._overflow:
            return
        if self._unsettled is not None and self._unsettled.may_skip:
            self._schedule_step = ScheduleStep(self._lr_scheduler, self.optimizer.param_groups, schedule)
        else:
            self._lr_scheduler.step(**schedule)

    # ---- counters

    def count_call(self) -> None:
        """Count a call of `step()` within a group, which updates nothing."""
        self.micro_steps, self._applied = self.micro_steps + 1, False

    def count_backwards(self, count: int = 1) -> None:
        """Count backward passes of the group that is queued now."""
        self._backwards += count

    def rewind(self) -> None:
        """Forget the calls of a group that has failed, so that the loop can hand it over again."""
        self.micro_steps, self._backwards, self._applied = self.group_began, 0, False

    def begin_group(self, micro_steps: int) -> None:
        """Begin the next group after `micro_steps` calls of `step()`."""
        self.micro_steps, self.group_began, self._backwards = micro_steps, micro_steps, 0

    def forget_last_step(self) -> None:
        """Forget the last step and the group that is queued, when weights have been loaded in their place."""
        self._norm = self._unsettled = self._schedule_step = None
        self._applied = self._overflow = False
        self.rewind()

    def resume(
        self,
        global_steps: int,
        global_samples: int,
        skipped_steps: int,
        micro_steps: int,
        loss_scaler: dict[str, Any] | None,
    ) -> None:
        """Count on from the numbers of a checkpoint, with the state of its loss scaler."""
        self.forget_last_step()
        self.global_steps = global_steps
        self.global_samples = global_samples
        self.skipped_steps = skipped_steps
        self.begin_group(micro_steps)
        self.scaler.load_state_dict(loss_scaler)
