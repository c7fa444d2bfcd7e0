"""Runs groups of micro-batches as planned, and recovers from whatever a step may raise."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from harmony_ds.calls.call_state import CallStates
from harmony_ds.calls.own_backward import guarded_hooks
from harmony_ds.calls.places import Places
from harmony_ds.calls.recorded_call import InputChangedError
from harmony_ds.calls.tensor_hooks import Noticed, noticing_hooks
from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import CallChangedError, EngineFailedError, UnsupportedError, UsageError
from harmony_ds.measuring.sample import Sample
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.host_store import ungated
from harmony_ds.offload.updater import Clipping
from harmony_ds.parallel import Alone
from harmony_ds.runtime.at_once import step_whole, update_own
from harmony_ds.runtime.executor import Executor
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.runtime.parts import Parts
from harmony_ds.runtime.streaming import Streamer
from harmony_ds.scheduler.plan import Plan, TaskKind
from harmony_ds.scheduler.trace import ExecutedStep
from harmony_ds.stepping.lessons import Lessons
from harmony_ds.stepping.planner import Planner, others_bytes
from harmony_ds.stepping.ticket import DESTROYED

_logger = logging.getLogger(__name__)


class Runner:
    """Everything between a queued micro-batch and an updated weight."""

    def __init__(
        self, parts: Parts, decomposition: Decomposition, graph: LayerGraph, config: Config, saved: Plan | None
    ) -> None:
        """`saved`: a plan to run in the place of a search."""
        self._parts = parts
        self._parameters = parts.residency.parameters
        self._layers = decomposition.layers
        self._said: set[str] = set()
        self._after_norm: Plan | None = None  # what is left of a step whose gradients are being looked at
        self.planner = Planner(parts, decomposition, graph, config, saved)
        self._lessons = Lessons(parts.timeline, self.planner.learn, self._finish_updates)
        self.executor = Executor(parts)
        self._streamer = Streamer(parts, self._layers)
        self._failed: str | None = None
        self._destroyed = False

    @property
    def world(self) -> Alone:
        """The processes that train this model."""
        return self._parts.world

    # ---- how forward passes may run

    @property
    def calls(self) -> CallStates:
        """What calls of the model saw."""
        return self._parts.calls

    @property
    def in_order(self) -> bool:
        """Whether forward passes must run in the order of their calls, because one changes what the next may see."""
        return self.changes_buffers or self._parts.calls.advances or self._why_alone() is not None

    @property
    def changes_buffers(self) -> bool:
        """Whether forward passes change buffers, which a state dict may hold."""
        return bool(self._parts.layer_calls.changing_buffers) or self._parts.calls.writes

    @property
    def at_their_calls(self) -> bool:
        """Whether forward passes cannot be put off, because what they leave or draw may matter to the program."""
        return bool(self.left) or self._parts.random.draws_from_others

    @property
    def left(self) -> Places:
        """Attributes and variables that forward passes write to, where the program may look for it as soon as its call has
        returned. Said once.
        """
        touched = self._parts.random.touched
        if touched and "left" not in self._said:
            self._say_once(
                "left",
                f"the model's forward sets {', '.join(sorted({place.key for place in touched}))}, which the program may "
                "read right after its call: the forward passes of engine(...) run one by one, at their calls, and each "
                "swaps the whole model in; their backward passes share swaps as always, and train_batch() groups all. "
                "Return the value among the outputs instead.",
            )
        return touched

    @property
    def alone(self) -> str | None:
        """Why every forward pass must run to its end before the next one begins; None: it need not. Said once."""
        reason = self._why_alone()
        if reason is not None:
            self._say_once(
                reason,
                f"{reason}: the forward passes of a group run one by one, and each swaps the whole model in; their "
                "backward passes share swaps as always.",
            )
        return reason

    @property
    def hooked(self) -> bool:
        """Whether code of the program's runs in backward passes, which may depend on what the program does meanwhile, and
        leave what it looks at: each backward pass then runs when it is asked for. Said once.
        """
        hook = self._parts.calls.backward_hook
        if hook is None:
            with ungated():
                hook = next((f"a hook of {n}" for n, p in self._parameters.items() if p._backward_hooks), None)
        if hook is not None:
            self._say_once(
                "hooked",
                f"{hook} runs in backward passes, and what it leaves may be looked at behind each: the micro-batches of a "
                "group are propagated back from one by one, and each swaps the whole model in.",
            )
        return hook is not None

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.warning("%s", text)

    def _note_hook(self, name: str, _: Tensor) -> None:
        self._parts.calls.tensor_hook = name
        self._parts.layer_calls.outputs_hooked = True

    def _noticing_hooks(self, noticed: Noticed) -> AbstractContextManager[None]:
        """A context in which forward passes run, and `noticed` is told of hooks on tensors, unless it is known that there
        are some.
        """
        return noticing_hooks(noticed if self._parts.calls.tensor_hook is None else self.executor.note_hook)

    def _guarded(self) -> AbstractContextManager[None]:
        """A context in which backward passes run."""
        return guarded_hooks(lambda: self._parts.layer_calls.propagating)

    def _why_alone(self) -> str | None:
        calls = self.planner.graph.calls
        for layer in self._parts.layer_calls.changing_buffers:
            if calls.count(layer) > 1:
                name = self._layers[layer].name
                return f"layer {name} is called {calls.count(layer)} times in each forward pass and changes its buffers"
        return self._parts.calls.alone or self.planner.measuring.sequential

    # ---- whether it can run

    @property
    def failed(self) -> str | None:
        """Why nothing can be trained any more; None: it can."""
        updater = self._parts.updater
        if self._failed is None and updater is not None and updater.failure is not None:
            self._failed = f"the background update failed: {updater.failure!r}"
        return self._failed

    def fail(self, why: str) -> None:
        """From now on nothing runs: some layers were changed and others not."""
        self._failed = why
        self.world.give_up(f"it cannot go on: {why}")

    def destroy(self) -> None:
        """From now on nothing runs: the model is a plain one again."""
        self._destroyed = True
        self.executor.abandon()

    def check_usable(self) -> None:
        """Raises EngineFailedError after a failure that left some layers updated and others not.

        A failure of the background update that nobody has seen yet surfaces as itself first.
        """
        self.check_alive()
        updater = self._parts.updater
        if updater is not None:
            updater.surface()
        if self.failed is not None:
            raise EngineFailedError(
                f"this engine cannot go on: {self.failed}. Some layers were updated and others not. Build a new engine "
                "and load the last checkpoint."
            )

    def check_alive(self) -> None:
        """Raises UsageError after `destroy`."""
        if self._destroyed:
            raise UsageError(DESTROYED)

    # ---- steps

    def measure(self, sample: Sample, queued: Sequence[MicroBatch]) -> None:
        """Measures the model with one micro-batch and plans anew.

        Args:
            queued: micro-batches of the same step whose forward pass ran already; they are moved to the new plan.

        Raises:
            DoesNotFitError: no plan fits, or not even one layer at a time.
            BaseException: whatever the model raised.
        """
        self.check_usable()
        if self._parts.updater is not None:
            self._parts.updater.wait_all()
        self.executor.gathered.to_host()
        self._parts.device_store.drop()
        with self._noticing_hooks(self._note_hook), self._guarded():
            moved = self.planner.measure(sample)
        for micro_batch in queued:
            micro_batch.move(moved)

    @contextmanager
    def recording(self) -> Iterator[list[ExecutedStep]]:
        """A context whose steps are recorded; they are in the list when it has been left.

        Raises:
            RuntimeError: another one is open.
        """
        self._lessons.forget()
        with self._parts.timeline.recording(self._finish_updates) as steps:
            yield steps

    def _finish_updates(self) -> None:
        if self._parts.updater is not None:
            self._parts.updater.wait_all()

    def step(self, micro_batches: Sequence[MicroBatch], hyper: Hyper, clipping: Clipping | None) -> None:
        """Forward, backward and updates of one optimizer step; updates may still be under way on return.

        Raises:
            OffPlanError, InputChangedError: the step must be measured and run again; nothing has been updated.
            BaseException: whatever was raised on the way; `failed` says whether the engine is still usable.
        """
        self.check_usable()
        self._check_can_run(micro_batches)
        self._lessons.learn(self.planner.plan)
        begun = self.executor.begun
        plan = self.planner.step(micro_batches, begun)
        # The plan's peak is that of passes that nobody looks into.
        as_planned = not any(m.forwarded for m in micro_batches)
        with self._recovering(micro_batches):
            device = self._parts.device
            others = others_bytes(self._parts)
            device.reset_peak()
            lesson = self._lesson(plan) if as_planned and not begun else nullcontext()
            with lesson, self._noticing_hooks(_refuse_hook), self._guarded(), self._parts.timeline.step(plan):
                self.executor.run(plan, micro_batches, hyper, clipping)
                self.executor.updates.promise_norm()
            # Workspaces are made when a thread first needs one, in some step.
            set_aside = device.reserve_bytes() + self.planner.exchange_bytes(plan)
            self.planner.check_peak(device.peak_bytes() - others - set_aside if as_planned else 0)

    def _lesson(self, plan: Plan) -> AbstractContextManager[None]:
        """Around a step by `plan`, from which the planner may learn if it is a full one."""
        whole = self.planner.plan
        assert whole is not None
        if not self.planner.learns or (plan.micro_batches, plan.policy) != (whole.micro_batches, whole.policy):
            return nullcontext()
        return self._lessons.step(whole, self.planner.choices[0].prediction.step_ms)

    def until_norm(self, micro_batches: Sequence[MicroBatch], hyper: Hyper, clipping: Clipping) -> None:
        """Forward and backward of a part of an optimizer step, whose gradients wait; `after_norm` ends the step.

        Raises: as `step`.
        """
        self.check_usable()
        self._check_can_run(micro_batches)
        first = self._after_norm is None
        part, rest = self.planner.part_of_step(micro_batches, self.executor.begun, first)
        with self._recovering(micro_batches, part=True), self._noticing_hooks(_refuse_hook), self._guarded():
            self.executor.run(part, micro_batches, hyper, clipping)
            self._after_norm = rest

    @property
    def has_gathered(self) -> bool:
        """Whether gradients of a part of a step wait."""
        return self._after_norm is not None

    def after_norm(self, hyper: Hyper, clipping: Clipping) -> None:
        """The norm and the updates of the step that `until_norm` ran the parts of."""
        self.check_usable()
        rest, self._after_norm = self._after_norm, None
        assert rest is not None
        with self._recovering(()):
            if self.steps_whole:
                self.executor.run(rest.until(TaskKind.NORM), (), hyper, clipping)
                step_whole(self._parts, self.executor.gathered, clipping, self.executor.updates.outcome)
            else:
                self.executor.run(rest, (), hyper, clipping)
        self.executor.gathered.used()

    @property
    def steps_whole(self) -> bool:
        """Whether the optimizer's own `step` has to be called with all gradients there."""
        return self._parts.optimizer is not None and self._parts.optimizer.steps_whole

    def update_only(self, hyper: Hyper, clipping: Clipping | None) -> bool:
        """Updates from what the user's own backward passes left on the host's parameters; False if that is nothing."""
        self.check_usable()
        optimizer = self._parts.optimizer
        if optimizer is None or not self._parts.own.are_there(optimizer.trained):
            return False
        with self._recovering(()):
            update_own(self._parts, self.executor.gathered, hyper, clipping, self.executor.begin())
        return True

    def _check_can_run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """What is refused before anything runs."""
        self.check_hooks()
        for micro_batch in micro_batches:
            self._parts.layer_calls.check_replayed(call for _, call in micro_batch.calls)
            micro_batch.check_unwritten()

    def check_hooks(self) -> None:
        """Raises UnsupportedError if a hook of the user's would see a gradient in parts."""
        with ungated():
            hooked = {name for name, parameter in self._parameters.items() if parameter._backward_hooks}
        if not hooked:
            return
        plan = self.planner.plan
        in_slices = plan is not None and bool(plan.policy.backward_rows)
        calls = Counter(name for layer in self.planner.graph.calls for name in self._layers[layer].parameters)
        for name in sorted(hooked):
            if calls[name] > 1 or in_slices:
                raise UnsupportedError(
                    f"{name} has a hook on its gradient, which comes in parts here: it is used by {calls[name]} layer calls"
                    f"{', in slices of a micro-batch' if in_slices else ''}. Change its gradient "
                    "between backward() and step() instead, through .grad."
                )

    # ---- without gradients

    def forward_now(self, micro_batch: MicroBatch) -> None:
        """The forward pass of one micro-batch, because somebody wants its outputs."""
        self.check_usable()
        with self._recovering([micro_batch], part=True), self._noticing_hooks(_measure_again):
            self.executor.run(self.planner.forward(micro_batch, self.executor.begun), [micro_batch])

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The forward passes of a group without gradients, each pack swapped in once for all of them."""
        self.check_usable()
        with self._recovering(micro_batches):
            self.executor.run(self.planner.evaluation(micro_batches, self.executor.begun), micro_batches)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """A context in which the model can be called without gradients."""
        self.check_usable()
        if self._parts.updater is not None:
            self._parts.updater.wait_all()
        with (
            self._parts.calls.running(users=True),
            self._streamer.streaming(self.planner.graph.unlayered, self.planner.graph.calls),
        ):
            yield

    @contextmanager
    def _recovering(self, micro_batches: Sequence[MicroBatch], part: bool = False) -> Iterator[None]:
        """`part`: of a step, whose other parts are as they were after a failure before anything was propagated back."""
        self.executor.begin()
        with self._parts.calls.running():
            try:
                yield
            except BaseException as error:
                for micro_batch in micro_batches:
                    micro_batch.abandon()
                if part and not self.executor.propagated:
                    self.executor.abandon_run()
                else:
                    self._recover(error)
                raise

    def end_step(self) -> None:
        """Whatever became of the last step, another begins: nothing stays of one that has run in part and was not taken."""
        if (self.has_gathered or self.executor.begun) and not self._destroyed:
            self._drop()

    def _recover(self, error: BaseException) -> None:
        """After `error` in what was run last: drops the step, and decides whether one can go on."""
        outcome = self.executor.updates.outcome
        if self.failed is None and (outcome.updates_issued or outcome.others_update):
            self.fail(f"a step failed after {outcome.updates_issued} packs had been updated: {error!r}")
        self._drop()

    def _drop(self) -> None:
        """Frees the device, and drops the gradients, of a step that will not be taken."""
        self.executor.abandon()
        self._after_norm = None
        if self.failed is None and self._parts.updater is not None:
            self._parts.updater.discard()


def _measure_again(name: str, _: Tensor) -> None:
    raise InputChangedError(f"forward calls {name}() on a tensor, which was not seen when the model was measured.")


def _refuse_hook(name: str, _: Tensor) -> None:
    raise CallChangedError(
        f"forward has begun to call {name}() on a tensor, which it did not when the model was measured. It runs later than "
        "it is called, and the program may have looked for that gradient already: let forward do so from the first step "
        "on, or look at the loss behind the call (loss.item()), so that forward runs at once."
    )
