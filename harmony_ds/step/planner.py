"""One model's plan: measured, searched for, kept for groups of micro-batches that are like those it was made for.

`Planner` decides when to measure and when to search. How layer calls are cut is for `call_cuts` to say, what the search is
asked for `plan_search`, and which memory no plan gets `beside_plans`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph, positions_of
from harmony_ds.errors import DoesNotFitError, ModelError
from harmony_ds.offload.host_memory import free_host_bytes
from harmony_ds.profiling.profile_cache import ProfileFile
from harmony_ds.profiling.profiler import Profiler
from harmony_ds.profiling.progress import Progress
from harmony_ds.profiling.sample import InputShapes, Sample, shapes_of
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.joining import Advice
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.rows import WHOLE_CALLS
from harmony_ds.scheduler.search import Choice, smallest_failure
from harmony_ds.scheduler.sizes import WHOLE, SizedCosts, Sizes
from harmony_ds.step.beside_plans import BesidePlans
from harmony_ds.step.call_cuts import CallCuts, Cuts
from harmony_ds.step.call_sizes import CallSizes
from harmony_ds.step.plan_search import PlanSearch

_logger = logging.getLogger(__name__)

_SMALLEST_RATIO, _SAME_RATIO = 0.5, 0.95
"""Micro-batches of several sizes are taken to have down to this fraction of the largest one's elements; as of one size
count those that have no less than the second."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the model has been measured with: a micro-batch (`form_of_inputs`), its modes, and how calls were cut."""

    shapes: InputShapes
    inputs_form: str
    modes: bytes
    cuts: Cuts


