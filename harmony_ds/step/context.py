"""The objects that every step of one engine works with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from harmony_ds.config.engine_settings import EngineSettings
from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import ModelError, UsageError
from harmony_ds.model.engine_parameter import ParameterLinks
from harmony_ds.optim.optimizer_override import OptimizerOverride
from harmony_ds.optim.updater import NormOptions
from harmony_ds.profiling.flops import FlopCounts
from harmony_ds.runtime.executor import Executor
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.step.allocator_retries import AllocatorRetries
from harmony_ds.step.counters import Counters
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.first_steps import FirstSteps
from harmony_ds.step.health import EngineHealth
from harmony_ds.step.loss_scaling import LossScaler
from harmony_ds.step.model_calls import ModelCalls
from harmony_ds.step.one_time_warnings import OneTimeWarnings
from harmony_ds.step.output_kinds import OutputKinds
from harmony_ds.step.plan_composer import PlanComposer
from harmony_ds.step.planner import Planner
from harmony_ds.step.replaced_forward import ReplacedForward
from harmony_ds.step.step_gradients import StepGradients
from harmony_ds.step.step_record import StepRecord

_logger = logging.getLogger("harmony_ds")


@dataclass(slots=True)
class StepContext:
    """The objects that every step of one engine works with. `optimizer`, `lr_scheduler` and `seed` may be replaced.

    Attributes:
        optimizer: the optimizer under DeepSpeed's names; None without one.
        lr_scheduler: the program's, or the ds_config's; None: there is none.
        override: of the optimizer's `step`; None without an optimizer.
        links: of the model's parameters.
        step_gradients: between two steps, as the program reads and changes them.
        record: measurements of the last steps.
        seed: of all random numbers.
        flop_counts: of the open step, if the ds_config's flops_profiler asks for a table of it.
    """

    model: nn.Module
    state: EngineState
    settings: EngineSettings
    scaler: LossScaler
    optimizer: Any
    lr_scheduler: Any
    override: OptimizerOverride | None
    links: ParameterLinks
    step_gradients: StepGradients
    record: StepRecord
    model_calls: ModelCalls
    replaced_forward: ReplacedForward
    composer: PlanComposer
    seed: int
    warnings: OneTimeWarnings
    allocator_retries: AllocatorRetries
    counters: Counters = field(default_factory=Counters)
    output_kinds: OutputKinds = field(default_factory=OutputKinds)
    first_steps: FirstSteps = field(default_factory=FirstSteps)
    flop_counts: FlopCounts | None = None

    @property
    def runtime(self) -> Runtime:
        """What runs the model."""
        return self.state.runtime

    @property
    def world(self) -> SingleProcess:
        """The processes that train the model."""
        return self.state.world

    @property
    def planner(self) -> Planner:
        """The measurements of the model, and its plan."""
        return self.state.planner

    @property
    def executor(self) -> Executor:
        """What runs plans."""
        return self.state.executor

    @property
    def health(self) -> EngineHealth:
        """Whether the engine can go on."""
        return self.state.health

    @property
    def is_profiled_step(self) -> bool:
        """Whether the ds_config's flops_profiler asks for a table of the open step, from this process."""
        values = self.settings.now.values
        is_due = self.counters.global_steps == values["flops_profiler.profile_step"]
        return is_due and values["flops_profiler.enabled"] and self.world.rank == 0

    # ---- what the model's forward does

    @property
    def forward_changes_buffers(self) -> bool:
        """Whether forward passes change buffers, so that they have to run in the order of their calls."""
        return bool(self.runtime.layer_calls.changing_buffers) or self.runtime.installation.buffers.are_written

    @property
    def forward_runs_at_calls(self) -> bool:
        """Whether forward passes run one by one, each at its call, which is logged once.

        A layer that is called several times in each, and changes its buffers, would change them in another order.
        """
        calls = self.planner.graph.calls
        for layer in self.runtime.layer_calls.changing_buffers:
            if calls.count(layer) > 1:
                self._log_forward_at_calls(layer, calls.count(layer))
                return True
        return False

    def _log_forward_at_calls(self, layer: int, calls: int) -> None:
        if self.first_steps.logged_forward_at_calls:
            return
        self.first_steps.logged_forward_at_calls = True
        _logger.warning(
            "layer %s is called %d times in each forward pass and changes its buffers: the forward passes of a group "
            "run one by one, and each swaps in all packs that do not stay on the device; their backward passes share swaps "
            "as always. Name a module that contains all of these calls in harmony.layers, to make it one layer.",
            self.state.layers[layer].name,
            calls,
        )

    # ---- what a step may do

    @property
    def steps_whole(self) -> bool:
        """Whether the optimizer's own `step` has to be called with all gradients there."""
        return self.runtime.optimizer is not None and self.runtime.optimizer.steps_whole

    def norm_options(self) -> NormOptions | None:
        """Return how updates depend on the norm of all gradients; None: they do not wait for it."""
        config = self.settings.now
        if not config.deferred_update:
            return None
        return NormOptions(config.gradient_clipping, self.scaler.scale, config.skip_overflow, config.refuses_unused)

    def check_can_propagate(self) -> None:
        """Raise UsageError if parameters would get gradients, and there is no optimizer for them.

        A frozen model needs none: gradients go through it to what its inputs are made of.
        """
        if self.state.optimizer is None and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UsageError(
                "must provide optimizer during init in order to use backward: name one in the ds_config or pass one, or "
                "freeze the whole model (requires_grad_(False)) before initialize if gradients are to go through it alone. "
                "Gradients are gathered for the optimizer's parameters alone."
            )

    def apply_user_edits(self, micro_batches_wait: bool) -> None:
        """Let masters and layers follow the user's edits of weights and modules, before the model runs or is updated.

        Raises:
            ModelError: a layer's forward was replaced, or a quantized weight written, while micro-batches wait.
        """
        interception = self.state.interception
        if not micro_batches_wait:
            self.links.apply_user_writes()
            interception.adopt_replaced()
            return
        self.links.check_packed_unwritten()
        if interception.replaced():
            raise ModelError(
                "the forward of a layer was replaced while micro-batches wait that were called before: replace it before "
                "the first micro-batch of a step."
            )
