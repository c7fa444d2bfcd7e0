"""One model's plan: measured, searched for, kept for groups of micro-batches that are like those it was made for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph, positions_of, slab_bytes
from harmony_ds.errors import DoesNotFitError
from harmony_ds.measuring.measuring import Measuring, Shapes, shapes_of
from harmony_ds.measuring.sample import Sample
from harmony_ds.profiler.costs import CostTable
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.runtime.parts import Parts
from harmony_ds.runtime.work import Work
from harmony_ds.scheduler.choose import Request
from harmony_ds.scheduler.compose import Group, compose_forward, compose_step
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Plan, Policy, Task, TaskKind, UnlayeredParameters, parked
from harmony_ds.scheduler.resident import why_not_resident
from harmony_ds.scheduler.saved import adopt
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.sizes import WHOLE, Sizes, rank_sizes
from harmony_ds.scheduler.trace import ExecutedStep, trace_of
from harmony_ds.scheduler.validate import validate

_logger = logging.getLogger(__name__)

_TOP = 10


class Planner:
    """Measures micro-batches, searches for plans, and says what a group of micro-batches has to do."""

    def __init__(
        self, parts: Parts, decomposition: Decomposition, graph: LayerGraph, config: Config, saved: Plan | None
    ) -> None:
        """`saved`: a plan to run in the place of a search."""
        self._parts = parts
        self._settings = config.harmony
        self._saved = saved
        self._group_size = config.gradient_accumulation_steps
        self._element = ElementBytes(config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)
        self._policy = Policy.of(config.harmony, config.deferred_update)
        self.wanted_sizes = Sizes.wanted(config.harmony.micro_batch) if saved is None else Sizes.of(saved.policy)
        """As configured; None: as the search finds best."""
        self._graph = graph
        self._costs: CostTable | None = None
        self._sizes = WHOLE
        self._measured: list[tuple[Shapes, bytes]] = []
        self._works: dict[tuple[Group, Policy], Work] = {}
        self._outgrown = False  # a step took more than planned
        self._before_bytes: int | None = None  # on the device when the first plan was made
        self.choices: tuple[Choice, ...] = ()
        """The plan and the next best ones, with what was predicted of them."""
        profile = None if config.harmony.profile is None else Path(config.harmony.profile)
        self.measuring = Measuring(parts, decomposition.layers, graph, profile, self._element.gradient)

    @property
    def plan(self) -> Plan | None:
        """The plan for a full group; None before the first micro-batch has been seen."""
        return self.choices[0].plan if self.choices else None

    @property
    def graph(self) -> LayerGraph:
        """Layers, and their call order once a micro-batch has been seen."""
        return self._graph

    @property
    def sizes(self) -> Sizes:
        """Rows of the pieces that layer calls are cut into."""
        return self._sizes

    def covers(self, inputs: Any, modes: bytes | None = None) -> bool:
        """Whether no tensor of `inputs` is larger than what has been measured in `modes` (None: in any)."""
        shapes = shapes_of(inputs)
        return any(modes in (None, own) and _dominates(known, shapes) for known, own in self._measured)

    # ---- measuring and searching

    def measure(self, sample: Sample) -> tuple[int, ...]:
        """Measures the model with one micro-batch and plans anew; nothing may be under way.

        Returns:
            Where each place of the call order before is in the new one.

        Raises:
            DoesNotFitError: no plan fits.
            BaseException: whatever the model raised.
        """
        if self._before_bytes is None:
            self._before_bytes = others_bytes(self._parts)
        wanted = self.wanted_sizes
        if wanted is not None:
            moved = self._adopt(iter([(wanted, self.measuring.table(sample, wanted))]))
        else:
            moved = self._adopt(self._by_size(sample))
        self._measured.append((shapes_of(sample.inputs), sample.modes))
        return moved

    def _by_size(self, sample: Sample) -> Iterator[tuple[Sizes, CostTable]]:
        """Costs in pieces of every size that promises to fit, the fastest first."""
        profile = self.measuring.profile(sample)
        graph = replace(self._graph, calls=profile.calls, unlayered=self.measuring.unlayered)

        def choose(costs: CostTable, sizes: Sizes) -> Choice:
            return self._choose(graph, costs, self._group_size, sizes)[0]

        for sizes in rank_sizes(profile, sample.rows, choose):
            yield sizes, self.measuring.in_pieces(sample, profile, sizes)

    def _adopt(self, tables: Iterator[tuple[Sizes, CostTable]]) -> tuple[int, ...]:
        """Plans with the first of `tables` with which anything fits."""
        failure: DoesNotFitError | None = None
        for sizes, measured in tables:
            table = self._agreed(measured if self._costs is None else self._costs.worst(measured))
            graph = replace(self._graph, calls=table.calls, unlayered=self.measuring.unlayered)
            try:
                self.choices = self._choose(graph, table, self._group_size, sizes)
            except DoesNotFitError as error:
                failure = error
                continue
            moved = positions_of(self._graph.calls, table.calls)
            self._costs, self._graph, self._sizes = table, graph, sizes
            self._works.clear()
            return moved
        assert failure is not None
        raise failure

    def _agreed(self, table: CostTable) -> CostTable:
        """What covers the micro-batches of all processes, and what they found out about the model."""
        found = self._parts.world.all("costs", (table, self.measuring.unlayered))
        self.measuring.unlayered = tuple(dict.fromkeys(name for _, names in found for name in names))
        return reduce(CostTable.worst, (one for one, _ in found))

    def _choose(self, graph: LayerGraph, costs: CostTable, group_size: int, sizes: Sizes) -> tuple[Choice, ...]:
        return self._parts.world.first("plan", lambda: self._chosen(graph, costs, group_size, sizes))

    def _chosen(self, graph: LayerGraph, costs: CostTable, group_size: int, sizes: Sizes) -> tuple[Choice, ...]:
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
            unlayered_bytes=self._unlayered_bytes(graph),
            policy=replace(self._policy, forward_rows=sizes.forward, backward_rows=sizes.backward),
            unlayered=self._unlayered(graph),
        )

    @property
    def beside_bytes(self) -> int:
        """Device memory that is no part of a plan: set aside, and tensors that were there before the first plan."""
        device = self._parts.device
        return (
            device.reserve_bytes(self._group_size) + self._parts.world.reduce_bytes(device) + (self._before_bytes or 0)
        )

    def _unlayered(self, graph: LayerGraph) -> UnlayeredParameters:
        element = self._element
        specs = [graph.parameter(name) for name in graph.unlayered]
        trained = [spec for spec in specs if spec.trainable]
        return UnlayeredParameters(
            sum(slab_bytes(spec.numel, element.weight) for spec in specs),
            sum(slab_bytes(spec.numel, element.gradient) for spec in trained),
            sum(spec.numel for spec in trained),
        )

    def _unlayered_bytes(self, graph: LayerGraph) -> int:
        resident = self._unlayered(graph)
        gradients = resident.gradient_bytes
        if not self._parts.residency.accumulates_in_place:  # autograd's own, on their way into the sums
            trained = [graph.parameter(name) for name in graph.unlayered]
            gradients += sum(slab_bytes(s.numel, self._element.weight) for s in trained if s.trainable)
        return resident.weight_bytes + gradients + self._parts.lending.buffer_bytes

    # ---- what is to be done

    def step(self, micro_batches: Sequence[MicroBatch]) -> Work:
        """What a step over `micro_batches` does."""
        return self._step(micro_batches, self._plan_for(len(micro_batches)).policy)

    def part_of_step(self, micro_batches: Sequence[MicroBatch], first: bool) -> tuple[Work, Work]:
        """What a step does over some of its micro-batches, up to the norm of all gradients, and from there on.

        Behind the `first` part each micro-batch's gradient is added for itself: in the order of plain accumulation.
        """
        policy = self._plan_for(len(micro_batches)).policy
        work = self._step(micro_batches, replace(policy, deferred_update=True, grouping=policy.grouping and first))
        split = next(place for place, task in enumerate(work.tasks) if task.kind is TaskKind.NORM)
        return _part_of(work, slice(0, split)), replace(_part_of(work, slice(split, None)), micro_batches={})

    def _plan_for(self, micro_batches: int) -> Plan:
        assert self.plan is not None and self._costs is not None
        if self._outgrown or micro_batches > self.plan.micro_batches:
            size = max(micro_batches, self.plan.micro_batches)
            self.choices = self._choose(self._graph, self._costs, size, self._sizes)
            self._works.clear()
            self._outgrown = False
        return self.choices[0].plan

    def _step(self, micro_batches: Sequence[MicroBatch], policy: Policy) -> Work:
        group = Group(
            tuple(m.index for m in micro_batches if not m.forwarded),
            tuple(m.index for m in micro_batches if m.forwarded),
        )
        work = self._works.get((group, policy))
        if work is None:
            packing = self.choices[0].plan.packing
            tasks = compose_step(packing, group, policy)
            validate(packing, tasks, group, policy)
            work = self._works[group, policy] = self._work(tasks, policy)
        return replace(work, micro_batches={m.index: m for m in micro_batches})

    def forward(self, micro_batch: MicroBatch) -> Work:
        """The forward pass of one micro-batch for itself."""
        plan = self._plan_for(1)
        tasks = compose_forward(plan.packing, micro_batch.index, plan.policy)
        return replace(self._work(tasks, plan.policy), micro_batches={micro_batch.index: micro_batch})

    def evaluation(self, micro_batches: Sequence[MicroBatch]) -> Work:
        """The forward passes of a group without gradients, each pack swapped in once for all of them."""
        plan = self._plan_for(1)
        assert self._costs is not None
        tasks = [
            task
            for index in plan.packing.backward
            for task in (
                Task(TaskKind.SWAP_IN, index),
                *(Task(TaskKind.FORWARD, index, m.index) for m in micro_batches),
                Task(TaskKind.EVICT, index),
            )
            if task.kind is TaskKind.FORWARD or index not in plan.policy.resident
        ]
        nothing_kept = replace(
            self._costs, costs=tuple(replace(cost, stash_bytes=0) for cost in self._costs.costs), held_bytes=0
        )
        work = self._work(tuple(tasks), plan.policy, nothing_kept)
        return replace(work, micro_batches={m.index: m for m in micro_batches}, parked=frozenset())

    def _work(self, tasks: tuple[Task, ...], policy: Policy, costs: CostTable | None = None) -> Work:
        plan = self.choices[0].plan
        assert self._costs is not None
        trained = () if self._parts.optimizer is None else self._parts.optimizer.trained
        called = {name for pack in plan.packs for name in pack.parameters}.union(self._graph.unlayered)
        return Work(
            packs=plan.packs,
            tasks=tasks,
            activation_bytes=walk_memory(plan.packs, tasks, costs or self._costs).activation_bytes,
            order=self._graph.calls,
            micro_batches={},
            policy=policy,
            parked=parked(plan.packs, tasks),
            unlayered=self._graph.unlayered,
            uncalled=tuple(name for name in trained if name not in called),
            held_deliveries=held_deliveries(plan),
            in_pieces=self._parts.layer_calls.rows.cuts,
        )

    # ---- what became of it

    def check_peak(self, peak_bytes: int) -> None:
        """A step that took more than planned is said aloud, and what it took is planned for from the next one on.

        What any process took is planned for in all: they run one plan.
        """
        assert self.plan is not None and self._costs is not None
        excess = self._parts.world.most("end a step", max(0, peak_bytes - self.plan.peak_bytes))
        if excess <= 0:
            return
        _logger.warning(
            "this step took %s bytes of device memory, %s more than planned: the model takes more with some data than "
            "with what it was measured with. From now on plans hold a margin for it.",
            f"{self.plan.peak_bytes + excess:,}",
            f"{excess:,}",
        )
        self._costs = replace(self._costs, margin_bytes=self._costs.margin_bytes + excess)
        self._outgrown = True

    def trace(self, executed: ExecutedStep | None) -> dict[str, Any]:
        """The predicted step, and beside it the executed one, as a Chrome trace."""
        assert self.choices and self._costs is not None
        best = self.choices[0]
        names = tuple(layer.name for layer in self._graph.layers)
        return trace_of(best.plan, best.prediction, self._costs, executed, names)


def others_bytes(parts: Parts) -> int:
    """Device memory beside buffers and resident packs: tensors of the program's own, and losses that were looked at."""
    ours = parts.lending.copied_buffer_bytes + parts.device_store.nbytes
    return max(0, parts.device.allocated_bytes() - ours)


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


def _dominates(known: Shapes, shapes: Shapes) -> bool:
    return len(known) == len(shapes) and all(
        len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in zip(known, shapes, strict=True)
    )