class Planner:
    """Planner of one model: it measures micro-batches and searches for plans.

    Attributes:
        graph: layers, and their call order once a micro-batch has been seen.
        rows: how the plan cuts layer calls.
        choices: the plan and the next best ones, with what was predicted of them.
        advice: joined layer calls that are predicted to be faster, where the ds_config keeps single ones.
        sizes: measures with layer calls of several sizes.
    """

    def __init__(
        self, runtime: Runtime, decomposition: Decomposition, graph: LayerGraph, config: Config, saved: Plan | None
    ) -> None:
        """Run `saved`, if given, in the place of a search."""
        self._runtime = runtime
        self._saved = saved
        self._group_size = config.gradient_accumulation_steps
        self.graph = graph
        self.rows = WHOLE_CALLS
        self.choices: tuple[Choice, ...] = ()
        self.advice: Advice | None = None
        self._costs: SizedCosts | None = None
        self._costs_cuts: Cuts | None = None  # with which `_costs` were measured
        self._measured: list[_Measured] = []
        self._is_outgrown = False  # whether the plan is to be searched for anew before the next group
        self._is_replay_due = False  # whether micro-batches differ in size since the plan was found
        self._margin_bytes = 0  # that steps have taken beside what was planned
        dtypes = f"{runtime.device_copies.dtype}, gradients of {config.accumulation_dtype.itemsize} bytes"
        if config.autocast_dtype is not None:
            dtypes += f", autocast to {config.autocast_dtype}"
        path = None if config.harmony.profile is None else Path(config.harmony.profile)
        file = ProfileFile(path, graph, dtypes, runtime.device)
        self.progress = Progress(is_on=config.harmony.progress and runtime.world.rank == 0)
        self.profiler = Profiler(runtime, decomposition.layers, graph, file, self.progress)
        self.sizes = CallSizes(runtime, config, self.profiler, self._choose_quickly, saved)
        self.cuts = CallCuts(runtime, config, graph, self.profiler, self.sizes, saved)
        self.beside = BesidePlans(runtime.device, runtime.world, may_leave_free=saved is None)
        self.search = PlanSearch(runtime, config, self.profiler, self.progress, self.cuts, self.beside, saved)

    @property
    def plan(self) -> Plan | None:
        """The plan for a full group; None before the first micro-batch has been seen."""
        return self.choices[0].plan if self.choices else None

    @property
    def costs(self) -> tuple[CostTable, CostTable]:
        """Costs of a set of micro-batches whose calls are joined, and of a single one."""
        assert self._costs is not None
        costs, alone = self._costs.table, self._costs.alone
        return costs, alone if alone is not None and alone.calls == costs.calls else costs

    @property
    def joined_count(self) -> int:
        """How many micro-batches' layer calls are joined."""
        return 1 if self.plan is None or self._runtime.joins.are_off else self.plan.policy.joined_count

    @property
    def beside_bytes(self) -> int:
        """Device memory that is no part of the plan: set aside, left free, and tensors from before the first plan."""
        return self.beside.total_bytes(self.plan)

    # ---- what has been measured

    def has_profiled(self, inputs: Any, form: str, modes: bytes | None = None) -> bool:
        """Return whether no tensor of `inputs` is larger than what has been measured in `modes` (None: in any).

        `form`: theirs, see `form_of_inputs`.
        """
        shapes, cuts = shapes_of(inputs), self.cuts.now
        for known in self._measured:
            is_alike = (known.inputs_form, known.cuts) == (form, cuts) and modes in (None, known.modes)
            if is_alike and _dominates(known.shapes, shapes):
                if modes is not None and known.shapes != shapes:
                    self._note_smaller(known.shapes, shapes)
                return True
        return False

    def may_evaluate(self, inputs: Any, form: str, modes: bytes) -> bool:
        """Return whether the plan is good for forward passes with `inputs` in `modes`, without gradients.

        They take no more than those in any modes that were measured, but rows of layers may depend on each other in others.
        """
        return self.has_profiled(inputs, form) and not (self.rows.cuts and not self.profiler.has_probed((modes, form)))

    def _note_smaller(self, known: InputShapes, shapes: InputShapes) -> None:
        """Note that micro-batches differ in size: pieces of the one's memory serve the other's requests worse."""
        if self.search.smallest_ratio == 1.0 and _elements(shapes) < _SAME_RATIO * _elements(known):
            self.search.smallest_ratio, self._is_replay_due = _SMALLEST_RATIO, True

    def reconsider_joining(self) -> None:
        """Measure joined calls anew, where an error had ended them that a step has now raised with single ones, too."""
        if self._runtime.joins.reconsider():
            self._measured.clear()

    # ---- measuring, and the plan that follows

    def measure(self, sample: Sample) -> tuple[int, ...]:
        """Measure the model with one micro-batch and plan anew; nothing may be under way.

        Returns:
            Where each place of the call order before is in the new one.

        Raises:
            DoesNotFitError: no plan fits, or not even one layer at a time. Layer calls are cut as before.
        """
        if not self.beside.knows_before:
            self.beside.note_before(max(unplanned_bytes(self._runtime)))
            self.search.host_bytes = host_room_bytes(self._runtime)
        before = self.cuts.now
        try:
            moved = self.cuts.find_with_fewest(sample, partial(self._plan_with, sample))
        except DoesNotFitError:
            self.cuts.set(before)
            raise
        if self.cuts.now != before:
            self.cuts.log(sample, self.rows, self.graph)
        shapes = shapes_of((sample.inputs, sample.inputs_beside))
        modes = sample.modes if sample.trains else b""
        self._measured.append(_Measured(shapes, sample.inputs_form, modes, self.cuts.now))
        if sample.trains:
            budget_bytes = self._runtime.device.budget_bytes
            self.progress.planned(self.choices[0], len(self.graph.calls), self.beside_bytes, budget_bytes)
        return moved

    def _plan_with(self, sample: Sample, tried: list[CostTable]) -> tuple[int, ...]:
        """Plan with the first costs with which anything fits; add all that are tried to `tried`."""
        failures: list[DoesNotFitError] = []
        cuts, plan = self.cuts.now, self.plan or self._saved
        before = self._costs if self._costs_cuts == cuts else None
        for measured in self.sizes.measured(sample, WHOLE if plan is None else Sizes.from_policy(plan.policy)):
            sized = measured.with_margin(self._margin_bytes) if before is None else measured.after(before)
            table = self._agreed(sized.table)
            if not table.calls:
                raise ModelError(
                    "forward calls no module that owns parameters: there are no layers to swap. Let it call modules whose "
                    "forward uses their own parameters, and not take module.weight or those of an nn.ParameterList itself."
                )
            graph = self.graph_with(table.calls)
            tried.append(table)
            try:
                choices = self.search.choose(graph, table, self._group_size, sized.sizes)
            except DoesNotFitError as error:
                failures.append(error.with_traceback(None))  # which holds this frame, and the sample
                continue
            moved = positions_of(self.graph.calls, table.calls)
            if before is None or before.sizes.joined_count != sized.sizes.joined_count:
                self._measured.clear()  # those were other calls
            self._costs, self._costs_cuts = replace(sized, table=table), cuts
            self.graph, self.choices = graph, choices
            self.rows = self.profiler.rows(sized.sizes)
            if before is None:
                self.advice = self._advise(sample.rows)
            return moved
        raise smallest_failure(failures)

    def _advise(self, rows: int) -> Advice | None:
        """Return joined calls that would be much faster than the plan, where it is of single ones that are not cut."""
        if self.sizes.wanted != WHOLE or self._saved is not None or not self.sizes.may_join:
            return None
        return self.search.advise_joining(self.choices[0], self.graph, self.costs[0], rows, self._group_size)

    def graph_with(self, calls: tuple[int, ...]) -> LayerGraph:
        """Return what is known of the model, now that it has been seen to make these calls."""
        graph = replace(self.graph, calls=calls, unlayered=self.profiler.unlayered)
        used = {name for layer in calls for name in graph.layers[layer].parameters}.union(graph.unlayered)
        trained = () if self._runtime.optimizer is None else self._runtime.optimizer.trained
        return replace(graph, uncalled=tuple(name for name in trained if name not in used))

    def _agreed(self, table: CostTable) -> CostTable:
        """Return costs that cover all processes' micro-batches; take over what they found out, and the least room."""
        found = self._runtime.world.gather_values("costs", (table, self.profiler.unlayered, self.search.host_bytes))
        self.profiler.join_unlayered(name for _, names, _ in found for name in names)
        self.search.host_bytes = min((room for _, _, room in found if room is not None), default=None)
        return reduce(CostTable.worst, (one for one, _, _ in found))

    def _choose_quickly(self, costs: CostTable, sizes: Sizes) -> Choice:
        return self.search.choose(self.graph_with(costs.calls), costs, self._group_size, sizes, thorough=False)[0]

    # ---- the plan for a group

    def plan_for(self, micro_batches: int) -> Plan:
        """Return the plan, made anew if so many single micro-batches are more than it is for."""
        assert self.plan is not None
        sizes = Sizes.from_policy(self.plan.policy)
        if self._is_replay_due and self._runtime.world.size == 1:  # of several, each would find something else
            choice, is_served = self.search.replay(self.choices[0], self.graph, self.costs[0], self._group_size)
            self.choices = (choice, *self.choices[1:])
            self._is_outgrown |= not is_served
        self._is_replay_due = False
        self._group_size = max(self._group_size, micro_batches)
        planned = self.plan.micro_batches * sizes.joined_count
        if self._is_outgrown or micro_batches > planned:
            size = max(micro_batches, planned)
            self.choices = self.search.choose(self.graph, self.costs[0], size, sizes)
            self._is_outgrown = False
        return self.choices[0].plan

    def raise_peak(self, peaks: tuple[int, ...]) -> bool:
        """Let the plan's peaks cover those of a group too, if the budget holds them; return whether it does."""
        assert self.plan is not None
        most = tuple(map(max, peaks, self.plan.device_peaks))
        if most == self.plan.device_peaks:
            return True
        if not self.has_room_for(most):
            return False
        plan = replace(self.plan, peak_bytes=max(most), device_peaks=most)
        self.choices = (replace(self.choices[0], plan=plan), *self.choices[1:])
        return True

    def has_room_for(self, peaks: tuple[int, ...]) -> bool:
        """Return whether the budget holds the peaks of a group."""
        room_bytes = self.room_bytes
        return room_bytes is None or max(peaks) <= room_bytes

    @property
    def room_bytes(self) -> int | None:
        """The most bytes that a group may take, of each device; None: any number."""
        budget_bytes = self.search.request(self.graph, self._group_size).budget_bytes
        return None if budget_bytes is None else budget_bytes + self.beside.shared_loss_bytes

    def make_room(self, nbytes: int) -> None:
        """Keep `nbytes`, or more than so far, for shared losses; plan with what is left from the next group on."""
        self.beside.keep_for_shared_losses(nbytes)
        self._is_outgrown = True

    def leave_more_free(self) -> bool:
        """Leave more of the budget to the allocator, from the next group on, if a plan fits beside it.

        Returns:
            Whether it is tried, see `BesidePlans.leave_more_free`.
        """
        leaves_more = self.beside.leave_more_free()
        self._is_outgrown |= leaves_more
        return leaves_more

    def fill_pool(self) -> None:
        """Let the allocator take the rest of the budget now, where a request of the plan could need the last of it."""
        budget_bytes = self._runtime.device.budget_bytes
        if self.plan is None or budget_bytes is None:
            return
        if self.plan.peak_bytes + self.beside_bytes + self.costs[0].working_bytes > budget_bytes:
            self._runtime.device.fill_pool(self.beside.upload_bytes + self.beside.exchange_bytes(self.plan))

    def check_peak(self, peak_bytes: int) -> None:
        """Log that a step took more than planned in any process, and plan for that in all from the next one on."""
        assert self.plan is not None and self._costs is not None
        excess = self._runtime.world.max("end a step", max(0, peak_bytes - self.plan.peak_bytes))
        if excess <= 0:
            return
        _logger.warning(
            "this step took %s bytes of device memory, %s more than planned: the model takes more with some data than "
            "with what it was measured with. From now on plans hold a margin for it.",
            f"{self.plan.peak_bytes + excess:,}",
            f"{excess:,}",
        )
        self._margin_bytes += excess
        self._costs, self._is_outgrown = self._costs.with_margin(excess), True


def unplanned_bytes(runtime: Runtime) -> tuple[int, ...]:
    """Return the memory of each device beside buffers and resident packs: tensors of the program's own, and losses that
    were read.
    """
    planned = runtime.installation.buffers.copied_bytes + runtime.resident_packs.nbytes
    return tuple(max(0, allocated - planned) for allocated in runtime.device.allocations())


def host_room_bytes(runtime: Runtime) -> int | None:
    """Return host memory for what waits there; None: the system does not say.

    It is this process's share of what is free before gradients and stash have been there, without what the optimizer is
    still to make.
    """
    free = free_host_bytes()
    coming = 0 if runtime.optimizer is None else runtime.optimizer.unallocated_bytes()
    return None if free is None else max(0, free - coming) // runtime.world.local_size


def _elements(shapes: InputShapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _dominates(known: InputShapes, shapes: InputShapes) -> bool:
    return len(known) == len(shapes) and all(
        len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in zip(known, shapes, strict=True)
    )
