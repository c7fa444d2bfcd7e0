"""The steps of one engine, one after the other: the open one, and the last one, whose norm may not be known yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.config.engine_settings import EngineSettings
from harmony_ds.errors import UsageError
from harmony_ds.model.engine_parameter import ParameterLinks
from harmony_ds.model.intercept import Autocast
from harmony_ds.optim.optimizer_override import OptimizerOverride
from harmony_ds.optim.schedules import build_scheduler
from harmony_ds.optim.zero_optimizer import ZeroOptimizer
from harmony_ds.step.allocator_retries import AllocatorRetries
from harmony_ds.step.context import StepContext
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.evaluation import evaluate
from harmony_ds.step.inputs import CallInputs
from harmony_ds.step.loss_scaling import LossScaler
from harmony_ds.step.model_calls import ModelCalls
from harmony_ds.step.one_time_warnings import OneTimeWarnings
from harmony_ds.step.pending_micro_batch import LossFunction
from harmony_ds.step.plan_composer import PlanComposer
from harmony_ds.step.replaced_forward import ReplacedForward
from harmony_ds.step.step import Step
from harmony_ds.step.step_gradients import StepGradients
from harmony_ds.step.step_record import StepRecord
from harmony_ds.step.transitions import StepEvent, StepState
from harmony_ds.step.used_gradients import check_dropped
from harmony_ds.step.while_alive import while_alive


class Steps:
    """The steps of one engine. What the program does to parameters and to the optimizer becomes an event of the open one.

    Attributes:
        context: the objects that every step works with.
        state: the engine's.
        settings: the ds_config, whose batch sizes may change.
        scaler: scales losses.
        counters: DeepSpeed's.
    """

    def __init__(
        self,
        model: nn.Module,
        state: EngineState,
        settings: EngineSettings,
        lr_scheduler: Any,
        record: StepRecord,
        after_step: Callable[[Steps], None],
    ) -> None:
        """Measure each step in `record`, and call `after_step` with these steps when one has been taken, by hand, too.

        `lr_scheduler`: the user's, or a callable that makes it from the optimizer.
        """
        self.state = state
        self.settings = settings
        self.scaler = scaler = LossScaler(settings.now.loss_scale)
        self._after_step = after_step
        optimizer: Any = None
        if state.optimizer is not None:
            optimizer = ZeroOptimizer(
                state.optimizer, settings, scaler.deepspeed_scaler, while_alive(self.has_overflowed)
            )
        scheduler = build_scheduler(settings.now.scheduler, lr_scheduler, state.optimizer)
        gradients = StepGradients(state, scaler)
        override: OptimizerOverride | None = None
        if state.optimizer is not None:
            override = OptimizerOverride(  # may refuse: nothing is changed yet
                state.optimizer,
                while_alive(self.step_by_hand),
                gradients.zero_by_hand,
                while_alive(self.wait_for_updates),
            )
        links = ParameterLinks(state.store, state.runtime.resident_packs, state.host_optimizer, weakref.proxy(self))
        config, device, warnings = settings.now, state.device, OneTimeWarnings()
        seed = config.harmony.seed
        if seed is None:
            seed = state.world.compute_on_first("seed", torch.initial_seed)
        autocast: Autocast | None = None
        if config.autocast_dtype is not None:
            autocast = Autocast(device.torch_device.type, config.autocast_dtype)
        casts = bool(config.values["fp16.enabled"] and config.values["fp16.auto_cast"])
        self.context = StepContext(
            model=model,
            state=state,
            settings=settings,
            scaler=scaler,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            override=override,
            links=links,
            step_gradients=gradients,
            record=record,
            model_calls=ModelCalls(device, state.ledger, autocast, casts),
            replaced_forward=ReplacedForward(model),
            composer=PlanComposer(state.runtime, state.planner, warnings),
            seed=seed,
            warnings=warnings,
            allocator_retries=AllocatorRetries(device, state.world, state.planner, warnings),
        )
        self.counters = self.context.counters
        self._current = Step(self.context)

    @property
    def open(self) -> Step:
        """The step that micro-batches are queued for: a new one when the one before is over."""
        if not self._current.is_open:
            unsettled = self._current if self._current.state is StepState.UPDATING else self._current.before
            self._current = Step(self.context, unsettled)
        return self._current

    def count_step(self, step: Step, schedule: dict[str, Any] | None, micro_steps: int) -> None:
        """Count a step that has been taken, step the scheduler with `schedule` (None: the caller does), and report it.

        The next step begins after `micro_steps` calls of `engine.step()`, though the scheduler raises an error: the
        updates of this one are issued, and its micro-batches must not be handed over again.
        """
        self.context.step_gradients.note_used(by_hand=schedule is None)
        try:
            step.count(self.context, schedule)
            self.context.links.refresh_aliases()  # it waits: if that is interrupted, the step is taken all the same
            self._after_step(self)
        finally:
            self.counters.begin_step(micro_steps)

    # ---- optimizer

    def require_optimizer(self, what: str) -> None:
        """Raise UsageError if there is no optimizer for `what`."""
        if self.context.optimizer is None:
            raise UsageError(
                f"must provide optimizer during init in order to use {what}: name one in the ds_config or pass one"
            )

    @property
    def lr_scheduler(self) -> Any:
        """The user's scheduler, else the ds_config's, else None."""
        self.settle_skip()
        return self.context.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.settle_skip()
        self.context.lr_scheduler = scheduler

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
        groups = [] if self.context.optimizer is None else self.context.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    # ---- the last step

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the weights: not without a boundary, or with an overflow."""
        self.settle_skip()
        return self.counters.was_applied

    def has_overflowed(self) -> bool:
        """Return whether the last optimizer step was skipped for inf or NaN in its gradients."""
        self.settle_skip()
        return self.counters.has_overflowed

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped for inf or NaN in their gradients."""
        self.settle_skip()
        return self.counters.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.settle_skip()
        self.counters.skipped_steps = count

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step, before clipping, unscaled; None before the first."""
        self.settle()
        return None if self.counters.norm is None else self.counters.norm.result().total

    def settle(self) -> None:
        """Wait for the norm of the last step, and note whether the step was skipped."""
        for step in (self._current.before, self._current):
            if step is not None:
                step.settle_if_updating(self.context)

    def settle_skip(self) -> None:
        """Settle the last step if it may have been skipped."""
        for step in (self._current.before, self._current):
            if step is not None:
                step.settle_if_skippable(self.context)

    # ---- checkpoints, and the end

    def drop_steps(self, seed: int | None = None) -> None:
        """Drop the open step and forget the last one: other weights are loaded. Go on with `seed`, if it is not fixed."""
        self.open.handle(StepEvent.LOAD_CHECKPOINT)
        self.counters.forget_last_step()
        if seed is not None and self.settings.now.harmony.seed is None:
            self.context.seed = seed

    def resume(
        self,
        *,
        global_steps: int,
        global_samples: int,
        skipped_steps: int,
        micro_steps: int,
        loss_scaler: dict[str, Any] | None,
        seed: int | None,
    ) -> None:
        """Go on from a checkpoint: count on from its numbers, with the state of its loss scaler and its seed."""
        self.drop_steps(seed)
        self.counters.global_steps = global_steps
        self.counters.global_samples = global_samples
        self.counters.skipped_steps = skipped_steps
        self.counters.begin_step(micro_steps)
        self.scaler.load_state_dict(loss_scaler)

    # ---- without gradients

    def evaluate(self, batches: Sequence[CallInputs], loss_fn: LossFunction | None) -> list[Tensor]:
        """Return losses of micro-batches without gradients, which are no part of the open step."""
        self.before_evaluation()
        return evaluate(self.open, batches, loss_fn)

    def before_evaluation(self) -> None:
        """Note that the model is about to be called without gradients."""
        self.open.handle(StepEvent.EVALUATE)

    @property
    def is_idle(self) -> bool:
        """Whether no micro-batch and no gradient waits for a step, and nothing runs."""
        return not (self.open.queued or self.open.has_accumulated or self.state.runtime.contract.is_running)

    def destroy(self) -> None:
        """Drop the open step with its engine."""
        self.open.handle(StepEvent.DESTROY)

    # ---- what the program does to its optimizer

    def zero_grad(self) -> None:
        """Drop the gradients that have accumulated since the last step."""
        if self.state.host_optimizer is None:
            return
        self.context.step_gradients.used.clear()
        self.open.handle(StepEvent.READ_GRADIENT)
        self.open.handle(StepEvent.ZERO_GRAD)

    def step_by_hand(self) -> None:
        """Update from the gradients that have accumulated, for `optimizer.step()`.

        Gradients of parameters that are not the optimizer's stay, for another one to step; after an error, too.
        """
        context, optimizer = self.context, self.state.host_optimizer
        assert optimizer is not None
        step = self.open
        queued = step.queued
        if not queued and not self.state.runtime.user_gradients.exist(optimizer.trained):
            check_dropped(context.step_gradients.used)
            return
        unmanaged = context.step_gradients.pop_unmanaged()
        try:
            step.handle(StepEvent.BOUNDARY, None)
            self.count_step(step, None, self.counters.group_began + queued)
        finally:
            for parameter, gradient in unmanaged:
                parameter.grad = gradient

    # ---- what the program does to the model's parameters, see `model.link.Owner`

    def wait_for_updates(self) -> None:
        """Wait for all updates on the host."""
        self.state.wait_for_updates()

    def before_write(self, name: str) -> None:
        """Run what was called with the values of the parameter `name`, which are about to be changed.

        Raises:
            UnsupportedError: several processes share the parameter.
            UsageError: a micro-batch is queued that has not been propagated back from.
        """
        self.context.world.refuse(f"changing {name} by hand, which every process would do again")
        self.open.handle(StepEvent.READ_GRADIENT)
        self.open.handle(StepEvent.WRITE_PARAMETER, name)

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name` itself, not scaled, as it has accumulated since the last step."""
        has_accumulated: bool = self.open.handle(StepEvent.READ_GRADIENT)
        return self.context.step_gradients.read(name, has_accumulated)

    def put_gradient(self, name: str, value: Tensor | None) -> None:
        """Use `value` in the place of the gradient that has accumulated for `name`."""
        self.context.step_gradients.used.discard(name)
        self.context.step_gradients.forget_own(name)
        if self.open.handle(StepEvent.READ_GRADIENT):
            self.state.executor.discard_accumulated((name,))
        if value is not None:
            self.wait_for_updates()  # a pending update would take it
        self.state.runtime.user_gradients.put(name, value)
