"""One model's plan: measured, searched for, kept for groups of micro-batches that are like those it was made for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph, positions_of, slab_bytes
from harmony_ds.distributed.exchange import buffer_bytes
from harmony_ds.errors import DoesNotFitError, ModelError
from harmony_ds.model.trees import tensors_in
from harmony_ds.offload.host_memory import free_host_bytes
from harmony_ds.profiling.profile_cache import ProfileFile
from harmony_ds.profiling.profiler import Profiler
from harmony_ds.profiling.progress import Progress
from harmony_ds.profiling.sample import InputShapes, Sample, form_of, shapes_of
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.allocator_fit import (
    Fitting,
    beside_uploads,
    is_replayed,
    is_served,
    leaving,
    replayed,
    search_fitting,
)
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.grid import amount, counted, gib_number
from harmony_ds.scheduler.joining import Advice, JoinedCosts, advise
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Plan, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.resident import why_not_resident
from harmony_ds.scheduler.rows import WHOLE_CALLS
from harmony_ds.scheduler.saved import adopt
from harmony_ds.scheduler.search import Choice, search, smallest_failure
from harmony_ds.scheduler.sizes import WHOLE, SizedCosts, Sizes
from harmony_ds.scheduler.tiles import Tiles, head_takes_most
from harmony_ds.step.call_sizes import CallSizes

_logger = logging.getLogger(__name__)

_TOP = 10
_HEAD_TILES = (1024, 256, 64, 16, 4)
"""Tokens of a tile of the head and the loss, as "auto" tries them. With more the loss is hardly faster: it computes most of
the time, and the last layer's gradient is added up once for each tile."""
_LAYER_TILES = (16384, 4096, *_HEAD_TILES)
"""The same inside layers, where what is computed again costs time, and the gradients of many weights are added up."""
_MOST_TILES = 3
"""Sizes of each that are tried, with which the model is measured: where none of them fits, smaller ones hardly do."""
_TILES_OF_A_MICRO_BATCH = 4096
"""No more are tried: a micro-batch of more has many millions of tokens, and takes longer to measure than anyone waits."""
_MOST_SLICES = 2048
"""Slices of one layer call that are tried: measuring runs each of them, and a micro-batch of more does not come about."""
_LESS_WITH_HALF = 0.9
"""With half the rows, layer calls take less than this fraction of the memory; else still fewer rows help no more."""
_GRAINS = 64
"""Part of the budget, by which the room for shared losses grows where it has been too small."""
_SMALLEST_RATIO, _SAME_RATIO = 0.5, 0.95
"""Micro-batches of several sizes are taken to have down to this fraction of the largest one's elements; as of one size
count those that have no less than the second."""
_LESS_WITH_TILES = 0.99
"""With smaller tiles of the last layer and the loss, a plan needs less than this fraction; else those are not what is in
the way."""
_FREE_PARTS, _MOST_FREE_PARTS = 32, 4
"""Parts of the budget; how many of them plans leave free at most for an allocator that is short of room again and again."""

CutSizes = tuple[Sizes | None, Tiles]
"""Rows and tokens that layer calls take."""

_Found = TypeVar("_Found")
Attempt = Callable[[list[CostTable]], _Found]
"""Find something with the layer calls as they are cut now; add the costs of what is tried to the list. Raises
DoesNotFitError."""


@dataclass(frozen=True, slots=True)
class _Tried(Generic[_Found]):
    """Result of an attempt to plan: what it found, or its error with the last costs that it tried, if any."""

    found: _Found | None
    costs: CostTable | None
    failure: DoesNotFitError | None

    def result(self) -> _Found:
        """Return what was found."""
        assert self.found is not None
        return self.found


TryNow = Callable[[], _Tried[_Found]]
"""Make an attempt with the layer calls as they are cut now."""


class _ShortOfRoomError(DoesNotFitError):
    """A plan fits the budget, but not with the pieces of memory that serve none of its requests."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt that has found nothing: how layer calls were cut, the same for people, and its error."""

    cuts: tuple[Sizes | None, bool]
    tiles: Tiles
    words: str
    error: DoesNotFitError

    @property
    def needs(self) -> str:
        """The budget that would do."""
        nbytes = self.error.least_budget_bytes
        return "it could not be measured" if nbytes is None else f"{nbytes:,} bytes ({gib_number(nbytes)} GiB)"


def _tried(attempt: Attempt[_Found]) -> _Tried[_Found]:
    """Make an attempt, and return what became of it."""
    costs: list[CostTable] = []
    try:
        return _Tried(attempt(costs), None, None)
    except DoesNotFitError as error:
        return _Tried(None, costs[-1] if costs else None, error.with_traceback(None))


def _needs_less(failure: DoesNotFitError, other: DoesNotFitError) -> bool:
    """Return whether a plan needs less than with what `other` was raised for, as far as that is known."""
    needed, before = failure.least_budget_bytes, other.least_budget_bytes
    return needed is None or before is None or needed < _LESS_WITH_TILES * before


