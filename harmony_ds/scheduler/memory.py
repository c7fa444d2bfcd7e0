"""Walks the tasks of a plan and counts the device bytes alive at each.

`activation_bytes` of a task is everything that autograd and the code between the layers hold while it runs: waiting
micro-batches, the stash, gradients, the working memory of the call. Weights come on top, from swap-in to evict.

Totals are carried from task to task, and what a micro-batch adds in a pack is worked out once per pack: a plan may have
ten thousand tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.pack_bytes import PackBytes, with_stash_on_host
from harmony_ds.scheduler.plan import Pack, Task, TaskKind


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Per task: bytes of swapped-in weights, and of everything else but what stays from step to step; on which device."""

    weight_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def device_peaks(self) -> tuple[int, ...]:
        """The most on each device."""
        peaks = [0] * (1 + max(self.devices, default=0))
        for device, weights, rest in zip(self.devices, self.weight_bytes, self.activation_bytes, strict=True):
            peaks[device] = max(peaks[device], weights + rest)
        return tuple(peaks)


def walk_memory(
    packs: tuple[Pack, ...],
    tasks: tuple[Task, ...],
    costs: CostTable,
    others: Mapping[int, CostTable] | None = None,
    sharing: Sequence[tuple[int, ...]] = (),
) -> MemoryProfile:
    """Return the bytes alive while each task runs.

    Args:
        others: costs by micro-batch, where they are not `costs`.
        sharing: sets of micro-batches that share a loss.
    """
    return MemoryWalks(costs).walk(packs, tasks, others=others, sharing=sharing)


class MemoryWalks:
    """Walks of many task lists, over packs of one model: what a micro-batch adds in a pack is worked out once."""

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        self._tables: dict[frozenset[int] | None, CostTable] = {None: costs}
        self._known: dict[tuple[int, int, frozenset[int] | None], PackBytes] = {}

    def walk(
        self,
        packs: tuple[Pack, ...],
        tasks: tuple[Task, ...],
        counts: Sequence[int] = (),
        others: Mapping[int, CostTable] | None = None,
        sharing: Sequence[tuple[int, ...]] = (),
    ) -> MemoryProfile:
        """Return the bytes alive while each task runs.

        Args:
            counts: how many micro-batches each one stands for; empty: for itself. While one runs that stands for
                several, no more is counted than while they wait: those before and after it show what running takes.
            others, sharing: see `walk_memory`.
        """
        others, count = others or {}, 1 + max(pack.device for pack in packs)
        # On several devices each pack has what it takes for itself, as it has where its stash waits on the host.
        away = count > 1 or any(task.kind in (TaskKind.STASH_OUT, TaskKind.STASH_IN) for task in tasks)
        known = {id(costs): MemoryWalks(costs)._counted(packs, away) for costs in others.values()}
        sides = {m: _Side(*known[id(costs)]) for m, costs in others.items()}
        walks = [_Walk(packs, _Side(*self._counted(packs, away)), sides, counts, sharing) for _ in range(count)]
        swapped_in = {task.pack for task in tasks if task.kind is TaskKind.SWAP_IN}
        for pack in packs:
            if not pack.positions and pack.index not in swapped_in:  # an earlier part of the step brought it
                walks[pack.device].bring(pack.index)
        devices = [packs[task.pack].device for task in tasks]
        rows = [walks[device].step(task) for device, task in zip(devices, tasks, strict=True)]
        return MemoryProfile(tuple([w for w, _ in rows]), tuple([a for _, a in rows]), tuple(devices))

    def pack_bytes(self, packs: tuple[Pack, ...], away: bool) -> list[PackBytes]:
        """Return what a micro-batch adds in each pack; `away`: where some stash waits on the host."""
        return self._counted(packs, away)[1]

    def _counted(self, packs: tuple[Pack, ...], away: bool) -> tuple[CostTable, list[PackBytes]]:
        cuts = None
        if away:  # calls that stash more where a pack begins
            calls = self._costs.costs
            firsts = {pack.positions[0] for pack in packs if pack.positions}
            cuts = frozenset(first for first in firsts if calls[first].stash_again_at_cut_bytes)
            if cuts not in self._tables:
                self._tables[cuts] = with_stash_on_host(cuts, self._costs)
        costs, found = self._tables[cuts], []
        for pack in packs:
            if pack.positions:
                key = pack.positions[0], pack.positions[-1], cuts
                if key not in self._known:
                    self._known[key] = PackBytes(pack, costs)
                found.append(self._known[key])
        return costs, found


