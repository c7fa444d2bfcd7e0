"""How layer calls are cut, into slices of rows and tiles of tokens, and which cuts are tried where no plan fits.

They are tried in this order, each after those before it have failed:

    1. none beyond those in force
    2. slices of half the rows, a quarter, and so on; but not where the last layer and the loss, which is over all rows,
       take most
    3. smaller and smaller tiles of tokens, of the head, beside the rows of 1; where the other layers take most then, slices
       as in 2
    4. the same of other layers, beside the rows of 1, and slices beside the last tiles
    5. the same with all that is between layers on the host, whole micro-batches first: beside the tiles of 1, then beside
       the last ones

Where the head takes most beside slices, its tiles are made smaller, as long as that helps, before the slices are.

`Planner.measure` has them tried (`CallCuts.find_with_fewest`): an attempt measures the model so cut, and searches for a
plan. Rows are cut here where `harmony.micro_batch` is "config", and tokens where `harmony.tokens` is "auto": the defaults.
With other values of `harmony.micro_batch`, `call_sizes` decides on the rows within each attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from harmony_ds.config import Config
from harmony_ds.decomposer.graph import LayerGraph, slab_bytes
from harmony_ds.errors import DoesNotFitError
from harmony_ds.model.trees import tensors_in
from harmony_ds.profiling.profiler import Profiler
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.grid import amount, counted, gib_number
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.rows import Rows
from harmony_ds.scheduler.search import smallest_failure
from harmony_ds.scheduler.sizes import WHOLE, Sizes
from harmony_ds.scheduler.tiles import Tiles, head_takes_most
from harmony_ds.step.call_sizes import CallSizes

_logger = logging.getLogger(__name__)

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
_LESS_WITH_TILES = 0.99
"""With smaller tiles of the last layer and the loss, a plan needs less than this fraction; else those are not what is in
the way."""

_Found = TypeVar("_Found")
Attempt = Callable[[list[CostTable]], _Found]
"""Find something with the layer calls as they are cut now; add the costs of what is tried to the list. Raises
DoesNotFitError."""


class ShortOfRoomError(DoesNotFitError):
    """A plan fits the budget, but not with the pieces of memory that serve none of its requests."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How layer calls are cut.

    Attributes:
        rows: of the slices that they take, and whether from the host; None: as many as the search finds best.
        tiles: of tokens, whether or not the model has anything that can be cut into them.
    """

    rows: Sizes | None
    tiles: Tiles

    def round_alike(self, other: Cuts) -> bool:
        """Return whether results are the same to the bit with both."""
        return self._from_device() == other._from_device()

    def _from_device(self) -> Cuts:
        """Return the same cuts of inputs that wait on the device."""
        return self if self.rows is None else replace(self, rows=replace(self.rows, from_host=False))

    def __str__(self) -> str:
        sizes, parts = self.rows or WHOLE, []
        if sizes.cut:
            parts.append(f"slices of {counted(sizes.backward, 'row')}")
        elif sizes.from_host or not self.tiles.cut:
            parts.append("whole micro-batches")
        if sizes.from_host:
            parts[0] += " from the host"
        if self.tiles.cut:
            parts.append(str(self.tiles))
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt that has found nothing: how layer calls were cut, its error, and the last costs that it tried, if any."""

    cuts: Cuts
    error: DoesNotFitError
    costs: CostTable | None

    def needs_less_than(self, other: _Failure) -> bool:
        """Return whether a plan needs less than with the cuts of `other`, as far as that is known."""
        needed, before = self.error.least_budget_bytes, other.error.least_budget_bytes
        return needed is None or before is None or needed < _LESS_WITH_TILES * before


@dataclass(frozen=True, slots=True)
class _Success(Generic[_Found]):
    """What an attempt has found."""

    found: _Found


class _Attempts(Generic[_Found]):
    """Attempts of one kind with layer calls that are cut more and more; those that fail are kept in `failures`."""

    def __init__(self, cuts: CallCuts, attempt: Attempt[_Found]) -> None:
        self._cuts, self._attempt = cuts, attempt
        self.failures: list[_Failure] = []

    def make(self) -> _Success[_Found] | _Failure:
        """Make an attempt with the layer calls as they are cut now."""
        costs: list[CostTable] = []
        try:
            return _Success(self._attempt(costs))
        except DoesNotFitError as error:
            failure = _Failure(self._cuts.now, error.with_traceback(None), costs[-1] if costs else None)
            self.failures.append(failure)
            return failure


