"""Replays what a plan allocates, request by request, in the model of torch's caching allocator.

A plan says how many bytes are in use at each task. How many the allocator has to reserve for them depends on sizes and on
order: tensors that stay are put where shorter ones were, and what is free between them serves no larger request. Here each
task makes the requests that were recorded when the model was measured (`Allocations`):

    SWAP_IN, EVICT                one buffer for a pack's weights
    FORWARD                       of each call: `forward`, `code`; what is stashed stays
    FORWARD_FOR_GRAPH             of each call: `recompute`, `code`
    FUSED                         the same, then the loss, then `propagate` of each call, last one first
    BACKWARD                      of each call, last one first: `recompute`, `propagate`; then what is stashed is freed
    BACKWARD_FROM_GRAPH           of each call, last one first: `propagate`
    STASH_OUT, CROSSING_OUT, ...  frees what leaves, once it has been copied; what comes back is requested anew. Where
                                  slices take their inputs from the host, FUSED sends its stash away before the loss, too,
                                  and all that leaves is freed at once
    FREE_GRADIENTS                frees the sums of a pack's gradients, which its first micro-batch has made

A micro-batch's inputs are not among them: they have a pool of their own (`allocator_fit.beside_uploads`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harmony_ds.device.allocator_room import SEGMENT_BYTES
from harmony_ds.scheduler.allocations import Allocations, CallAllocations, Events
from harmony_ds.scheduler.caching_allocator import (
    LARGE_SEGMENT_BYTES,
    AllocatorStats,
    Block,
    CachingAllocator,
    Places,
    SimulatedOutOfMemoryError,
)
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import RUNS, Pack, Plan, Task, TaskKind

_STEPS = 3
_STEPS_OF_SEVERAL_SIZES = 20
"""Where micro-batches have several sizes, each step leaves its pieces elsewhere: what is reserved grows for some steps."""
_STREAM, _UPLOAD_STREAM = "compute", "upload"


@dataclass(slots=True)
class _Lane:
    """What one micro-batch holds.

    Attributes:
        blocks: by the number of the allocation.
        held: by number, how many calls will be recomputed from it.
        ended: numbers that only those calls hold.
        stash_on_host, crossing_on_host: by number, bytes, of what has left the device.
        gradients: that wait for earlier calls.
        gradients_on_host: bytes of those that have left.
        fraction: of what was measured, what its tensors take.
    """

    blocks: dict[int, Block] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    stash_on_host: dict[int, int] = field(default_factory=dict)
    crossing_on_host: dict[int, int] = field(default_factory=dict)
    gradients: list[Block] = field(default_factory=list)
    gradients_on_host: list[int] = field(default_factory=list)
    fraction: float = 1.0


class Replay:
    """The allocations of a plan's steps."""

    def __init__(self, plan: Plan, costs: CostTable, allocator: CachingAllocator, smallest_ratio: float = 1.0) -> None:
        """Replay `plan`. Micro-batches but the first have `smallest_ratio` to 1 times the tokens that were measured."""
        assert costs.allocations is not None
        self._plan = plan
        self._allocations: Allocations = costs.allocations
        self._costs = costs
        self._allocator = allocator
        self._uploads = CachingAllocator(expandable=True)
        self._lanes: dict[int, _Lane] = {}
        self._weights: dict[int, Block] = {}  # by pack
        self._sums: dict[int, dict[int, list[Block]]] = {}  # by pack, by place of the call
        self._leaving: list[Block] = []  # stash on its way to the host
        self._leaving_crossing: list[Block] = []
        self._smallest_ratio = smallest_ratio
        self._chance = random.Random(0)
        self._last_run = {task.micro_batch: number for number, task in enumerate(plan.tasks) if task.kind in RUNS}
        # Bytes of parameters' gradients, which do not get smaller with fewer tokens. Where they are summed in place, which
        # allocation is one is not known: any of these bytes is taken for one.
        self._fixed: set[int] = set()
        for call in self._allocations.calls:
            self._fixed.update(call.sums)
            self._fixed.update(nbytes for number, nbytes in call.propagate if number in call.unsummed)

    def load_resident(self) -> None:
        """Allocate what stays from step to step."""
        plan = self._plan
        rest = plan.resident_bytes
        for index in plan.policy.resident:
            pack = plan.packs[index]
            self._weights[index] = self._malloc(pack.weight_bytes)
            self._malloc(pack.resident_bytes - pack.weight_bytes)
            rest -= pack.resident_bytes
        if rest > 0:
            self._malloc(rest)

    @property
    def held_places(self) -> Places:
        """What is allocated, beside what stays from step to step."""
        sums = [block for calls in self._sums.values() for blocks in calls.values() for block in blocks]
        lanes = [block for lane in self._lanes.values() for block in (*lane.blocks.values(), *lane.gradients)]
        held = (*self._weights.values(), *sums, *lanes, *self._leaving, *self._leaving_crossing)
        return [(block.nbytes, block.start) for block in held]

    def step(self) -> None:
        """Run all tasks of the plan once."""
        for number, task in enumerate(self._plan.tasks):
            self.run_task(number, task)

    def run_task(self, number: int, task: Task) -> None:
        """Make the requests of the plan's task of this number."""
        if task.kind in RUNS:
            self._run(task)
            self._free_all(self._leaving_crossing)
            if self._last_run[task.micro_batch] == number:
                self._end_lane(task.micro_batch)
        else:
            self._run_other(task)

    # ---- runs of micro-batches

    def _run(self, task: Task) -> None:
        pack, kind = self._plan.packs[task.pack], task.kind
        lane = self._lane(task.micro_batch)
        calls = [self._allocations.calls[position] for position in pack.positions]
        if kind is TaskKind.FORWARD or (kind is TaskKind.FUSED and self._costs.in_slices):
            for call in calls:
                self._hold(lane, call)
                self._play(lane, call.forward)
                self._play(lane, call.code)
        elif kind in (TaskKind.FORWARD_FOR_GRAPH, TaskKind.FUSED):
            for call in calls:
                self._hold(lane, call)
                self._play_with_outputs(lane, call)
                self._play(lane, call.code)
        if kind is TaskKind.FUSED and self._plan.policy.slices_from_host:
            self._stash_out(lane, pack)
        if kind is TaskKind.FUSED:
            if self._costs.costs[pack.positions[-1]].runs_with_loss:  # its gradients are added up after each tile
                self._make_sums(pack, pack.positions[-1:])
            self._play(lane, self._allocations.loss)
            self._free_all(self._taken(lane, calls[-1].outputs))
            self._play(lane, self._allocations.propagate)
            lane.gradients += self._taken(lane, self._allocations.incoming)
        if kind in (TaskKind.FUSED, TaskKind.BACKWARD, TaskKind.BACKWARD_FROM_GRAPH):
            recomputes = kind is TaskKind.BACKWARD or (kind is TaskKind.FUSED and self._costs.in_slices)
            self._propagate(lane, pack, calls, recomputes)

    def _propagate(self, lane: _Lane, pack: Pack, calls: list[CallAllocations], recomputes: bool) -> None:
        unsummed: list[Block] = []
        for call in reversed(calls):
            for number in call.incoming:
                if lane.gradients:
                    lane.blocks[number] = lane.gradients.pop(0)
            if recomputes:
                self._play(lane, call.recompute)
            self._play(lane, call.propagate)
            unsummed += self._taken(lane, call.unsummed)
            lane.gradients += self._taken(lane, call.outgoing)
            self._free_all(self._taken(lane, call.incoming))
            self._release(lane, call)
        self._make_sums(pack, pack.positions)
        self._free_all(unsummed)

    def _make_sums(self, pack: Pack, positions: Sequence[int]) -> None:
        """Allocate the sums of gradients of the pack's calls at `positions`, where no micro-batch has done so before."""
        if not pack.gradient_bytes:
            return
        known = self._sums.setdefault(pack.index, {})
        for position in positions:
            if position not in known:
                known[position] = [self._malloc(nbytes) for nbytes in self._allocations.calls[position].sums]

    def _free_sums(self, pack: Pack) -> None:
        for blocks in self._sums.pop(pack.index, {}).values():
            self._free_all(blocks)

    def _lane(self, micro_batch: int) -> _Lane:
        lane = self._lanes.get(micro_batch)
        if lane is None:
            fraction = self._chance.uniform(self._smallest_ratio, 1.0) if micro_batch else 1.0
            lane = self._lanes[micro_batch] = _Lane(fraction=fraction)
            self._play(lane, self._allocations.lead)
        return lane

    def _end_lane(self, micro_batch: int) -> None:
        lane = self._lanes.pop(micro_batch)
        self._free_all(lane.gradients)
        self._free_all([*lane.blocks.values()])

    def _play(self, lane: _Lane, events: Events) -> None:
        blocks, held, malloc, uploads = lane.blocks, lane.held, self._allocator.malloc, self._allocations.uploads
        fixed, fraction = self._fixed, lane.fraction
        for number, nbytes in events:
            if nbytes and number in uploads:
                blocks[number] = self._uploads.malloc(nbytes, _UPLOAD_STREAM)
            elif nbytes:
                blocks[number] = malloc(nbytes if nbytes in fixed else int(nbytes * fraction) or 1, _STREAM)
            elif number in held:
                lane.ended.add(number)
            elif (block := blocks.pop(number, None)) is not None:
                self._free(block)

    def _play_with_outputs(self, lane: _Lane, call: CallAllocations) -> None:
        """Run a call with its graph, where its outputs go on to the next call; a recomputed call drops them."""
        lane.held |= dict.fromkeys(call.graph_outputs, 1)
        self._play(lane, call.recompute)
        for number in call.graph_outputs:
            lane.ended.discard(number)
            del lane.held[number]
        for number, in_graph in zip(call.outputs, call.graph_outputs, strict=False):
            if number not in lane.blocks and in_graph in lane.blocks:
                lane.blocks[number] = lane.blocks.pop(in_graph)

    def _hold(self, lane: _Lane, call: CallAllocations) -> None:
        for number in call.stashed:
            lane.held[number] = lane.held.get(number, 0) + 1

    def _release(self, lane: _Lane, call: CallAllocations) -> None:
        for number in call.stashed:
            holders = lane.held.pop(number, 1) - 1
            if holders:
                lane.held[number] = holders
            elif number in lane.ended:
                lane.ended.discard(number)
                self._free_all(self._taken(lane, (number,)))

    def _taken(self, lane: _Lane, numbers: Iterable[int]) -> list[Block]:
        """Return the blocks of allocations, which the micro-batch does not hold any more."""
        return [lane.blocks.pop(number) for number in numbers if number in lane.blocks]

    # ---- all other tasks

    def _run_other(self, task: Task) -> None:
        pack, lane = self._plan.packs[task.pack], self._lanes.get(task.micro_batch)
        if lane is not None:
            self._move(task, pack, lane)
        elif task.micro_batch < 0:  # else it has run to its end
            self._run_of_pack(task, pack)
        if self._plan.policy.slices_from_host:
            self._free_all(self._leaving_crossing)

    def _run_of_pack(self, task: Task, pack: Pack) -> None:
        """Make the requests of a task of all micro-batches."""
        match task.kind:
            case TaskKind.SWAP_IN:
                self._weights[pack.index] = self._malloc(pack.weight_bytes)
            case TaskKind.EVICT:
                self._free(self._weights.pop(pack.index))
            case TaskKind.FREE_GRADIENTS:
                self._free_sums(pack)
            case TaskKind.UPDATE_ON_DEVICE:
                if pack.update_bytes:
                    self._free(self._malloc(pack.update_bytes))
                self._free_sums(pack)
            case TaskKind.GATHER | TaskKind.REDUCE | TaskKind.SWAP_OUT | TaskKind.UPDATE | TaskKind.NORM:
                pass  # in memory that is there, or on the host
            case _:
                raise AssertionError(f"it is not known what {task.kind} allocates")

    def _move(self, task: Task, pack: Pack, lane: _Lane) -> None:
        """Free what a micro-batch sends to the host, or request anew what comes back."""
        match task.kind:
            case TaskKind.STASH_OUT:
                self._stash_out(lane, pack)
            case TaskKind.STASH_IN:
                self._free_all(self._leaving)
                for number in self._stashed(pack):
                    nbytes = lane.stash_on_host.pop(number, 0)
                    if nbytes and number not in lane.blocks:
                        lane.blocks[number] = self._malloc(nbytes)
                    lane.ended.add(number)
            case TaskKind.CROSSING_OUT:
                for call in self._allocations.calls[: pack.positions[-1] + 1]:  # what came back leaves again
                    for number in call.outputs:
                        if number in lane.blocks and number not in lane.held:
                            block = lane.blocks.pop(number)
                            lane.crossing_on_host[number] = block.nbytes
                            self._leaving_crossing.append(block)
            case TaskKind.CROSSING_IN:
                for number, nbytes in lane.crossing_on_host.items():
                    lane.blocks[number] = self._malloc(nbytes)
                lane.crossing_on_host.clear()
            case TaskKind.CROSSING_GRADIENTS_OUT:
                lane.gradients_on_host = [block.nbytes for block in lane.gradients]
                self._leaving_crossing += lane.gradients
                lane.gradients = []
            case TaskKind.CROSSING_GRADIENTS_IN:
                lane.gradients = [self._malloc(nbytes) for nbytes in lane.gradients_on_host]
            case _:
                raise AssertionError(f"it is not known what {task.kind} allocates")

    def _stash_out(self, lane: _Lane, pack: Pack) -> None:
        """Send to the host what a micro-batch has stashed for the pack, and free what has been sent before."""
        self._free_all(self._leaving)
        for number in self._stashed(pack):
            if number in lane.blocks and number in lane.held:
                lane.stash_on_host[number] = lane.blocks[number].nbytes
                if number in lane.ended:
                    self._leaving.append(lane.blocks.pop(number))
                del lane.held[number]
        if self._plan.policy.slices_from_host:
            self._free_all(self._leaving)

    def _stashed(self, pack: Pack) -> dict[int, None]:
        """Return the numbers of what the pack's calls stash, each once."""
        calls = [self._allocations.calls[position] for position in pack.positions]
        return dict.fromkeys(number for call in calls for number in call.stashed)

    def _malloc(self, nbytes: int) -> Block:
        return self._allocator.malloc(max(1, nbytes), _STREAM)

    def _free(self, block: Block) -> None:
        (self._uploads if block.pool.stream == _UPLOAD_STREAM else self._allocator).free(block)

    def _free_all(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._free(block)
        blocks.clear()


def reserved_bytes(plan: Plan, costs: CostTable, smallest_ratio: float = 1.0) -> int:
    """Return the most that the allocator reserves in the third step of `plan`, where it may reserve any number of bytes; in
    the first twenty steps, if micro-batches have several sizes.

    Where it may reserve no more than that, and has it from the start, each block is put in the same place.

    Args:
        smallest_ratio: see `Replay`.
    """
    steps = _STEPS if smallest_ratio == 1.0 else _STEPS_OF_SEVERAL_SIZES
    return _last_step(plan, costs, CachingAllocator(expandable=True), steps, smallest_ratio).reserved_peak_bytes


def retries(plan: Plan, costs: CostTable, pool_bytes: int) -> int:
    """Return how often the allocator gives back all that is free in the third step of `plan`, because no piece of it is
    large enough; at least once where memory runs out.

    Args:
        pool_bytes: what its pool of larger blocks has from the start, beside which there is next to nothing.
    """
    allocator = CachingAllocator(pool_bytes + SEGMENT_BYTES, expandable=True)
    whole_pages = pool_bytes - pool_bytes % LARGE_SEGMENT_BYTES
    if whole_pages > 0:
        allocator.free(allocator.malloc(whole_pages, _STREAM))
    try:
        return _last_step(plan, costs, allocator, _STEPS).retries
    except SimulatedOutOfMemoryError:
        return 1


def _last_step(
    plan: Plan, costs: CostTable, allocator: CachingAllocator, steps: int, smallest_ratio: float = 1.0
) -> AllocatorStats:
    """Return what the allocator has counted in the last of so many steps of `plan`."""
    replayed = Replay(plan, costs, allocator, smallest_ratio)
    replayed.load_resident()
    places: tuple[Places, Places] | None = None
    for _ in range(steps):
        allocator.stats.reset()
        replayed.step()
        before, places = places, (allocator.free_places, replayed.held_places)
        if places == before and smallest_ratio == 1.0:  # it ends as it began, and so does every step after it
            break
    return allocator.stats