class _Total:
    """Bytes by key, and their sum."""

    __slots__ = ("_held", "total")

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[object, tuple[int, int]] = {}

    def put(self, key: object, nbytes: int, times: int = 1) -> bool:
        """`key` now holds `nbytes`, which count so many times. Returns whether it held something before."""
        before, counted = self._held.get(key, (0, 0))
        self.total += times * nbytes - counted * before
        self._held[key] = nbytes, times
        return counted > 0

    def take(self, key: object) -> int:
        """Remove and return what `key` held."""
        nbytes, times = self._held.pop(key, (0, 0))
        self.total -= times * nbytes
        return nbytes


class _Side:
    """Bytes of micro-batches of one cost table."""

    def __init__(self, costs: CostTable, packs: list[PackBytes]) -> None:
        self.costs = costs
        self.packs = packs
        self.stash_before = list(accumulate((call.stashed_bytes for call in costs.costs), initial=0))
        needing = [position for position, cost in enumerate(costs.costs) if cost.needs_backward]
        self.backward_ends = min(needing, default=0)
        self.loss = 2 * costs.scalar_bytes  # and its scaled copy


class _Walk:
    """Bytes on one device. A micro-batch that has gone on to another holds there what it held when it left."""

    def __init__(
        self,
        packs: tuple[Pack, ...],
        side: _Side,
        others: Mapping[int, _Side],
        counts: Sequence[int],
        sharing: Sequence[tuple[int, ...]],
    ) -> None:
        self._side = self._mine = side
        self._others = others  # by micro-batch
        self._counts = counts
        self._plan_packs = packs
        self._updated: set[int] = set()  # packs, on the device
        self._held: dict[int, int] = {}  # by micro-batch: what it holds between its passes
        self._weights = _Total()
        self._gradients = _Total()
        self._waiting = _Total()  # by micro-batch: what it holds while others run
        self._stash = _Total()  # by micro-batch: what of it is on the device
        self._graphs = _Total()  # by (pack, micro-batch), where it is kept
        self._known: set[int] = set()  # micro-batches whose forward pass is among the tasks
        self._arrived = _Total()  # by (pack, micro-batch): stash that came back from the host
        self._outputs = _Total()  # by micro-batch: of the model, until the loss that it shares has been made
        self._aside = _Total()  # by pack: sums of gradients, while those of one shared loss are added up
        self._first_back = {one[-1] for one in sharing}
        self._last_back = {one[0] for one in sharing}
        self._leaving = 0  # stash on its way to the host
        self._runs: dict[TaskKind, Callable[[PackBytes, Task], int]] = {
            TaskKind.FORWARD: self._forward,
            TaskKind.FUSED: self._fused,
            TaskKind.BACKWARD: self._backward,
            TaskKind.FORWARD_FOR_GRAPH: self._forward,
            TaskKind.BACKWARD_FROM_GRAPH: self._backward,
        }

    def step(self, task: Task) -> tuple[int, int]:
        """Weights, and everything else, while `task` runs."""
        self._side = self._others.get(task.micro_batch, self._mine)
        run = self._runs.get(task.kind)
        if run is not None:
            activations = run(self._side.packs[task.pack], task)
            if self._times(task) > 1:
                return 0, 0
            return self._weights.total, activations + self._side.costs.margin_bytes + self._gradients.total
        match task.kind:
            case TaskKind.SWAP_IN:
                self.bring(task.pack)
            case TaskKind.STASH_OUT:
                self._stash_out(self._side.packs[task.pack], task)
            case TaskKind.STASH_IN:
                self._stash_in(self._side.packs[task.pack], task)
            case TaskKind.MOVE | TaskKind.MOVE_BACK:
                self._waiting.put(task.micro_batch, self._moved(self._side.packs[task.pack], task))
            case TaskKind.FREE_GRADIENTS:
                self._gradients.take(task.pack)
        working = self._plan_packs[task.pack].update_bytes if task.kind is TaskKind.UPDATE_ON_DEVICE else 0
        held = self._weights.total, self._gradients.total + self._between + working
        if task.kind is TaskKind.EVICT:
            self._weights.take(task.pack)
        if task.kind is TaskKind.UPDATE_ON_DEVICE:
            self._free_updated(task.pack)
        return held

    def _moved(self, pack: PackBytes, task: Task) -> int:
        """Return what a micro-batch holds that comes to the device."""
        if task.kind is TaskKind.MOVE:
            return self._side.costs.costs[pack.first].alive_bytes
        return self._held_by(task) + self._side.costs.costs[pack.last + 1].shared_bytes

    def bring(self, index: int) -> None:
        """Weights come; those of no call with their gradients, which any call may give them."""
        pack = self._plan_packs[index]
        if pack.positions:
            self._weights.put(index, self._side.packs[index].weight_bytes)
        else:
            self._weights.put(index, pack.weight_bytes)
            self._gradients.put(index, pack.gradient_bytes)

    def _free_updated(self, pack: int) -> None:
        """Gradients of a parameter that resident packs share are kept until its owner's update."""
        self._updated.add(pack)
        done = {name for index in self._updated for name in self._plan_packs[index].owned}
        for index in [i for i in self._updated if done.issuperset(self._plan_packs[i].parameters)]:
            self._gradients.take(index)

    def _times(self, task: Task) -> int:
        return self._counts[task.micro_batch] if self._counts else 1

    @property
    def _between(self) -> int:
        """Bytes that all micro-batches hold while none runs."""
        held = self._waiting.total + self._stash.total + self._graphs.total + self._arrived.total + self._leaving
        return held + self._outputs.total + self._aside.total

    def _forward(self, pack: PackBytes, task: Task) -> int:
        self._known.add(task.micro_batch)
        self._waiting.take(task.micro_batch)
        keeps = task.kind is TaskKind.FORWARD_FOR_GRAPH
        most = self._between + (pack.forward_for_graph_bytes if keeps else pack.forward_bytes)
        if keeps:
            self._graphs.put((task.pack, task.micro_batch), pack.kept_bytes, self._times(task))
        times = self._times(task)
        self._waiting.put(task.micro_batch, self._held_after(pack, task), times)
        self._stash.put(task.micro_batch, self._stash.take(task.micro_batch) + pack.stash_bytes, times)
        if self._ends_with(pack):
            self._outputs.put(task.micro_batch, self._side.costs.output_bytes, times)
        return max(most, self._between)

    def _ends_with(self, pack: PackBytes) -> bool:
        """Return whether a forward pass is over after `pack`."""
        return pack.last == len(self._side.costs.costs) - 1

    def _set_aside(self, again: bool, pack: PackBytes, task: Task) -> None:
        """Keep the sums of gradients apart while the micro-batches of a shared loss add up theirs."""
        if again and task.micro_batch in self._first_back:
            self._aside.put(task.pack, pack.set_aside_bytes)

    def _held_after(self, pack: PackBytes, task: Task) -> int:
        """Return what a micro-batch holds that has been run forward through `pack`, beside its stash."""
        calls, following = self._side.costs.costs, pack.last + 1
        return calls[following].alive_bytes if following < len(calls) else self._held_by(task)

    def _fused(self, pack: PackBytes, task: Task) -> int:
        self._known.add(task.micro_batch)
        again = self._gradients.put(task.pack, pack.gradient_bytes)
        self._set_aside(again, pack, task)
        self._waiting.take(task.micro_batch)
        most = self._between + pack.fused_bytes[again]
        # What it holds from before this pack waited with it; what came with this pack goes with its graph.
        self._held[task.micro_batch] = (
            min(self._side.costs.held_bytes, pack.alive_after_forward_bytes) + self._side.loss
        )
        self._leave(pack, task)
        return max(most, self._between)

    def _held_by(self, task: Task) -> int:
        return self._held.get(task.micro_batch, self._side.costs.held_bytes + self._side.loss)

    def _backward(self, pack: PackBytes, task: Task) -> int:
        again = self._gradients.put(task.pack, pack.gradient_bytes)
        self._set_aside(again, pack, task)
        if self._ends_with(pack):
            self._outputs.take(task.micro_batch)
        key = (task.pack, task.micro_batch)
        excess = 0
        if self._arrived.take(key):
            excess = pack.excess_bytes
        else:
            # Of a micro-batch whose forward pass ran before the first task, all the stash is still there.
            own = self._stash.take(task.micro_batch)
            if task.micro_batch not in self._known:
                own = self._side.stash_before[pack.last + 1]
            self._stash.put(task.micro_batch, max(0, own - pack.stash_bytes), self._times(task))
        self._known.add(task.micro_batch)
        self._waiting.take(task.micro_batch)
        self._graphs.take(key)
        kept = task.kind is TaskKind.BACKWARD_FROM_GRAPH
        running = pack.backward_from_graph_bytes if kept else pack.backward_bytes
        most = self._between + self._held_by(task) + excess + running[again]
        self._leave(pack, task)
        most = max(most, self._between)
        if task.micro_batch in self._last_back:
            self._aside.take(task.pack)
        return most

    def _leave(self, pack: PackBytes, task: Task) -> None:
        done = pack.first <= self._side.backward_ends
        left = self._side.loss if done else self._held_by(task) + pack.shared_bytes
        self._waiting.put(task.micro_batch, left, self._times(task))

    def _stash_out(self, pack: PackBytes, task: Task) -> None:
        """Drop the copies to the host, which leave the device when the next ones move."""
        self._leaving = pack.stash_bytes
        own = self._stash.take(task.micro_batch)
        self._stash.put(task.micro_batch, max(0, own - pack.stash_bytes), self._times(task))

    def _stash_in(self, pack: PackBytes, task: Task) -> None:
        self._known.add(task.micro_batch)
        self._leaving = 0
        self._arrived.put((task.pack, task.micro_batch), pack.returning_bytes)