class CallCuts:
    """The cuts of one model's layer calls: those in force, and others where no plan fits with them.

    Attributes:
        may_try_others: while other cuts may be tried: a plan that the device's allocator cannot serve does not fit.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        graph: LayerGraph,
        profiler: Profiler,
        sizes: CallSizes,
        saved: Plan | None,
    ) -> None:
        """Begin with the cuts of `saved`, if given, else of the ds_config; `sizes` holds the rows."""
        settings = config.harmony
        self._runtime = runtime
        self._settings = settings
        self._graph = graph
        self._element = ElementBytes(config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)
        self._profiler = profiler
        self._sizes = sizes
        self._is_given = saved is not None
        self._set_tiles(Tiles.from_config(settings.tokens) if saved is None else Tiles.from_policy(saved.policy))
        self.may_try_others = False
        # Whether tiles have been tried, and no layer was one whose output can be made in them:
        self._found_no_head = False

    # ---- those in force

    @property
    def now(self) -> Cuts:
        """The cuts in force."""
        calls = self._runtime.layer_calls
        return Cuts(self._sizes.wanted, Tiles(calls.head_tiles.size, calls.layer_tiles.size))

    @property
    def tiles_in_use(self) -> Tiles:
        """The tiles that something runs in, as far as has been seen."""
        calls = self._runtime.layer_calls
        has_head = any(calls.head_tiles.heads.values())
        return Tiles(calls.head_tiles.size if has_head else 0, calls.layer_tiles.size if calls.layer_tiles.cut else 0)

    @property
    def may_change(self) -> bool:
        """Whether layer calls may take fewer rows or tokens than they do, where nothing fits."""
        settings = self._settings
        return not self._is_given and (settings.micro_batch in ("config", "auto") or settings.tokens == "auto")

    def set(self, cuts: Cuts) -> None:
        """Cut layer calls so from now on: what was measured in other cuts is not known of these."""
        self._sizes.wanted = cuts.rows
        self._set_tiles(cuts.tiles)

    def _set_tiles(self, tiles: Tiles) -> None:
        calls = self._runtime.layer_calls
        calls.head_tiles.size, calls.layer_tiles.size = tiles.head, tiles.layers

    def repeat(self, policy: Mapping[str, Any]) -> None:
        """Cut layer calls as the run did that goes on here, where the ds_config leaves it open; `policy`: of its plan."""
        cuts = self.now
        if not self._is_given and self._settings.tokens == "auto":
            cuts = replace(cuts, tiles=Tiles.from_policy(policy))
        if self._may_slice:
            forward_rows, backward_rows = policy.get("forward_rows", 0), policy.get("backward_rows", 0)
            from_host = policy.get("slices_from_host", False)
            cuts = replace(cuts, rows=Sizes(forward_rows, backward_rows, from_host=from_host))
        self.set(cuts)

    def log(self, sample: Sample, rows: Rows, graph: LayerGraph) -> None:
        """Log what runs in slices of `rows`, or in tiles of tokens, since nothing fits otherwise with `sample`."""
        tiles, parts = self.tiles_in_use, []
        if rows.cuts:
            source = " from the host" if rows.from_host else ""
            parts.append(f"layer calls take slices of {counted(rows.backward, 'row')}{source} (harmony.micro_batch)")
        elif rows.from_host:
            parts.append("all that is between layers waits on the host")
        if tiles.head:
            heads = [layer for layer, is_head in self._runtime.layer_calls.head_tiles.heads.items() if is_head]
            names = ", ".join(graph.layers[layer].name for layer in heads)
            parts.append(f"{names} and the loss run in tiles of {tiles.head} tokens (harmony.tokens)")
        if tiles.layers:
            parts.append(f"parts of layers run in tiles of {tiles.layers} tokens (harmony.tokens)")
        whole = f"{sample.rows:,} rows" if not tiles.cut else f"{_most_tokens(sample):,} tokens"
        other = f"plan for all {whole} of a micro-batch at once" if rows.cuts or tiles.cut else "other plan"
        if parts:
            _logger.warning("%s, since no %s fits", ", ".join(parts), other)

    # ---- others, where nothing fits

    def find_with_fewest(self, sample: Sample, attempt: Attempt[_Found]) -> _Found:
        """Return what `attempt` finds with layer calls that are cut no further than it takes, where the ds_config allows.

        They are cut where no plan fits, or none that the device's allocator can serve without giving memory back in each
        step.

        Raises:
            DoesNotFitError: none fits. The error is that of the attempt that needs least, and says what others need; layer
                calls stay as that attempt had them.
        """
        attempts = _Attempts(self, attempt)
        self.may_try_others, self._found_no_head = self.may_change, False
        try:
            success = self._try_in_order(sample, attempts)
        finally:
            self.may_try_others = False
        if success is not None:
            return success.found
        short = next((one for one in attempts.failures if isinstance(one.error, ShortOfRoomError)), None)
        if short is None:
            raise self._least_error(attempts.failures)
        self.set(short.cuts)
        return attempt([])  # a step that has to wait for memory is better than none

    def _try_in_order(self, sample: Sample, attempts: _Attempts[_Found]) -> _Success[_Found] | None:
        """Return the first success, in the order that the top of the file tells; None: nothing fits."""
        before = self.now
        first = attempts.make()  # 1
        if isinstance(first, _Success):
            return first
        if first.costs is None or not self._head_takes_most(first.costs):
            success = self._try_slices(sample, attempts, first.costs)  # 2
            if success is not None:
                return success
            self.set(before)
        success = self._try_tiles(sample, attempts, before, first.costs)  # 3, 4
        if success is None and self._may_take_slices_from_host:
            success = self._try_from_host(sample, attempts, before.tiles, first.costs)  # 5
        return success

    def _try_tiles(
        self, sample: Sample, attempts: _Attempts[_Found], before: Cuts, of_whole: CostTable | None
    ) -> _Success[_Found] | None:
        """Return the success with the largest tiles that fit, beside the rows of `before` or slices; None: none fits.

        `of_whole`: costs of what does not fit without tiles.
        """
        costs = of_whole
        while (tiles := self._smaller_tiles(sample, costs)) is not None:
            now = self.now.tiles
            if now.head and not now.layers and tiles.layers:  # before other layers than the head are cut
                success = self._try_slices(sample, attempts, costs)
                if success is not None:
                    return success
            self.set(replace(before, tiles=tiles))
            tried = attempts.make()
            if isinstance(tried, _Success):
                return tried
            costs = tried.costs
        return self._try_slices(sample, attempts) if self.now.tiles.cut else None

    def _try_from_host(
        self, sample: Sample, attempts: _Attempts[_Found], first_tiles: Tiles, of_whole: CostTable | None
    ) -> _Success[_Found] | None:
        """Return the success with what is between layers on the host, beside `first_tiles` or the last tiles; None: none.

        `of_whole`: see `_try_slices`.
        """
        for tiles in dict.fromkeys((first_tiles, self.now.tiles)):
            self.set(Cuts(Sizes(from_host=True), tiles))
            success = self._try_slices(sample, attempts, of_whole)
            if success is not None:
                return success
        return None

    def _least_error(self, failures: Sequence[_Failure]) -> DoesNotFitError:
        """Cut layer calls as the attempt did that needs least, and return its error with what others need.

        Where none could be measured within the budget, that is the last one, which cuts most.
        """
        needs = [one.error.least_budget_bytes for one in failures if one.error.least_budget_bytes is not None]
        error = smallest_failure([failure.error for failure in failures]) if needs else failures[-1].error
        least = next(failure for failure in failures if failure.error is error)
        self.set(least.cuts)
        if len(failures) == 1:
            return error
        said = f"{error}\nThat is the least of {len(failures)} ways to cut layer calls: {least.cuts}."
        if len(needs) > 1:
            said += f" Others need up to {amount(max(needs))} ({gib_number(max(needs))} GiB)."
        if unmeasured := len(failures) - len(needs):
            said += f" {unmeasured} did not fit while they were measured, one layer with one micro-batch at a time."
        whole = DoesNotFitError(said, error.least_budget_bytes)
        whole.__cause__ = error.__cause__
        return whole

    # ---- slices of rows

    @property
    def _may_slice(self) -> bool:
        """Whether the ds_config leaves open how many rows layer calls take."""
        return self._settings.micro_batch == "config" and not self._is_given

    @property
    def _may_take_slices_from_host(self) -> bool:
        """Whether one device, which groups micro-batches, may keep on the host all that waits between layers."""
        settings = self._settings
        return self._may_slice and settings.stash != "device" and settings.grouping and self._runtime.device.count == 1

    def _try_slices(
        self, sample: Sample, attempts: _Attempts[_Found], of_whole: CostTable | None = None
    ) -> _Success[_Found] | None:
        """Return the success with the largest slices of rows that fit; None: none fits.

        From the host, whole micro-batches come first: of single rows, or of layers whose rows depend on each other, there
        are no slices.

        Args:
            of_whole: costs of calls that are not cut. Slices whose share of these is more than the budget are not tried.
        """
        if not self._may_slice:
            return None
        world, larger, needed_by_larger = self._runtime.world, 0, 0
        rows = world.max("rows to cut", sample.rows)
        room_bytes = world.max("room for slices", self._runtime.device.budget_bytes or 0)
        whole_bytes = 0 if of_whole is None else of_whole.layer_bytes
        before = self.now.rows or WHOLE
        sizes = [*_halves(min(before.forward or rows, rows))]
        for size in [rows, *sizes] if before.from_host else sizes:
            if size * _MOST_SLICES < rows:
                return None
            if size > 1 and whole_bytes * size > room_bytes * rows:
                continue
            cut = 0 if size == rows else size
            self.set(replace(self.now, rows=Sizes(cut, cut, from_host=before.from_host)))
            tried = self._try_head_tiles(sample, attempts)
            if isinstance(tried, _Success):
                return tried
            if cut and not world.any("cut into slices", self._profiler.rows(Sizes(cut, cut)).cuts):
                return None
            needed = world.max("needed by slices", tried.error.least_budget_bytes or 0)
            if needed and needed_by_larger:
                # Whatever the task that takes most, fewer rows, down to one, save no more for each row than these did.
                saved_by_row = (needed_by_larger - needed) / (larger - size)
                if needed - saved_by_row * (size - 1) > room_bytes:
                    return None
            larger, needed_by_larger = size, needed
        return None

    # ---- tiles of tokens

    def _try_head_tiles(self, sample: Sample, attempts: _Attempts[_Found]) -> _Success[_Found] | _Failure:
        """Return what comes of the largest tiles of the last layer and the loss that fit, or of the smallest that help.

        Smaller ones are tried as long as the head takes most.
        """
        tried = attempts.make()
        while isinstance(tried, _Failure) and tried.costs is not None:
            before, tiles = self.now, self._smaller_tiles(sample, tried.costs)
            if tiles is None or tiles.head == before.tiles.head:
                break
            self.set(replace(before, tiles=tiles))
            smaller = attempts.make()
            if isinstance(smaller, _Failure) and not smaller.needs_less_than(tried):
                self.set(before)
                break
            tried = smaller
        return tried

    def _head_takes_most(self, costs: CostTable) -> bool:
        """Return whether the last layer and the loss, with weights and their gradients, take most device memory."""
        graph, element = self._graph, self._element
        held = []
        for layer in costs.calls:
            parameters = [graph.parameter(name) for name in graph.layers[layer].parameters]
            sums = sum(slab_bytes(spec.numel, element.gradient) for spec in parameters if spec.trainable)
            held.append(sum(spec.weight_bytes(element.weight) for spec in parameters) + sums)
        return head_takes_most(costs, held)

    def _smaller_tiles(self, sample: Sample, costs: CostTable | None) -> Tiles | None:
        """Return the tiles to try where those in force do not fit; None: there are none, or the ds_config names them.

        What takes most memory is cut further, the head or the layers, into the largest tiles at first. Where that cannot be
        cut any more, nothing helps.

        Args:
            costs: of what does not fit; None: it could not even be measured. Then the head is cut first.
        """
        if self._settings.tokens != "auto" or self._is_given:
            return None
        now, seen = self.now.tiles, self.tiles_in_use
        most = self._runtime.world.max("tokens to cut", _most_tokens(sample))
        has_no_head = bool(now.head) and not seen.head
        self._found_no_head |= has_no_head and costs is not None
        head = None if has_no_head or self._found_no_head else _next_smaller(_HEAD_TILES, now.head, most)
        layers = None if now.layers and not seen.layers else _next_smaller(_LAYER_TILES, now.layers, most)
        cuts_head = head is not None and (not now.head or layers is None)
        if costs is not None and costs.costs:
            cuts_head = self._head_takes_most(costs)
        if cuts_head:
            return None if head is None else replace(now, head=head)
        return None if layers is None else replace(now, layers=layers)


def _halves(rows: int) -> Iterator[int]:
    """Yield half of `rows`, a quarter, and so on, down to one."""
    while rows > 1:
        rows = -(-rows // 2)
        yield rows


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
