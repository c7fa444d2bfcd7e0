"""The optimizer step that is open: micro-batches that wait, the gradients that have gathered so far, and their update."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harmony_ds.errors import ModelError, UnsupportedError, UsageError
from harmony_ds.model.engine_parameter import ParameterLinks, gate
from harmony_ds.model.intercept import Autocast
from harmony_ds.optim.optimizer_override import OptimizerOverride
from harmony_ds.optim.schedules import check_schedule
from harmony_ds.optim.updater import Clipping
from harmony_ds.runtime.updates import Outcome
from harmony_ds.step.group import GroupParts, StepGroup, Trial
from harmony_ds.step.model_calls import ModelCalls
from harmony_ds.step.one_time_warnings import DIVIDED_TWICE, DROPPED, EARLY_READ
from harmony_ds.step.output_kinds import OutputKinds
from harmony_ds.step.replaced_forward import ReplacedForward
from harmony_ds.step.step_gradients import StepGradients
from harmony_ds.step.step_record import StepRecord
from harmony_ds.step.training import Training
from harmony_ds.step.used_gradients import check_dropped
from harmony_ds.step.while_alive import while_alive

_logger = logging.getLogger("harmony_ds")


class OpenStep:
    """The group of a step, run as a whole, or in parts when gradients are wanted before. Parameters ask it for them.

    Attributes:
        links: of the model's parameters to their masters and gradients.
        override: of the user's optimizer; None without one.
        parts: of every step's group.
    """

    def __init__(self, training: Training, record: StepRecord, after_step: Callable[[], None]) -> None:
        """Measure each step in `record`, and call `after_step` when one has been taken, by hand, too."""
        self._training = training
        self._record = record
        self._after_step = after_step
        self._state = state = training.state
        self._runner, self._world, self._optimizer = state.runner, state.world, state.host_optimizer
        self._running = False  # the step, or a part of it
        self._passes = 0  # through a frozen model, which has no steps; each has random numbers of its own
        self.gradients = StepGradients(state, training.scaler)
        self.override: OptimizerOverride | None = None
        if state.optimizer is not None:
            calls = while_alive(self.step_by_hand), self.gradients.zero_by_hand, while_alive(self.finish)
            self.override = OptimizerOverride(state.optimizer, *calls)  # may refuse: nothing is changed yet
        self.links = ParameterLinks(
            state.store, state.runtime.resident_packs, state.host_optimizer, weakref.proxy(self)
        )
        self.parts = self._group_parts()
        self.renew()

    def _group_parts(self) -> GroupParts:
        training, state, config = self._training, self._state, self._training.settings.now
        check_propagation = training.scaler.check_scaled
        if self._optimizer is None:
            check_propagation = while_alive(training.check_can_propagate)
        device, seed, warn = state.device, config.harmony.seed, while_alive(training.warnings.warn)
        dtype, ledger = config.autocast_dtype, state.ledger
        autocast = None if dtype is None else Autocast(device.torch_device.type, dtype)
        casts = config.values["fp16.enabled"] and config.values["fp16.auto_cast"]
        return GroupParts(
            module=training.model,
            call=ModelCalls(device, ledger, autocast, casts).run,
            ledger=ledger,
            runner=self._runner,
            kinds=OutputKinds(),
            trial=Trial(),
            replaced_forward=ReplacedForward(training.model),
            seed=self._world.first("seed", torch.initial_seed) if seed is None else seed,
            looked=partial(warn, EARLY_READ),
            propagating=check_propagation,
            accumulation=training.settings.gradient_accumulation_steps,
            divided_by_hand=partial(warn, DIVIDED_TWICE),
            propagate=while_alive(self.propagate),
            check_requires_grad=self.links.check_requires_grad,
        )

    # ---- its micro-batches

    def renew(self, seed: int | None = None) -> None:
        """Begin a step that nothing is queued for; from now on with `seed`, unless the ds_config names one."""
        if seed is not None and self._training.settings.now.harmony.seed is None:
            self.parts = replace(self.parts, seed=seed)
        self._runner.end_step()
        self.group = StepGroup(self.parts, self._training.global_steps + self._passes)

    def discard(self) -> None:
        """Discard its micro-batches when the engine is destroyed."""
        if dropped := self.group.propagated_from:
            _logger.warning(
                "destroy() drops the gradients of micro-batches (%d) whose step was not taken: call engine.step() at the "
                "boundary of a group (or engine.set_gradient_accumulation_boundary(True) before it) to use them.",
                dropped,
            )
        self.group.abandon(destroyed=True)

    def apply_user_edits(self) -> None:
        """Let masters and layers follow the user's edits of weights and modules, before the model runs or is updated.

        Raises:
            ModelError: they cannot.
        """
        interception = self._state.interception
        if not self.group.is_open:
            self.links.apply_user_writes()
            interception.adopt_replaced()
        elif interception.replaced():
            raise ModelError(
                "the forward of a layer was replaced while micro-batches wait that were called before: replace it before "
                "the first micro-batch of a step."
            )

    # ---- the optimizer step

    def step(self, schedule: dict[str, Any] | None, *, clip: bool = True) -> None:
        """Take the optimizer step over all that is queued and has gathered, and begin the next one.

        Args:
            schedule: arguments of the scheduler's step; None: the caller steps it, and has called this step by hand.
            clip: whether gradients are clipped; False: the program has clipped them.
        """
        training, group = self._training, self.group
        training.settle_skip()  # it may set learning rates back
        check_schedule(training.lr_scheduler, schedule)
        full = len(group) == training.settings.gradient_accumulation_steps() and not group.propagated
        try:
            with self._record.step(len(group), full):
                ran = self._run(clip)
            training.finish_step(self._runner.executor.updates.outcome if ran else Outcome(), schedule)
        except BaseException:
            training.rewind()
            raise
        finally:
            self.renew()
        self.gradients.finish_step(by_hand=schedule is None)
        self._after_step()

    def step_by_hand(self) -> None:
        """Update from what has gathered, for `optimizer.step()`. Gradients of parameters that are not the optimizer's
        stay, for another one to step.
        """
        assert self._optimizer is not None
        training, queued = self._training, len(self.group)
        if not queued and not self._state.runtime.user_gradients.exist(self._optimizer.trained):
            check_dropped(self.gradients.used)
            return
        unmanaged = self.gradients.pop_unmanaged()
        self.step(None)
        training.begin_group(training.group_began + queued)
        for parameter, gradient in unmanaged:  # for another optimizer
            parameter.grad = gradient

    def _run(self, clip: bool) -> bool:
        """Run the queued group, and update from it and from the user's own backward passes; False without a gradient."""
        assert self._optimizer is not None and self.override is not None
        self.override.check()
        hyper, clipping = self._optimizer.hyper(), self._clipping()
        if clipping is not None and not clip:
            clipping = replace(clipping, max_norm=0.0)
        self.apply_user_edits()
        if (self._world.size > 1 or self._training.scaler.scale != 1.0) and self._state.runtime.user_gradients.exist():
            self._world.refuse(
                "gradients that are put on parameters by hand, or by a backward pass of the program's own"
            )
            raise UnsupportedError(
                "gradients were put on parameters by hand, or by a backward pass of the program's own, while losses are "
                "scaled (fp16): they cannot be told from scaled ones. Add what they are of to the loss, or train in bf16."
            )
        with self._busy():
            ran = self.group.run(hyper, clipping) or self._runner.update_only(hyper, clipping)
        self.links.refresh_aliases()
        return ran

    def propagate(self) -> bool:
        """Run what is queued and propagated from, so that its gradients are there; False if there are none.

        They are a part of the step: later micro-batches add to them, and `step` uses them.
        """
        if self._running or not self.group:
            return False
        if not self.group.wanted:
            return self.group.propagated
        self._world.refuse(
            "gradients before the step that they are for (looked at, dropped, or of inputs that require them)"
        )
        hyper = () if self._optimizer is None else self._optimizer.hyper()
        try:
            with self._busy():
                gathered = self.group.propagate(hyper, self._clipping() or Clipping())
            if self._optimizer is None and not self.group.is_open:
                # No step follows: gradients have gone through a frozen model to what is before it.
                self._passes += 1
                self.renew()
                return False
            return gathered
        except BaseException:
            self.group.abandon()
            self.renew()
            self._training.rewind()
            raise

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Run a step, or a part of one, with gradients on: the caller may read them under `torch.no_grad()`."""
        check_dropped(self.gradients.used)
        self._running = True
        try:
            with torch.inference_mode(False), torch.enable_grad(), gate(passed=False):  # forward may use others
                self.gradients.hide()
                yield
        finally:
            self._running = False

    def _clipping(self) -> Clipping | None:
        config = self._training.settings.now
        if not config.deferred_update:
            return None
        return Clipping(config.gradient_clipping, self._training.scaler.scale, config.skip_overflow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have gathered since the last step."""
        if self._optimizer is not None:
            self.gradients.used.clear()
            if gathered := self.propagate():
                self._training.warnings.warn(DROPPED)
            self.gradients.drop(gathered)

    # ---- what the model's parameters ask, see `parameters.link.Owner`

    def finish(self) -> None:
        self._state.wait_for_updates()

    def before_write(self, name: str) -> None:
        """Propagate what was called with the values of `name`, which are about to be changed.

        Raises:
            UnsupportedError: several processes share them.
            UsageError: a micro-batch is queued that has not been propagated back from.
        """
        self._world.refuse(f"changing {name} by hand, which every process would do again")
        if self._running or not self.group:
            return
        self.propagate()
        if self.group.waits:
            raise UsageError(
                f"{name} is about to be changed, while a micro-batch that was handed over with the values before is still "
                "to be propagated back from: call engine.backward(loss) first, or change parameters after engine.step()."
            )

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name` itself, not scaled, as it has gathered since the last step."""
        return self.gradients.read(name, self.propagate())

    def put_gradient(self, name: str, value: Tensor | None) -> None:
        """Use `value` in the place of the gradient that has gathered for `name`."""
        self.gradients.used.discard(name)
        if self.propagate():
            self._runner.executor.discard_gathered((name,))
        if value is not None:
            self.finish()  # a pending update would take it
        self._state.runtime.user_gradients.put(name, value)
