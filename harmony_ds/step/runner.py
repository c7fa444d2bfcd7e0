"""Run groups of micro-batches as planned, and recover from errors in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import DoesNotFitError, EngineFailedError, UsageError
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import Clipping
from harmony_ds.profiling.passes import Passes
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.executor import Executor
from harmony_ds.runtime.garbage import release_frames
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.streaming import Streamer
from harmony_ds.scheduler.plan import Plan, TaskKind
from harmony_ds.step.group_plans import GroupPlans
from harmony_ds.step.planner import Planner, others_bytes
from harmony_ds.step.ticket import DESTROYED

_logger = logging.getLogger(__name__)
_SMALLER = (15, 16)
"""The share of a budget that the next plan may fill, after a step that ran out of memory that should be there."""


class Runner:
    """Runner of all that happens between a queued micro-batch and an updated weight."""

    def __init__(
        self, runtime: Runtime, decomposition: Decomposition, graph: LayerGraph, config: Config, saved: Plan | None
    ) -> None:
        """Run `saved`, if given, in the place of a plan that is searched for."""
        self.runtime = runtime
        """All that runs the model."""
        self._layers = decomposition.layers
        self._said = False
        self.proven = False
        """Whether micro-batches that run together have given the losses that they give alone."""
        self.recomputed = False
        """Whether layers have given the same when they were run again after other micro-batches had run."""
        self._end: Plan | None = None  # of a step whose gradients the program reads
        self.planner = Planner(runtime, decomposition, graph, config, saved)
        self.plans = GroupPlans(runtime, self.planner)
        self.executor = Executor(runtime)
        self._streamer = Streamer(runtime, self._layers)
        self._failed: str | None = None
        self._destroyed = False

    # ---- how forward passes may run

    @property
    def changes_buffers(self) -> bool:
        """Whether forward passes change buffers, so that their order is that of the calls."""
        return bool(self.runtime.layer_calls.changing_buffers) or self.runtime.installation.buffers.are_written

    @property
    def at_their_calls(self) -> bool:
        """Whether forward passes run one by one at their calls, which is logged once.

        A layer changes its buffers in several calls of each, which would not come in the order of plain PyTorch.
        """
        calls = self.planner.graph.calls
        layer = next((one for one in self.runtime.layer_calls.changing_buffers if calls.count(one) > 1), None)
        if layer is not None and not self._said:
            self._said = True
            _logger.warning(
                "layer %s is called %d times in each forward pass and changes its buffers: the forward passes of a group "
                "run one by one, and each swaps the whole model in; their backward passes share swaps as always. Name a "
                "module that contains all of these calls in harmony.layers, to make it one layer.",
                self._layers[layer].name,
                calls.count(layer),
            )
        return layer is not None

    # ---- whether it can run

    @property
    def failed(self) -> str | None:
        """Why nothing can be trained any more; None: it can."""
        failure = self.runtime.updater.failure
        if self._failed is None and failure is not None:
            self._failed = f"the background update failed: {failure!r}"
        return self._failed

    def fail(self, why: str) -> None:
        """Run nothing from now on: some layers were changed and others not."""
        self._failed = why
        self.runtime.world.give_up(f"it cannot go on: {why}")

    def destroy(self) -> None:
        """Run nothing from now on: the model is a plain one again."""
        self._destroyed = True
        self.executor.abandon()

    def check_usable(self) -> None:
        """Raise EngineFailedError after a failure that left some layers updated and others not.

        A failure of the background update that has not been raised yet surfaces as itself first.
        """
        self.check_alive()
        self.runtime.updater.raise_failure()
        if self.failed is not None:
            raise EngineFailedError(
                f"this engine cannot go on: {self.failed}. Some layers were updated and others not. Build a new engine "
                "and load the last checkpoint."
            )

    def check_alive(self) -> None:
        """Raise UsageError after `destroy`."""
        if self._destroyed:
            raise UsageError(DESTROYED)

    # ---- steps

    def measure(self, sample: Sample, queued: Sequence[MicroBatch]) -> None:
        """Measure the model with one micro-batch and plan anew.

        Args:
            queued: micro-batches of the same step whose forward pass ran already; they are moved to the new plan.

        Raises:
            DoesNotFitError: no plan fits, or not even one layer at a time.
        """
        self.check_usable()
        self.make_room()
        moved = self.planner.measure(sample)
        self.runtime.device.reset_peak()  # steps are not what was measured
        for micro_batch in queued:
            micro_batch.move(moved)

    @contextmanager
    def alone(self) -> Iterator[Callable[[Sample], Tensor | None]]:
        """Open a context with a function from a micro-batch to its loss, if it runs by itself. Nothing stays."""
        self.make_room()
        passes = Passes(self.runtime, self._layers, self.planner.profiler.unlayered, self.planner.rows)
        with self.runtime.contract.running(), passes.opened():
            yield passes.loss

    def make_room(self) -> None:
        """Move what is resident on the device, weights and gradients, to the host."""
        self.runtime.updater.wait_all()
        self.executor.gathered.to_host()
        self.runtime.resident_packs.drop()

    def step(self, micro_batches: Sequence[MicroBatch], hyper: Hyper, clipping: Clipping | None) -> None:
        """Run forward, backward and updates of one optimizer step; updates may still be under way on return.

        Raises:
            OffPlanError, UnseenError: the step must be measured and run again; nothing has been updated.
        """
        self._check_can_run(micro_batches)
        sets = self.plans.sets(micro_batches)
        self.plans.make_room(sets)
        plan = self.plans.step(sets, self.executor.begun)
        # The plan's peak is that of passes whose losses and outputs are not read.
        as_planned = not any(m.forwarded for m in micro_batches)
        with self._recovering(sets):
            device = self.runtime.device
            others = others_bytes(self.runtime)
            device.watch_peak()
            with self.runtime.timeline.step(plan):
                self.executor.run(plan, sets, hyper, clipping)
                self.executor.updates.promise_norm()
            # Workspaces are made when a thread first needs one, in some step.
            set_aside = device.reserve_bytes() + self.planner.exchange_bytes(plan)
            peak_bytes = 0
            if as_planned and device.peak_has_risen():
                peak_bytes = device.peak_bytes() - others - set_aside
            self.planner.check_peak(peak_bytes)

    def part(self, micro_batches: Sequence[MicroBatch], hyper: Hyper, clipping: Clipping) -> None:
        """Run forward and backward of a part of an optimizer step, whose gradients wait; `end` ends the step."""
        self._check_can_run(micro_batches)
        self.plans.make_room(micro_batches)
        part, end = self.plans.part_of_step(micro_batches, self.executor.begun, first=self._end is None)
        with self._recovering(micro_batches, part=True):
            self.executor.run(part, micro_batches, hyper, clipping)
            self._end = end

    @property
    def has_gathered(self) -> bool:
        """Whether gradients of a part of a step wait."""
        return self._end is not None

    def end(self, hyper: Hyper, clipping: Clipping) -> None:
        """Measure the norm, and update, in the step that `part` ran the parts of."""
        end, self._end = self._end, None
        assert end is not None
        with self._recovering(()):
            if self.steps_whole:
                norm = [task.kind for task in end.tasks].index(TaskKind.NORM)
                self.executor.run(end.part(0, norm), (), hyper, clipping)
                self.executor.updates.step_whole(clipping)
            else:
                self.executor.run(end, (), hyper, clipping)
        self.executor.gathered.finish_step()

    @property
    def steps_whole(self) -> bool:
        """Whether the optimizer's own `step` has to be called with all gradients there."""
        return self.runtime.optimizer is not None and self.runtime.optimizer.steps_whole

    def update_only(self, hyper: Hyper, clipping: Clipping | None) -> bool:
        """Update from what the user's own backward passes left on the host's parameters; False if that is nothing."""
        self.check_usable()
        optimizer = self.runtime.optimizer
        if optimizer is None or not self.runtime.user_gradients.exist(optimizer.trained):
            return False
        with self._recovering(()):
            self.executor.updates.update_from_user_gradients(hyper, clipping)
        return True

    def _check_can_run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Refuse what cannot run, before anything does."""
        self.check_usable()
        self.runtime.contract.check([micro_batch.state for micro_batch in micro_batches])
        for micro_batch in micro_batches:
            self.runtime.layer_calls.check_replayed(call for _, call in micro_batch.calls)
            micro_batch.check_unwritten()

    # ---- without gradients

    def forward_now(self, micro_batch: MicroBatch) -> None:
        """Run the forward pass of one micro-batch, whose outputs are read."""
        self.runtime.contract.check([micro_batch.state])
        with self._recovering([micro_batch], part=True):
            self.executor.run(self.plans.forward(micro_batch, self.executor.begun), [micro_batch])

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run the forward passes of a group without gradients, each pack swapped in once for all of them."""
        with self._recovering(micro_batches):
            self.executor.run(self.plans.evaluation(micro_batches, self.executor.begun), micro_batches)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Let the model be called without gradients while open."""
        self.check_usable()
        self.runtime.updater.wait_all()
        with (
            self.runtime.contract.running(),
            self._streamer.streaming(self.planner.graph.unlayered, self.planner.graph.calls),
        ):
            yield

    @property
    def is_streaming(self) -> bool:
        """Whether the program calls the model without gradients, in the context of `streaming`."""
        return self._streamer.is_open

    @contextmanager
    def less_memory(self) -> Iterator[Callable[[torch.OutOfMemoryError], None]]:
        """Open a context with a function that lowers the budget after memory ran out, so that the next plan needs less.

        It raises the error where another plan is no help: weights were updated already, or nothing smaller fits. The budget
        stays as low as the step needed it, unless the step failed.
        """
        device, world = self.runtime.device, self.runtime.world
        before = device.budget_bytes
        first: torch.OutOfMemoryError | None = None

        def shrink(error: torch.OutOfMemoryError) -> None:
            nonlocal first
            first = first or error
            release_frames(error)
            budget = device.budget_bytes
            if self.failed is not None or world.size > 1 or budget is None or isinstance(error, DoesNotFitError):
                raise error
            there = device.available_bytes()
            device.budget_bytes = there if there is not None and there < budget else budget * _SMALLER[0] // _SMALLER[1]
            _logger.warning(
                "the device ran out of memory in the middle of a step (%s). The step is undone and run again, planned for "
                "%s bytes instead of %s; set harmony.device_memory_gib lower to begin with that.",
                str(error).splitlines()[0],
                f"{device.budget_bytes:,}",
                f"{budget:,}",
            )

        try:
            yield shrink
        except BaseException as error:
            device.budget_bytes = before
            self.planner.reconsider_joining()
            if first is not None and isinstance(error, DoesNotFitError):
                raise first from error
            raise

    @contextmanager
    def _recovering(self, micro_batches: Sequence[MicroBatch], part: bool = False) -> Iterator[None]:
        """Drop the step on an error; of a `part` of one before anything was propagated back, that part alone."""
        self.check_usable()
        self.executor.begin()
        with self.runtime.contract.running():
            try:
                yield
            except BaseException as error:
                for micro_batch in micro_batches:
                    micro_batch.abandon()
                self.runtime.contract.settings.undo()
                if part and not self.executor.backward_begun:
                    self.executor.abandon_run()
                else:
                    self._recover(error)
                raise

    def end_step(self) -> None:
        """Drop what is left of a step that has run in part and was not taken: another begins."""
        if (self.has_gathered or self.executor.begun) and not self._destroyed:
            self._drop()

    def _recover(self, error: BaseException) -> None:
        """Drop the step after `error` in what was run last, and decide whether the engine can go on."""
        outcome = self.executor.updates.outcome
        if self.failed is None and (outcome.updates_issued or outcome.others_update):
            self.fail(f"a step failed after {outcome.updates_issued} packs had been updated: {error!r}")
        self._drop()

    def _drop(self) -> None:
        """Free the device, and drop the gradients, of a step that will not be taken."""
        self.executor.abandon()
        self._end = None
        if self.failed is None:
            self.runtime.updater.discard()
