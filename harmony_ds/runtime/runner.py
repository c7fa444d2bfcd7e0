"""Measures, plans and runs groups of micro-batches; recovers from whatever a step may raise."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec, positions_of, slab_bytes
from harmony_ds.errors import DoesNotFitError, EngineFailedError, UnsupportedError, UsageError
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.host_store import ungated
from harmony_ds.offload.updater import Clipping
from harmony_ds.profiler.costs import CostTable
from harmony_ds.runtime.call_state import CallStates
from harmony_ds.runtime.executor import UNCALLED, Executor, Parts, Work
from harmony_ds.runtime.layer_call import InputChangedError
from harmony_ds.runtime.measuring import Measuring, Shapes, shapes_of
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError
from harmony_ds.runtime.sample import Sample
from harmony_ds.runtime.streaming import Streamer
from harmony_ds.runtime.timeline import NOT_RECORDED, StepTimeline
from harmony_ds.scheduler.choose import Request
from harmony_ds.scheduler.compose import Group, compose_forward, compose_step
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Plan, Policy, ResidentSet, Task, TaskKind, parked
from harmony_ds.scheduler.resident import why_not_resident
from harmony_ds.scheduler.saved import adopt
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.sizes import WHOLE, Sizes, rank_sizes
from harmony_ds.scheduler.trace import ExecutedStep, trace_of
from harmony_ds.scheduler.validate import validate

_logger = logging.getLogger(__name__)

_TOP = 10


class Runner:
    """Everything between a queued micro-batch and an updated weight."""

    def __init__(
        self, parts: Parts, decomposition: Decomposition, graph: LayerGraph, config: Config, saved: Plan | None = None
    ) -> None:
        """`saved`: a plan to run in the place of a search."""
        self._parts = parts
        self._parameters = parts.residency.parameters
        self._layers = decomposition.layers
        self._graph = graph
        self._settings = config.harmony
        self._saved = saved
        self._group_size = config.gradient_accumulation_steps
        self._element = ElementBytes(config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)
        self._policy = Policy.of(config.harmony, config.deferred_update)
        self.wanted_sizes = Sizes.wanted(config.harmony.micro_batch) if saved is None else Sizes.of(saved.policy)
        self._costs: CostTable | None = None
        self._measured: list[tuple[Shapes, bytes]] = []
        self._choices: tuple[Choice, ...] = ()
        self._plan: Plan | None = None
        self._tasks: dict[tuple[Group, Policy], Work] = {}
        self._sizes = WHOLE
        self._said_alone: str | None = None
        self._outgrown = False  # a step took more than planned
        self._before_bytes: int | None = None  # on the device when the first plan was made
        self._after_norm: Work | None = None  # what is left of a step whose gradients are being looked at
        self.executor = Executor(parts, graph.resident)
        profile = None if self._settings.profile is None else Path(self._settings.profile)
        self.measuring = Measuring(parts, self._layers, graph, profile, self._element.gradient)
        self.measuring.abandon = self.executor.abandon
        self._streamer = Streamer(
            parts.device, self._layers, parts.residency, parts.device_store, parts.lending, parts.layer_calls
        )
        self.failed: str | None = None
        self.destroyed = False

    # ---- measuring and planning

    @property
    def calls(self) -> CallStates:
        """What calls of the model saw."""
        return self._parts.calls

    @property
    def in_order(self) -> bool:
        """Whether forward passes must run in the order of their calls, because one changes what the next may see."""
        calls = self._parts.calls
        return bool(self._parts.layer_calls.changing_buffers) or calls.advances or self._why_alone() is not None

    @property
    def alone(self) -> str | None:
        """Why every forward pass must run to its end before the next one begins; None: it need not. Said once."""
        reason = self._why_alone()
        if reason is not None and reason != self._said_alone:
            self._said_alone = reason
            _logger.warning(
                "%s: the forward passes of a group run one by one, and each swaps the whole model in; their backward "
                "passes share swaps as always.",
                reason,
            )
        return reason

    def _why_alone(self) -> str | None:
        calls = self._graph.calls
        for layer in self._parts.layer_calls.changing_buffers:
            if calls.count(layer) > 1:
                name = self._layers[layer].name
                return f"layer {name} is called {calls.count(layer)} times in each forward pass and changes its buffers"
        return self._parts.calls.alone or self.measuring.sequential

    @property
    def plan(self) -> Plan | None:
        """The plan for a full group; None before the first micro-batch has been seen."""
        return self._plan

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The plan and the next best ones, with what was predicted of them."""
        return self._choices

    @property
    def sizes(self) -> Sizes:
        """Rows of the pieces that layer calls are cut into."""
        return self._sizes

    @property
    def graph(self) -> LayerGraph:
        """Layers, and their call order once a micro-batch has been seen."""
        return self._graph

    def covers(self, inputs: Any, modes: bytes | None = None) -> bool:
        """Whether no tensor of `inputs` is larger than what has been measured in `modes` (None: in any)."""
        shapes = shapes_of(inputs)
        return any(modes in (None, own) and _dominates(known, shapes) for known, own in self._measured)

    def measure(self, sample: Sample, queued: Sequence[MicroBatch]) -> None:
        """Measures the model with one micro-batch and plans anew.

        Args:
            queued: micro-batches of the same step whose forward pass ran already; they are moved to the new plan.

        Raises:
            DoesNotFitError: no plan fits.
            BaseException: whatever the model raised.
        """
        self.check_usable()
        if self._parts.updater is not None:
            self._parts.updater.wait_all()
        self._keep_gradients()
        self._parts.device_store.drop()
        if self._before_bytes is None:
            self._before_bytes = self._others_bytes()
        wanted = self.wanted_sizes
        if wanted is not None:
            tables: Iterator[tuple[Sizes, CostTable]] = iter([(wanted, self.measuring.table(sample, wanted))])
        else:
            tables = self._by_size(sample)
        self._adopt(tables, queued)
        self._measured.append((shapes_of(sample.inputs), sample.modes))

    def _keep_gradients(self) -> None:
        """Takes gradients of a step that has run in part, and that wait on the device, to the host."""
        updater, gradients = self._parts.updater, self._parts.gradients
        kept = self._parts.device_store.take_gradients()
        if kept and updater is not None and gradients is not None:
            updater.receive(gradients.on_host(kept))
            updater.measure(tuple(kept))
            self.executor.keeps_on_host = True

    def _by_size(self, sample: Sample) -> Iterator[tuple[Sizes, CostTable]]:
        """Costs in pieces of every size that promises to fit, the fastest first."""
        profile = self.measuring.profile(sample)
        graph = replace(self._graph, calls=profile.calls, resident=self.measuring.resident)
        group_size = self._group_size

        def choose(costs: CostTable, sizes: Sizes) -> Choice:
            return self._choose(graph, costs, group_size, sizes)[0]

        for sizes in rank_sizes(profile, sample.rows, choose):
            yield sizes, self.measuring.in_pieces(sample, profile, sizes)

    def _adopt(self, tables: Iterator[tuple[Sizes, CostTable]], queued: Sequence[MicroBatch]) -> None:
        """Plans with the first of `tables` with which anything fits."""
        failure: DoesNotFitError | None = None
        for sizes, measured in tables:
            table = measured if self._costs is None else self._costs.worst(measured)
            graph = replace(self._graph, calls=table.calls, resident=self.measuring.resident)
            try:
                choices = self._choose(graph, table, self._group_size, sizes)
            except DoesNotFitError as error:
                failure = error
                continue
            moved = positions_of(self._graph.calls, table.calls)
            self.executor.resident_names = self.measuring.resident
            self._costs, self._graph, self._plan, self._choices = table, graph, choices[0].plan, choices
            self._sizes = sizes
            if self._parts.gradients is not None:
                self._parts.gradients.held = held_deliveries(self._plan)
            self._tasks.clear()
            for micro_batch in queued:
                micro_batch.move(moved)
            return
        assert failure is not None
        raise failure

    def _choose(self, graph: LayerGraph, costs: CostTable, group_size: int, sizes: Sizes) -> tuple[Choice, ...]:
        machine = self.measuring.machine
        assert machine is not None
        request = self.request(graph, group_size, sizes)
        if self._saved is not None:
            return (adopt(self._saved, graph, costs, machine, self._element, request),)
        choices = search(graph, costs, machine, self._element, request, top=_TOP)
        if isinstance(self._settings.residency, int):
            for reason in why_not_resident(choices[0].plan.packing, self._settings.residency):
                _logger.warning("%s", reason)
        return choices

    def request(self, graph: LayerGraph, group_size: int, sizes: Sizes = WHOLE) -> Request:
        """What is asked of the search for a plan."""
        budget, beside = self._parts.device.budget_bytes, self.beside_bytes
        return Request(
            settings=self._settings,
            micro_batches=group_size,
            budget_bytes=None if budget is None else max(0, budget - beside),
            beside_bytes=beside if budget is None else min(beside, budget),
            resident_bytes=self._resident_bytes(graph),
            policy=replace(self._policy, forward_rows=sizes.forward, backward_rows=sizes.backward),
            resident_set=self._resident_set(graph),
        )

    @property
    def beside_bytes(self) -> int:
        """Device memory that is no part of a plan: set aside, and tensors that were there before the first plan."""
        return self._parts.device.reserve_bytes(self._group_size) + (self._before_bytes or 0)

    def _others_bytes(self) -> int:
        """Beside buffers and resident packs: tensors of the program's own, and losses that were looked at."""
        ours = self._parts.lending.copied_buffer_bytes + self._parts.device_store.nbytes
        return max(0, self._parts.device.allocated_bytes() - ours)

    def _resident_set(self, graph: LayerGraph) -> ResidentSet:
        element = self._element
        specs = [graph.parameter(name) for name in graph.resident]
        trained = [spec for spec in specs if spec.trainable]
        return ResidentSet(
            sum(slab_bytes(spec.numel, element.weight) for spec in specs),
            sum(slab_bytes(spec.numel, element.gradient) for spec in trained),
            sum(spec.numel for spec in trained),
        )

    def _resident_bytes(self, graph: LayerGraph) -> int:
        resident = self._resident_set(graph)
        gradients = resident.gradient_bytes
        if not self._parts.residency.accumulates_in_place:  # autograd's own, on their way into the sums
            trained = [graph.parameter(name) for name in graph.resident]
            gradients += sum(slab_bytes(s.numel, self._element.weight) for s in trained if s.trainable)
        return resident.weight_bytes + gradients + self._parts.lending.buffer_bytes

    def _work(self, micro_batches: Sequence[MicroBatch], part: bool = False) -> Work:
        """What a step over `micro_batches` does; `part`: as one of several, with the updates behind the norm."""
        assert self._plan is not None and self._costs is not None
        if self._outgrown or len(micro_batches) > self._plan.micro_batches:
            size = max(len(micro_batches), self._plan.micro_batches)
            self._choices = self._choose(self._graph, self._costs, size, self._sizes)
            self._plan = self._choices[0].plan
            self._tasks.clear()
            self._outgrown = False
        plan = self._plan
        group = Group(
            tuple(m.index for m in micro_batches if not m.forwarded),
            tuple(m.index for m in micro_batches if m.forwarded),
        )
        policy = plan.policy
        if part:
            # Behind the first part each micro-batch's gradient is added for itself: in the order of plain accumulation.
            first = self._after_norm is None
            policy = replace(policy, deferred_update=True, grouping=policy.grouping and first)
        work = self._tasks.get((group, policy))
        if work is None:
            tasks = compose_step(plan.packing, group, policy)
            validate(plan.packing, tasks, group, policy)
            work = self._tasks[group, policy] = replace(self._with_memory(tasks), policy=policy)
        return replace(work, micro_batches={m.index: m for m in micro_batches})

    def _with_memory(self, tasks: tuple[Task, ...]) -> Work:
        assert self._plan is not None and self._costs is not None
        packs = self._plan.packs
        walked = walk_memory(packs, tasks, self._costs)
        return Work(
            packs, tasks, walked.activation_bytes, self._graph.calls, {}, self._plan.policy, parked(packs, tasks)
        )

    # ---- running

    def check_usable(self) -> None:
        """Raises EngineFailedError after a failure that left some layers updated and others not.

        A failure of the background update that nobody has seen yet surfaces as itself first.
        """
        self.check_alive()
        updater = self._parts.updater
        if updater is not None:
            updater.surface()
        if self.failed is None and updater is not None and updater.failure is not None:
            self.failed = f"the background update failed: {updater.failure!r}"
        if self.failed is not None:
            raise EngineFailedError(
                f"this engine cannot go on: {self.failed}. Some layers were updated and others not. Build a new engine "
                "and load the last checkpoint."
            )

    def check_alive(self) -> None:
        """Raises UsageError after `destroy`."""
        if self.destroyed:
            raise UsageError(
                "this engine has been destroyed, and its model is a plain one again: call harmony_ds.initialize to train "
                "it further."
            )

    @contextmanager
    def recording(self) -> Iterator[list[ExecutedStep]]:
        """A context whose steps are recorded; they are in the list when it has been left.

        Raises:
            RuntimeError: another one is open.
        """
        if self.executor.recorder is not NOT_RECORDED:
            raise RuntimeError("steps are being recorded already: leave the other record_steps() first.")
        steps: list[ExecutedStep] = []
        timeline, updater = StepTimeline(self._parts.device), self._parts.updater
        self.executor.recorder = timeline
        self._parts.device.watch = timeline.copies
        if updater is not None:
            updater.timed = timeline.host_work
        try:
            yield steps
        finally:
            self.executor.recorder = NOT_RECORDED
            self._parts.device.watch = None
            if updater is not None:
                updater.timed = nullcontext
        if updater is not None:
            updater.wait_all()
        steps.extend(timeline.read())

    def trace(self, executed: ExecutedStep | None) -> dict[str, Any]:
        """The predicted step, and beside it the executed one, as a Chrome trace."""
        assert self._choices and self._costs is not None
        names = tuple(layer.name for layer in self._graph.layers)
        best = self._choices[0]
        return trace_of(best.plan, best.prediction, self._costs, executed, names)

    def step(self, micro_batches: Sequence[MicroBatch], hyper: Hyper, clipping: Clipping | None) -> None:
        """Forward, backward and updates of one optimizer step; updates may still be under way on return.

        Raises:
            OffPlanError, InputChangedError: the step must be measured and run again; nothing has been updated.
            BaseException: whatever was raised on the way; `failed` says whether the engine is still usable.
        """
        self.check_usable()
        self.check_hooks()
        work = self._work(micro_batches)
        assert self._plan is not None
        # The plan's peak is that of passes that nobody looks into.
        as_planned = not any(m.forwarded for m in micro_batches)
        with self._recovering(micro_batches):
            device = self._parts.device
            others = self._others_bytes()
            device.reset_peak()
            with self.executor.recorder.step(self._plan, work.tasks):
                self.executor.run(work, hyper, clipping)
                self.executor.finish_step(work)
            # Workspaces are made when a thread first needs one, in some step.
            if as_planned:
                self._check_peak(device.peak_bytes() - others - device.reserve_bytes(len(micro_batches)))

    def until_norm(self, micro_batches: Sequence[MicroBatch], hyper: Hyper, clipping: Clipping) -> None:
        """Forward and backward of a part of an optimizer step, whose gradients wait; `after_norm` ends the step.

        Raises: as `step`.
        """
        self.check_usable()
        self.check_hooks()
        work = self._work(micro_batches, part=True)
        split = next(place for place, task in enumerate(work.tasks) if task.kind is TaskKind.NORM)
        with self._recovering(micro_batches):
            self.executor.run(_part_of(work, slice(0, split)), hyper, clipping)
        self._after_norm = replace(_part_of(work, slice(split, None)), micro_batches={})

    def after_norm(self, hyper: Hyper, clipping: Clipping) -> None:
        """The norm and the updates of the step that `until_norm` ran the parts of."""
        self.check_usable()
        work, self._after_norm = self._after_norm, None
        assert work is not None
        with self._recovering(()):
            self.executor.run(work, hyper, clipping)
            self.executor.finish_step(work)
        self.executor.keeps_on_host = False

    @property
    def steps_whole(self) -> bool:
        """Whether the optimizer's own `step` has to be called with all gradients there."""
        return self._parts.optimizer is not None and self._parts.optimizer.steps_whole

    def step_whole(self, clipping: Clipping) -> None:
        """In the place of `after_norm`, for an optimizer that has to be stepped as a whole: nothing is under way after."""
        self.check_usable()
        parts, updater, executor = self._parts, self._parts.updater, self.executor
        assert parts.optimizer is not None and updater is not None
        self._after_norm = None
        executor.norm, executor.overflow, executor.updates_issued = None, False, 0
        names = tuple(parts.optimizer.trained)
        with self._recovering(()):
            executor.release_resident(wanted=True)
            self._keep_gradients()
            parts.device_store.drop()
            executor.receive_own(names)
            updater.measure(names)
            executor.norm = updater.norm(clipping)
            norm = executor.norm.result()
            gradients = updater.take(names)
            if clipping.skip_overflow and norm.overflow:
                executor.overflow = True
                return
            if norm.coefficient is not None:
                for gradient in gradients.values():
                    gradient.mul_(norm.coefficient)
            executor.updates_issued = 1  # from here on, nobody knows what has been changed
            parts.optimizer.step_whole(gradients)
            parts.follow_masters(gradients)

    def update_only(self, hyper: Hyper, clipping: Clipping | None) -> bool:
        """Updates from what the user's own backward passes left on the host's parameters; False if that is nothing."""
        self.check_usable()
        parts, updater = self._parts, self._parts.updater
        assert parts.optimizer is not None and updater is not None
        names = tuple(parts.optimizer.trained)
        updater.wait_all()
        parts.device_store.drop()
        if not self.executor.receive_own(names):
            return False
        if parts.optimizer.steps_whole:
            self.step_whole(clipping or Clipping())
            return True
        norm = None
        if clipping is not None:
            updater.measure(names)
            norm = updater.norm(clipping)
        updater.update(UNCALLED, names, hyper, norm)
        updater.wait_all()
        return True

    # ---- gradients of a step that has run in part

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name` that waits for its update, wherever it is: the tensor itself."""
        assert self._parts.updater is not None
        if self.executor.keeps_on_host and self._parts.device_store.leaves((name,)):
            self.executor.receive_on_device((name,))
        for found in (
            self.executor.resident_gradient(name),
            self._parts.device_store.gradient(name),
            self._parts.updater.gradient(name),
        ):
            if found is not None:
                return found
        return None

    def changed(self, names: Iterable[str]) -> None:
        """The gradients of `names` may have been changed: their norms are taken again."""
        assert self._parts.updater is not None
        self._parts.updater.measure(tuple(names))

    def drop_gradients(self, names: Iterable[str]) -> None:
        """Forgets what waits for the update of `names`."""
        assert self._parts.updater is not None
        self._parts.updater.drop(tuple(names))
        self._parts.device_store.forget_gradients(names)
        for name in names:
            self.executor.forget_resident_gradient(name)

    def check_hooks(self) -> None:
        """Raises UnsupportedError if a hook of the user's would see a gradient in parts."""
        assert self._plan is not None
        with ungated():
            hooked = {name for name, parameter in self._parameters.items() if parameter._backward_hooks}
        if not hooked:
            return
        calls = Counter(name for layer in self._graph.calls for name in self._layers[layer].parameters)
        for name in sorted(hooked):
            if calls[name] > 1 or self._plan.policy.backward_rows:
                raise UnsupportedError(
                    f"{name} has a hook on its gradient, which comes in parts here: it is used by {calls[name]} layer calls"
                    f"{', in pieces of a micro-batch' if self._plan.policy.backward_rows else ''}. Change its gradient "
                    "between backward() and step() instead, through .grad."
                )

    def _check_peak(self, peak_bytes: int) -> None:
        """A step that took more than planned is said aloud, and what it took is planned for from the next one on."""
        assert self._plan is not None and self._costs is not None
        excess = peak_bytes - self._plan.peak_bytes
        if excess <= 0:
            return
        _logger.warning(
            "this step took %s bytes of device memory, %s more than planned: the model takes more with some data than "
            "with what it was measured with. From now on plans hold a margin for it.",
            f"{peak_bytes:,}",
            f"{excess:,}",
        )
        self._costs = replace(self._costs, margin_bytes=self._costs.margin_bytes + excess)
        self._outgrown = True

    def forward_now(self, micro_batch: MicroBatch) -> None:
        """The forward pass of one micro-batch, because somebody wants its outputs."""
        self.check_usable()
        assert self._plan is not None
        tasks = compose_forward(self._plan.packing, micro_batch.index, self._plan.policy)
        work = replace(self._with_memory(tasks), micro_batches={micro_batch.index: micro_batch})
        with self._recovering([micro_batch]):
            self.executor.run(work)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The forward passes of a group without gradients, each pack swapped in once for all of them."""
        self.check_usable()
        assert self._plan is not None and self._costs is not None
        packs, policy = self._plan.packs, self._plan.policy
        tasks = [
            task
            for index in self._plan.packing.backward
            for task in (
                Task(TaskKind.SWAP_IN, index),
                *(Task(TaskKind.FORWARD, index, m.index) for m in micro_batches),
                Task(TaskKind.EVICT, index),
            )
            if task.kind is TaskKind.FORWARD or index not in policy.resident
        ]
        costs = [replace(cost, stash_bytes=0) for cost in self._costs.costs]
        walked = walk_memory(packs, tuple(tasks), replace(self._costs, costs=tuple(costs), held_bytes=0))
        by_index = {m.index: m for m in micro_batches}
        work = Work(packs, tuple(tasks), walked.activation_bytes, self._graph.calls, by_index, policy)
        with self._recovering(micro_batches):
            self.executor.run(work)
        self.executor.release_resident(wanted=False)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """A context in which the model can be called without gradients."""
        self.check_usable()
        if self._parts.updater is not None:
            self._parts.updater.wait_all()
        with (
            self._parts.calls.running(users=True),
            self._streamer.streaming(self._graph.resident, self._graph.calls),
        ):
            yield

    @contextmanager
    def _recovering(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        with self._parts.calls.running():
            try:
                yield
            except BaseException as error:
                self.recover(error, micro_batches)
                raise

    def recover(self, error: BaseException, micro_batches: Sequence[MicroBatch]) -> None:
        """After `error` in a step: ends lanes, frees the device, drops gradients; decides whether one can go on."""
        for micro_batch in micro_batches:
            micro_batch.abandon()
        self.executor.abandon()
        self._after_norm = None
        updater = self._parts.updater
        if updater is not None and updater.failure is not None:
            self.failed = f"the background update failed: {updater.failure!r}"
        elif self.executor.updates_issued:
            self.failed = f"a step failed after {self.executor.updates_issued} packs had been updated: {error!r}"
        elif updater is not None:
            updater.discard()


def _part_of(work: Work, part: slice) -> Work:
    return replace(work, tasks=work.tasks[part], activation_bytes=work.activation_bytes[part])


def held_deliveries(plan: Plan) -> int:
    """Packs whose gradients must wait on the host: for other micro-batches' or other packs' of a parameter that both
    have, or for the end of the backward pass.
    """
    packing = plan.packing
    if plan.policy.gradients_wait:
        return len(packing.backward)
    delivered: set[str] = set()
    held = 0
    packs = [packing.packs[index] for index in reversed(packing.backward)]
    for pack in (pack for pack in packs if pack.needs_backward):
        first = set(pack.parameters) - delivered
        held += bool(first - set(pack.owned))
        delivered |= first
    return held


def layer_graph(decomposition: Decomposition, parameters: dict[str, torch.nn.Parameter]) -> LayerGraph:
    """The graph of a model whose call order is not known yet."""
    return LayerGraph(
        tuple(LayerSpec(layer.index, layer.name, layer.parameters) for layer in decomposition.layers),
        tuple(ParameterSpec(name, tuple(p.shape), p.requires_grad) for name, p in parameters.items()),
        (),
        decomposition.resident,
    )


def _dominates(known: Shapes, shapes: Shapes) -> bool:
    return len(known) == len(shapes) and all(
        len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in zip(known, shapes, strict=True)
    )


__all__ = ["DoesNotFitError", "InputChangedError", "OffPlanError", "Runner", "layer_graph"]