class Planner:
    """Planner of one model: it measures micro-batches and searches for plans."""

    def __init__(
        self, runtime: Runtime, decomposition: Decomposition, graph: LayerGraph, config: Config, saved: Plan | None
    ) -> None:
        """Run `saved`, if given, in the place of a search."""
        self._runtime = runtime
        self._settings = config.harmony
        self._saved = saved
        self._slices_from_host = saved is not None and saved.policy.slices_from_host
        self._group_size = config.gradient_accumulation_steps
        self._element = ElementBytes(config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)
        self._policy = Policy(
            grouping=config.harmony.grouping,
            prefetch=config.harmony.prefetch,
            gradient_slabs=config.harmony.gradient_slabs * runtime.device.count,
            deferred_update=config.deferred_update,
            devices=runtime.world.local_size,
            servers=runtime.world.servers,
            pipeline=runtime.device.count,
        )
        self.graph = graph
        """Layers, and their call order once a micro-batch has been seen."""
        self._set_tiles(Tiles.from_config(config.harmony.tokens) if saved is None else Tiles.from_policy(saved.policy))
        self._sized: SizedCosts | None = None
        self.rows = WHOLE_CALLS
        """How the plan cuts layer calls."""
        self._measured: list[tuple[InputShapes, bytes]] = []
        self._outgrown = False  # a step took more than planned
        self._shared_loss_bytes = 0  # of the budget: for groups whose micro-batches share losses
        self._left_free_bytes = 0  # of the budget: for an allocator that has been short of room
        self._fragment_bytes = 0  # of the budget: for pieces of memory that serve no request
        self._upload_bytes = 0  # of the budget: for inputs, in a pool of their own
        self._smallest_ratio = 1.0  # elements of the smallest micro-batch / elements of the largest that was measured
        self._check_allocator = False  # whether the plan was found before that was known
        self._cuts_for_room = False  # whether layer calls are cut further where the allocator could not serve a plan
        self._may_leave_free = saved is None  # whether a plan may fit beside more of it
        self._margin_bytes = 0  # that steps have taken beside what was planned
        self._before_bytes: int | None = None  # on the device when the first plan was made
        self._host_bytes: int | None = None  # of the host there were for what waits there then; None: not known
        self.choices: tuple[Choice, ...] = ()
        """The plan and the next best ones, with what was predicted of them."""
        self.advice: Advice | None = None
        """Joined layer calls that are predicted to be faster, where the ds_config keeps single ones."""
        path = None if config.harmony.profile is None else Path(config.harmony.profile)
        dtypes = f"{runtime.device_copies.dtype}, gradients of {self._element.gradient} bytes"
        if config.autocast_dtype is not None:
            dtypes += f", autocast to {config.autocast_dtype}"
        file = ProfileFile(path, graph, dtypes, runtime.device)
        self.progress = Progress(is_on=config.harmony.progress and runtime.world.rank == 0)
        self.profiler = Profiler(runtime, decomposition.layers, graph, file, self.progress)
        self.sizes = CallSizes(runtime, config, self.profiler, self._choose_quickly, saved)

    @property
    def plan(self) -> Plan | None:
        """The plan for a full group; None before the first micro-batch has been seen."""
        return self.choices[0].plan if self.choices else None

    @property
    def costs(self) -> tuple[CostTable, CostTable]:
        """Costs of a set of micro-batches whose calls are joined, and of a single one."""
        assert self._sized is not None
        costs, alone = self._sized.table, self._sized.alone
        return costs, alone if alone is not None and alone.calls == costs.calls else costs

    @property
    def joined_count(self) -> int:
        """How many micro-batches' layer calls are joined."""
        return 1 if self.plan is None or self._runtime.joins.are_off else self.plan.policy.joined_count

    def has_profiled(self, inputs: Any, modes: bytes | None = None) -> bool:
        """Return whether no tensor of `inputs` is larger than what has been measured in `modes` (None: in any)."""
        shapes = shapes_of(inputs)
        for known, own in self._measured:
            if modes in (None, own) and _dominates(known, shapes):
                if modes is not None and known != shapes:
                    self._note_smaller(known, shapes)
                return True
        return False

    def may_evaluate(self, inputs: Any, modes: bytes) -> bool:
        """Return whether the plan is good for forward passes with `inputs` in `modes`, without gradients.

        They take no more than those in any modes that were measured, but rows of layers may depend on each other in others.
        """
        return self.has_profiled(inputs) and not (
            self.rows.cuts and not self.profiler.has_probed(form_of(inputs, modes))
        )

    def _note_smaller(self, known: InputShapes, shapes: InputShapes) -> None:
        """Note that micro-batches differ in size: pieces of the one's memory serve the other's requests worse."""
        if self._smallest_ratio == 1.0 and _elements(shapes) < _SAME_RATIO * _elements(known):
            self._smallest_ratio, self._check_allocator = _SMALLEST_RATIO, True

    def reconsider_joining(self) -> None:
        """Measure joined calls anew, where an error had ended them that a step has now raised with single ones, too."""
        if self._runtime.joins.reconsider():
            self._measured.clear()

    # ---- measuring and searching

    def measure(self, sample: Sample) -> tuple[int, ...]:
        """Measure the model with one micro-batch and plan anew; nothing may be under way.

        Returns:
            Where each place of the call order before is in the new one.

        Raises:
            DoesNotFitError: no plan fits, or not even one layer at a time.
        """
        if self._before_bytes is None:
            self._before_bytes = max(unplanned_bytes(self._runtime))
            self._host_bytes = host_room_bytes(self._runtime)
        moved = self._plan_that_fits(sample)
        shapes = shapes_of((sample.inputs, sample.inputs_beside))
        self._measured.append((shapes, sample.modes if sample.trains else b""))
        if sample.trains:
            budget_bytes = self._runtime.device.budget_bytes
            self.progress.planned(self.choices[0], len(self.graph.calls), self.beside_bytes, budget_bytes)
        return moved

    def _plan_that_fits(self, sample: Sample) -> tuple[int, ...]:
        """Plan with whole calls; where nothing fits, with fewer rows at a time, or fewer tokens."""
        before = self._cuts_now, self.tiles, self._sized, [*self._measured]
        try:
            moved = self.with_fewest_cuts(sample, partial(self._plan_with, sample))
        except DoesNotFitError:
            (self.sizes.wanted, self._slices_from_host), tiles, self._sized, self._measured = before
            self._set_tiles(tiles)
            raise
        if (self._cuts_now, self.tiles) != before[:2]:
            self._tell_of_cuts(sample)
        return moved

    def with_fewest_cuts(self, sample: Sample, attempt: Attempt[_Found]) -> _Found:
        """Return what `attempt` finds with layer calls that are cut no further than it takes, where the ds_config allows.

        They are cut where no plan fits, or none that the device's allocator can serve without giving memory back in each
        step.

        Rows come first: slices of half of them, a quarter, and so on; but not where the last layer and the loss, which is
        over all rows, take most: then those run in tiles of tokens, and slices come where the other layers take most. Then
        tiles of tokens in the other layers, beside whole rows and, last, beside slices; then slices again, with all that is
        between layers on the host.

        Raises:
            DoesNotFitError: none fits. The error is that of the attempt that needs least, and lists the others; layer calls
                stay as that attempt had them.
        """
        failures: list[_Failure] = []

        def try_now() -> _Tried[_Found]:
            tried = _tried(attempt)
            if tried.failure is not None:
                failures.append(_Failure(self._cuts_now, self.tiles, self._cuts_in_words(), tried.failure))
            return tried

        self._cuts_for_room = self.may_cut
        try:
            found = self._try_cuts(sample, try_now)
        finally:
            self._cuts_for_room = False
        if found is not None:
            return found
        short = next((failure for failure in failures if isinstance(failure.error, _ShortOfRoomError)), None)
        if short is None:
            raise self._least_cut_error(failures)
        self._cut_as(short)
        return attempt([])  # a step that has to wait for memory is better than none

    def _cut_as(self, failure: _Failure) -> None:
        """Cut layer calls as an attempt did."""
        self.cut_into(failure.tiles)
        self._slice(*failure.cuts)

    def _least_cut_error(self, failures: Sequence[_Failure]) -> DoesNotFitError:
        """Cut layer calls as the attempt did that needs least, and return its error with what others need."""
        error = smallest_failure([failure.error for failure in failures])
        least = next(failure for failure in failures if failure.error is error)
        self._cut_as(least)
        if len(failures) == 1:
            return error
        tried = "\n".join(f"  {failure.words}: {failure.needs}" for failure in failures)
        whole = DoesNotFitError(
            f"{error}\nThat is with {least.words}. Layer calls were cut in these ways, and each needs a budget:\n{tried}",
            error.least_budget_bytes,
        )
        whole.__cause__ = error.__cause__
        return whole

    def _try_cuts(self, sample: Sample, try_now: TryNow[_Found]) -> _Found | None:
        """Return what is found with the fewest cuts, in the order of `with_fewest_cuts`; None: nothing fits."""
        whole, uncut = self._cuts_now, self.tiles
        first = try_now()
        if first.failure is None:
            return first.result()
        if first.costs is None or not self._head_takes_most(first.costs):  # the loss is over all rows
            found = self._with_fewest_slices(sample, try_now, first.costs)
            if found is not None:
                return found
            self._slice(*whole)
            self.cut_into(uncut)
        costs = first.costs
        while (tiles := self.smaller_tiles(sample, costs)) is not None:
            if self.tiles.head and not self.tiles.layers and tiles.layers:
                found = self._with_fewest_slices(sample, try_now, costs)
                if found is not None:
                    return found
                self._slice(*whole)
            self.cut_into(tiles)
            tried = try_now()
            if tried.failure is None:
                return tried.result()
            costs = tried.costs
        if self.tiles.cut:
            found = self._with_fewest_slices(sample, try_now)
            if found is not None:
                return found
        if self._may_take_slices_from_host:
            for tiles in dict.fromkeys((uncut, self.tiles)):
                self.cut_into(tiles)
                self._slice(WHOLE, slices_from_host=True)
                found = self._with_fewest_slices(sample, try_now, first.costs)
                if found is not None:
                    return found
        return None

    @property
    def cut_sizes(self) -> CutSizes:
        """The sizes in force: results are the same to the bit as long as these are."""
        return self.sizes.wanted, self.tiles

    @property
    def _cuts_now(self) -> tuple[Sizes | None, bool]:
        """Rows of layer calls, and whether slices take theirs from the host."""
        return self.sizes.wanted, self._slices_from_host

    def _cuts_in_words(self) -> str:
        """Return how layer calls are cut now, for people."""
        sizes, parts = self.sizes.wanted or WHOLE, []
        if sizes.cut:
            parts.append(
                f"slices of {counted(sizes.backward, 'row')}" + (" from the host" if self._slices_from_host else "")
            )
        if self.tiles.cut:
            parts.append(str(self.tiles))
        return ", ".join(parts) or "whole micro-batches"

    @property
    def may_cut(self) -> bool:
        """Whether layer calls may take fewer rows or tokens than they do, where nothing fits."""
        return self._saved is None and (
            self._settings.micro_batch in ("config", "auto") or self._settings.tokens == "auto"
        )

    @property
    def _may_slice(self) -> bool:
        """Whether the ds_config leaves open how many rows layer calls take."""
        return self._settings.micro_batch == "config" and self._saved is None

    @property
    def _may_take_slices_from_host(self) -> bool:
        """Whether one device, which groups micro-batches, may keep on the host all that waits between layers."""
        settings = self._settings
        return self._may_slice and settings.stash != "device" and settings.grouping and self._runtime.device.count == 1

    def _with_fewest_slices(
        self, sample: Sample, try_now: TryNow[_Found], of_whole: CostTable | None = None
    ) -> _Found | None:
        """Return what `try_now` finds with the largest slices of rows that fit; None: none fits.

        Args:
            of_whole: costs of calls that are not cut. Slices whose share of these is more than the budget are not tried.
        """
        if not self._may_slice:
            return None
        rows, most_bytes = self._runtime.world.max("rows to cut", sample.rows), float("inf")
        room_bytes = self._runtime.world.max("room for slices", self._runtime.device.budget_bytes or 0)
        whole_bytes = 0 if of_whole is None else of_whole.layer_bytes
        now = self.sizes.wanted or WHOLE
        size = min(now.forward or rows, rows)
        while size > 1:
            size = -(-size // 2)
            if size * _MOST_SLICES < rows:
                return None
            if size > 1 and whole_bytes * size > room_bytes * rows:
                continue
            self._slice(Sizes(size, size), self._slices_from_host)
            tried = self._with_largest_head_tiles(sample, try_now)
            if tried.failure is None:
                return tried.result()
            if not self._runtime.world.any("cut into slices", self.profiler.rows(Sizes(size, size)).cuts):
                return None
            if tried.costs is not None:
                if tried.costs.working_bytes > _LESS_WITH_HALF * most_bytes:
                    return None
                most_bytes = tried.costs.working_bytes
        return None

    def _with_largest_head_tiles(self, sample: Sample, try_now: TryNow[_Found]) -> _Tried[_Found]:
        """Return the last attempt: with the largest tiles of the last layer and the loss that fit, or the smallest that
        help, as long as these take most.
        """
        tried = try_now()
        while tried.failure is not None and tried.costs is not None:
            before, tiles = self.tiles, self.smaller_tiles(sample, tried.costs)
            if tiles is None or tiles.head == before.head:
                break
            self.cut_into(tiles)
            smaller = try_now()
            if smaller.failure is not None and not _needs_less(smaller.failure, tried.failure):
                self.cut_into(before)
                break
            tried = smaller
        return tried

    def _slice(self, sizes: Sizes | None, slices_from_host: bool = False) -> None:
        """Cut layer calls into slices of `sizes` from now on; forget what was measured in others."""
        if (sizes, slices_from_host) != self._cuts_now:
            self.sizes.wanted, self._slices_from_host = sizes, slices_from_host
            self._sized = None
            self._measured.clear()

    def _tell_of_cuts(self, sample: Sample) -> None:
        """Log what runs in slices of rows or in tiles of tokens."""
        tiles, parts = self.tiles_in_use, []
        if self.rows.cuts:
            source = " from the host" if self._slices_from_host else ""
            parts.append(
                f"layer calls take slices of {counted(self.rows.backward, 'row')}{source} (harmony.micro_batch)"
            )
        if tiles.head:
            heads = [layer for layer, is_head in self._runtime.layer_calls.head_tiles.heads.items() if is_head]
            names = ", ".join(self.graph.layers[layer].name for layer in heads)
            parts.append(f"{names} and the loss run in tiles of {tiles.head} tokens (harmony.tokens)")
        if tiles.layers:
            parts.append(f"parts of layers run in tiles of {tiles.layers} tokens (harmony.tokens)")
        whole = f"{sample.rows:,} rows" if not tiles.cut else f"{_most_tokens(sample):,} tokens"
        if parts:
            _logger.warning("%s, since no plan for all %s of a micro-batch at once fits", ", ".join(parts), whole)

    @property
    def tiles(self) -> Tiles:
        """The tiles that are set, whether or not the model has anything that can be cut into them."""
        calls = self._runtime.layer_calls
        return Tiles(calls.head_tiles.size, calls.layer_tiles.size)

    @property
    def tiles_in_use(self) -> Tiles:
        """The tiles that something runs in, as far as has been seen."""
        calls = self._runtime.layer_calls
        has_head = any(calls.head_tiles.heads.values())
        return Tiles(calls.head_tiles.size if has_head else 0, calls.layer_tiles.size if calls.layer_tiles.cut else 0)

    def _set_tiles(self, tiles: Tiles) -> None:
        calls = self._runtime.layer_calls
        calls.head_tiles.size, calls.layer_tiles.size = tiles.head, tiles.layers

    def cut_into(self, tiles: Tiles) -> None:
        """Run in `tiles` from now on; forget what was measured in others."""
        if tiles != self.tiles:
            self._set_tiles(tiles)
            self._sized = None
            self._measured.clear()

    def repeat_cuts(self, policy: Mapping[str, Any]) -> None:
        """Cut layer calls as the run did that goes on here, where the ds_config leaves it open; `policy`: of its plan."""
        if self._saved is not None:
            return
        tiles, sizes = Tiles.from_policy(policy), Sizes(policy.get("forward_rows", 0), policy.get("backward_rows", 0))
        if self._settings.tokens == "auto" and tiles != self.tiles:
            self._set_tiles(tiles)
            self._measured.clear()  # so that the next micro-batch is measured, and planned for
        if self._settings.micro_batch == "config":
            self._slice(sizes, policy.get("slices_from_host", False))

    def smaller_tiles(self, sample: Sample, costs: CostTable | None) -> Tiles | None:
        """Return the tiles to try where those in force do not fit; None: there are none, or the ds_config names them.

        What takes most memory is cut further, the head or the layers, into the largest tiles at first. Where that cannot be
        cut any more, nothing helps.

        Args:
            costs: of what does not fit; None: it could not even be measured. Then the head is cut first.
        """
        if self._settings.tokens != "auto" or self._saved is not None:
            return None
        now, seen, most = self.tiles, self.tiles_in_use, self._runtime.world.max("tokens to cut", _most_tokens(sample))
        head = None if now.head and not seen.head else _next_smaller(_HEAD_TILES, now.head, most)
        layers = None if now.layers and not seen.layers else _next_smaller(_LAYER_TILES, now.layers, most)
        cuts_head = head is not None and (not now.head or layers is None)
        if costs is not None and costs.costs:
            cuts_head = self._head_takes_most(costs)
        if cuts_head:
            return None if head is None else replace(now, head=head)
        return None if layers is None else replace(now, layers=layers)

    def _head_takes_most(self, costs: CostTable) -> bool:
        """Return whether the last layer and the loss, with weights and their gradients, take most device memory."""
        graph, element = self.graph, self._element
        held = []
        for layer in costs.calls:
            parameters = [graph.parameter(name) for name in graph.layers[layer].parameters]
            sums = sum(slab_bytes(spec.numel, element.gradient) for spec in parameters if spec.trainable)
            held.append(sum(spec.weight_bytes(element.weight) for spec in parameters) + sums)
        return head_takes_most(costs, held)

    def _choose_quickly(self, costs: CostTable, sizes: Sizes) -> Choice:
        return self._choose(self.graph_with(costs.calls), costs, self._group_size, sizes, thorough=False)[0]

    def _plan_with(self, sample: Sample, tried: list[CostTable]) -> tuple[int, ...]:
        """Plan with the first costs with which anything fits; add all that are tried to `tried`."""
        failures: list[DoesNotFitError] = []
        before, plan = self._sized, self.plan or self._saved
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
                choices = self._choose(graph, table, self._group_size, sized.sizes)
            except DoesNotFitError as error:
                failures.append(error.with_traceback(None))  # which holds this frame, and the sample
                continue
            moved = positions_of(self.graph.calls, table.calls)
            if before is not None and before.sizes.joined_count != sized.sizes.joined_count:
                self._measured.clear()  # those were other sets
            self._sized, self.graph, self.choices = replace(sized, table=table), graph, choices
            self.rows = self.profiler.rows(sized.sizes)
            if before is None:
                self.advice = self._advise(graph, table, sample.rows)
            return moved
        raise smallest_failure(failures)

    def _advise(self, graph: LayerGraph, costs: CostTable, rows: int) -> Advice | None:
        """Return joined calls that would be much faster than the plan, and log them, once for all processes."""
        if self.sizes.wanted != WHOLE or self._saved is not None or not self.sizes.may_join:
            return None
        joined = JoinedCosts(graph, costs, self._machine(), self._element)
        request = self.request(graph, self._group_size)

        def found() -> Advice | None:
            advice = advise(self.choices[0], rows, request, joined)
            if advice is not None:
                _logger.warning("%s", advice)
            return advice

        return self._runtime.world.compute_on_first("advice", found)

    def graph_with(self, calls: tuple[int, ...]) -> LayerGraph:
        """Return what is known of the model, now that it has been seen to make these calls."""
        graph = replace(self.graph, calls=calls, unlayered=self.profiler.unlayered)
        used = {name for layer in calls for name in graph.layers[layer].parameters}.union(graph.unlayered)
        trained = () if self._runtime.optimizer is None else self._runtime.optimizer.trained
        return replace(graph, uncalled=tuple(name for name in trained if name not in used))

    def _agreed(self, table: CostTable) -> CostTable:
        """Return costs that cover all processes' micro-batches; take over what they found out, and the least room."""
        found = self._runtime.world.gather_values("costs", (table, self.profiler.unlayered, self._host_bytes))
        self.profiler.join_unlayered(name for _, names, _ in found for name in names)
        self._host_bytes = min((room for _, _, room in found if room is not None), default=None)
        return reduce(CostTable.worst, (one for one, _, _ in found))

    def _choose(
        self, graph: LayerGraph, costs: CostTable, group_size: int, sizes: Sizes, thorough: bool = True
    ) -> tuple[Choice, ...]:
        """Return the best plans, as the first process finds them; all run the same. `thorough`: see `PlanRequest`."""
        request = replace(self.request(graph, group_size, sizes), thorough=thorough)
        if self._saved is not None:
            return self._tell_of_allocator(self._search(graph, costs, request), beside_uploads(request, costs), costs)
        fragment_bytes = self._runtime.device.fragment_bytes(costs.working_bytes)
        if fragment_bytes + self._left_free_bytes:
            whole = replace(self.request(graph, group_size, sizes, self._left_free_bytes), thorough=thorough)
            less = beside_uploads(whole, costs)
            search_with = partial(self._search, graph, costs)
            with suppress(DoesNotFitError):
                if not thorough:  # one of several that are compared
                    return search_with(leaving(less, fragment_bytes))
                if is_replayed(less, costs):
                    fragment_bytes = max(fragment_bytes, self._fragment_bytes)
                    fitting = search_fitting(search_with, less, costs, fragment_bytes, self._smallest_ratio)
                else:
                    fitting = Fitting(search_with(leaving(less, fragment_bytes)), fragment_bytes)
                self._fragment_bytes = fitting.fragment_bytes
                self._upload_bytes = less.beside_bytes - whole.beside_bytes
                return self._tell_of_allocator(fitting.choices, less, costs)
        choices = self._search(graph, costs, request)
        choices = self._tell_of_allocator(choices, beside_uploads(request, costs), costs)
        if thorough and fragment_bytes + self._left_free_bytes:  # it takes all of the budget
            self._fragment_bytes = self._upload_bytes = self._left_free_bytes = 0
            self._may_leave_free = False
        return choices

    def _tell_of_allocator(
        self, choices: tuple[Choice, ...], request: PlanRequest, costs: CostTable
    ) -> tuple[Choice, ...]:
        """Return the choices, the first one, which is to run, with what the allocator has to reserve for its plan.

        Warn if the budget is too small for that.

        Raises:
            _ShortOfRoomError: it is, and layer calls may still be cut.
        """
        if request.budget_bytes is None or not is_replayed(request, costs):
            return choices
        chosen = choices[0]
        if chosen.reserved_bytes is None:
            chosen = replayed(chosen, request, costs, self._smallest_ratio)
        if not is_served(chosen, request) and self._cuts_for_room:
            raise _ShortOfRoomError("torch's allocator would have to reserve more than the budget.")
        if not is_served(chosen, request) and self._runtime.world.rank == 0:
            assert chosen.reserved_bytes is not None and self._runtime.device.budget_bytes is not None
            plan, remedy = "harmony.plan", "plan again"
            if self._saved is None:
                plan, remedy = "the fastest plan that fits", "take smaller micro-batches"
            _logger.warning(
                "torch's allocator has to reserve %s for %s, and the budget is %s, %s of it set aside: in each step it "
                "gives back memory, takes it again, and waits for the device. Raise harmony.device_memory_gib, or %s.",
                amount(chosen.reserved_bytes),
                plan,
                amount(self._runtime.device.budget_bytes),
                amount(request.beside_bytes),
                remedy,
            )
        return (chosen, *choices[1:])

    def _search(self, graph: LayerGraph, costs: CostTable, request: PlanRequest) -> tuple[Choice, ...]:
        """Return the best plans for what is asked, see `_choose`."""
        machine = self._machine()

        def found() -> tuple[Choice, ...]:
            if self._saved is not None:
                return (adopt(self._saved, graph, costs, machine, self._element, request),)
            with self.progress.searching(len(costs.calls)):
                choices = search(graph, costs, machine, self._element, request, top=_TOP if request.thorough else 1)
            if request.thorough and self._settings.parallel == "auto" and self._runtime.device.count > 1:
                choices += tuple(self._of_replicas(graph, costs, machine, request))
                _tell_of_replicas(choices)
            if isinstance(self._settings.residency, int):
                for reason in why_not_resident(choices[0].plan.packing, self._settings.residency):
                    _logger.warning("%s", reason)
            return choices

        return self._runtime.world.compute_on_first("plan", found)

    def _of_replicas(
        self, graph: LayerGraph, costs: CostTable, machine: Machine, request: PlanRequest
    ) -> Iterator[Choice]:
        """Yield the plan, found by a quick search, of as many processes as there are devices, each of which has one."""
        count, processes = self._runtime.device.count, self._runtime.device.count * self._policy.devices
        asked = replace(
            request,
            policy=replace(request.policy, devices=processes, pipeline=1),
            micro_batches=-(-request.micro_batches // count),
            exchange_bytes=buffer_bytes(request.budget_bytes),
            thorough=False,
        )
        with suppress(DoesNotFitError):
            best = search(graph, costs, machine.among(count), self._element, asked)[0]
            yield replace(best, reason=f"{processes} replicas (torchrun --nproc_per_node {processes}): {best.reason}")

    def _machine(self) -> Machine:
        """Return the rates that plans are made with: the slowest of all processes, which run one plan."""
        # They wait for each other at every reduction: a step takes as long as in the slowest of them. What they share
        # (host memory, cores) they measure at the same time, so that no rate is to be divided or added up.
        world, machine = self._runtime.world, self.profiler.machine
        assert machine is not None
        if world.size > 1:
            machine = machine.with_peers(*world.reduce_rates(self._runtime.device))
        return reduce(Machine.slower, world.gather_values("rates", machine))

    def request(
        self, graph: LayerGraph, group_size: int, sizes: Sizes = WHOLE, left_free_bytes: int = 0
    ) -> PlanRequest:
        """Return what is asked of the search for a plan, which is to leave `left_free_bytes` of the budget free."""
        budget = self._runtime.device.budget_bytes
        beside = self._set_aside_bytes + self._shared_loss_bytes + left_free_bytes
        from_host = self._slices_from_host and sizes.cut
        return PlanRequest(
            settings=self._settings,
            micro_batches=-(-group_size // sizes.joined_count),
            budget_bytes=None if budget is None else max(0, budget - beside),
            beside_bytes=beside if budget is None else min(beside, budget),
            resident_bytes=self._resident_bytes(graph),
            exchange_bytes=self._runtime.world.reduce_bytes(self._runtime.device),
            policy=replace(
                self._policy,
                prefetch=self._policy.prefetch and not from_host,
                crossing_on_host=from_host,
                slices_from_host=from_host,
                joined_count=sizes.joined_count,
                forward_rows=sizes.forward,
                backward_rows=sizes.backward,
                tile_tokens=self.tiles_in_use.head,
                layer_tile_tokens=self.tiles_in_use.layers,
            ),
            host_bytes=self._host_bytes,
        )

    @property
    def beside_bytes(self) -> int:
        """Device memory that is no part of the plan: set aside, left free, and tensors from before the first plan."""
        exchange_bytes = 0 if self.plan is None else self.exchange_bytes(self.plan)
        left_bytes = self._fragment_bytes + self._upload_bytes + self._left_free_bytes
        return self._set_aside_bytes + left_bytes + exchange_bytes

    def exchange_bytes(self, plan: Plan) -> int:
        """Return the device memory that is set aside for exchanging gradients as `plan` does."""
        return 0 if plan.policy.reduce_on_host else self._runtime.world.reduce_bytes(self._runtime.device)

    @property
    def reserve_bytes(self) -> int:
        """The bytes of the budget that plans leave to libraries and to the allocator."""
        device, has_peers = self._runtime.device, self._runtime.device.count > 1 or self._runtime.world.size > 1
        return device.reserve_bytes() + (device.peer_reserve_bytes() if has_peers else 0)

    @property
    def _set_aside_bytes(self) -> int:
        return self.reserve_bytes + (self._before_bytes or 0)

    def _resident_bytes(self, graph: LayerGraph) -> int:
        """Return bytes of buffers, and of what autograd makes on the way into unlayered parameters' gradients."""
        trained = [spec for name in graph.unlayered if (spec := graph.parameter(name)).trainable]
        made = 0 if self._runtime.device_copies.accumulates_in_place else self._element.weight
        return self._runtime.installation.buffers.nbytes + sum(slab_bytes(spec.numel, made) for spec in trained)

    def plan_for(self, micro_batches: int) -> Plan:
        """Return the plan, made anew if so many single micro-batches are more than it is for."""
        assert self.plan is not None
        sizes = Sizes.from_policy(self.plan.policy)
        if self._check_allocator and self._runtime.world.size == 1:  # of several, each would find something else
            self._outgrown |= not self._is_served()
        self._check_allocator = False
        self._group_size = max(self._group_size, micro_batches)
        if self._outgrown or micro_batches > self.plan.micro_batches * sizes.joined_count:
            size = max(micro_batches, self.plan.micro_batches * sizes.joined_count)
            self.choices = self._choose(self.graph, self.costs[0], size, sizes)
            self._outgrown = False
        return self.choices[0].plan

    def _is_served(self) -> bool:
        """Return whether the device's allocator can serve the plan without giving memory back in between."""
        costs = self.costs[0]
        request = self.request(self.graph, self._group_size, left_free_bytes=self._left_free_bytes + self._upload_bytes)
        if not self._runtime.device.has_caching_allocator or not is_replayed(request, costs):
            return True
        self.choices = (replayed(self.choices[0], request, costs, self._smallest_ratio), *self.choices[1:])
        return is_served(self.choices[0], request)

    def raise_peak(self, peaks: tuple[int, ...]) -> bool:
        """Let the plan's peaks cover those of a group too, if the budget holds them; return whether it does."""
        assert self.plan is not None
        most = tuple(map(max, peaks, self.plan.device_peaks))
        if most == self.plan.device_peaks:
            return True
        budget_bytes = self.request(self.graph, self._group_size).budget_bytes
        if budget_bytes is not None and max(most) > budget_bytes + self._shared_loss_bytes:
            return False
        plan = replace(self.plan, peak_bytes=max(most), device_peaks=most)
        self.choices = (replace(self.choices[0], plan=plan), *self.choices[1:])
        return True

    def make_room(self, nbytes: int) -> None:
        """Keep `nbytes`, or more than so far, for shared losses; plan with what is left from the next group on."""
        grain = 1 if self._runtime.device.budget_bytes is None else self._runtime.device.budget_bytes // _GRAINS
        self._shared_loss_bytes = max(nbytes, self._shared_loss_bytes + grain)
        self._outgrown = True

    def leave_more_free(self) -> bool:
        """Leave one part more of the budget to the allocator, from the next group on, if a plan fits beside it.

        Returns:
            Whether it is tried: not where a plan was given or did not fit, and not beyond an eighth of the budget.
        """
        budget_bytes = self._runtime.device.budget_bytes
        if budget_bytes is None or not self._may_leave_free:
            return False
        more_bytes = budget_bytes // _FREE_PARTS
        if self._left_free_bytes + more_bytes > _MOST_FREE_PARTS * more_bytes:
            return False
        self._left_free_bytes += more_bytes
        self._outgrown = True
        return True

    def fill_pool(self) -> None:
        """Let the allocator take the rest of the budget now, where a request of the plan could need the last of it."""
        budget_bytes = self._runtime.device.budget_bytes
        if self.plan is None or budget_bytes is None:
            return
        if self.plan.peak_bytes + self.beside_bytes + self.costs[0].working_bytes > budget_bytes:
            self._runtime.device.fill_pool(self._upload_bytes)

    # ---- what became of it

    def check_peak(self, peak_bytes: int) -> None:
        """Log that a step took more than planned in any process, and plan for that in all from the next one on."""
        assert self.plan is not None and self._sized is not None
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
        self._sized, self._outgrown = self._sized.with_margin(excess), True


def _tell_of_replicas(choices: tuple[Choice, ...]) -> None:
    best, last = choices[0], choices[-1]
    if last.prediction.step_ms < best.prediction.step_ms:
        _logger.warning(
            "a step is predicted to take %.1f ms with the plan that runs, %s, and %.1f with %s",
            best.prediction.step_ms,
            best.reason,
            last.prediction.step_ms,
            last.reason,
        )


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


def _most_tokens(sample: Sample) -> int:
    """Return how many tokens a micro-batch has at most: places in the first two dimensions of token ids and labels.

    Where there are none, those of other tensors count: embeddings, patches of images.
    """
    tensors = [t for t in tensors_in(sample.inputs) if t.dim() > 1]
    of_ids = [t for t in tensors if not t.is_floating_point()]
    return max((t.shape[:2].numel() for t in of_ids or tensors), default=0)


def _next_smaller(sizes: Sequence[int], now: int, most: int) -> int | None:
    """Return the next of `sizes`, the largest first, that is smaller than `now` (0: all tokens, `most`); None: none is."""
    tried = [size for size in sizes if size < most <= size * _TILES_OF_A_MICRO_BATCH][:_MOST_TILES]
    return next((size for size in tried if size < (now or most)), None)


def _elements(shapes: InputShapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _dominates(known: InputShapes, shapes: InputShapes) -> bool:
    return len(known) == len(shapes) and all(
        len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in zip(known, shapes, strict=True)
    )
