"""Walks the tasks of a plan and counts the device bytes alive at each.

`activation_bytes` of a task is everything that autograd and the code between the layers hold while it runs: waiting
micro-batches, the stash, gradients, the working memory of the call. Weights come on top, from swap-in to evict.

Totals are carried from task to task, and what a micro-batch adds in a pack is worked out once per pack: a plan may have
ten thousand tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from harmony_ds.decomposer.graph import ALIGNMENT_BYTES
from harmony_ds.profiler.costs import CallCost, CostTable
from harmony_ds.scheduler.plan import Pack, Task, TaskKind, parked


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Per task: bytes of swapped-in weights, and of everything else but the resident set."""

    weight_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max((w + a for w, a in zip(self.weight_bytes, self.activation_bytes, strict=True)), default=0)


def walk_memory(packs: tuple[Pack, ...], tasks: tuple[Task, ...], costs: CostTable) -> MemoryProfile:
    """The bytes alive while each task runs."""
    return MemoryWalks(packs, costs).walk(tasks)


class MemoryWalks:
    """Walks of several task lists over the same packs."""

    def __init__(self, packs: tuple[Pack, ...], costs: CostTable) -> None:
        self._packs = packs
        self._costs = costs
        self._known: dict[bool, tuple[CostTable, list[_PackCosts]]] = {}

    def walk(self, tasks: tuple[Task, ...]) -> MemoryProfile:
        """The bytes alive while each task runs."""
        away = any(task.kind in (TaskKind.STASH_OUT, TaskKind.STASH_IN) for task in tasks)
        if away not in self._known:
            costs = _with_stash_on_host(self._packs, self._costs) if away else self._costs
            self._known[away] = costs, [_PackCosts(pack, costs) for pack in self._packs]
        walk = _Walk(self._packs, *self._known[away], parked(self._packs, tasks))
        rows = [walk.step(task) for task in tasks]
        return MemoryProfile(tuple(w for w, _ in rows), tuple(a for _, a in rows))


def _with_stash_on_host(packs: tuple[Pack, ...], costs: CostTable) -> CostTable:
    """Each pack stashes for itself what its calls take; what lingers is no part of an earlier stash, but on top of it."""
    firsts = {pack.positions[0] for pack in packs}
    calls = (
        replace(
            call,
            alive_bytes=call.alive_bytes + call.lingering_bytes,
            staying_bytes=call.staying_bytes + call.lingering_bytes,
            stash_bytes=call.stash_bytes + call.again_bytes + (call.borrowed_bytes if position in firsts else 0),
        )
        for position, call in enumerate(costs.costs)
    )
    return replace(costs, costs=tuple(calls), held_bytes=costs.held_bytes + costs.held_lingering_bytes)


class _Total:
    """Bytes by key, and their sum."""

    __slots__ = ("_held", "total")

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[object, int] = {}

    def put(self, key: object, nbytes: int) -> bool:
        """`key` now holds `nbytes`. Returns whether it held something before."""
        known = self._held.get(key)
        self.total += nbytes - (known or 0)
        self._held[key] = nbytes
        return known is not None

    def take(self, key: object, default: int = 0) -> int:
        """What `key` held; it holds nothing any more."""
        nbytes = self._held.pop(key, None)
        self.total -= nbytes or 0
        return default if nbytes is None else nbytes


class _PackCosts:
    """What one micro-batch adds at most while it runs through a pack, in each of the three ways."""

    def __init__(self, pack: Pack, costs: CostTable) -> None:
        self._costs = costs
        self.first, self.last = pack.positions[0], pack.positions[-1]
        self._calls = costs.costs[self.first : self.last + 1]
        padding = costs.scalar_bytes if costs.scalar_bytes > ALIGNMENT_BYTES else 0
        self.weight_bytes = pack.weight_bytes + (padding if pack.weight_bytes else 0)
        self.gradient_bytes = pack.gradient_bytes + (padding * len(pack.parameters) if pack.gradient_bytes else 0)
        self.stash_bytes = sum(map(_stash_bytes, self._calls))
        self.returning_bytes = sum(call.stash_bytes for call in self._calls)
        self.excess_bytes = self.returning_bytes - self.stash_bytes
        self.staying_bytes = self._calls[0].staying_bytes
        self.shared_bytes = self._calls[0].shared_bytes
        self.forward_bytes = self._forward()
        # The first micro-batch finds no sums of gradients there, the others all of them.
        all_there, first = [0] * (len(self._calls) + 1), self._sums(pack)
        tied = self._tied(pack)
        self.backward_bytes = (self._backward(first), self._backward(all_there))
        self.fused_bytes = (self._fused(tied, first), self._fused(tied, all_there))
        if costs.in_pieces:
            held = costs.held_bytes + 2 * costs.scalar_bytes
            self.fused_bytes = (
                max(self.forward_bytes, held + self.backward_bytes[0]),
                max(self.forward_bytes, held + self.backward_bytes[1]),
            )

    @property
    def is_last(self) -> bool:
        return self.last == len(self._costs.costs) - 1

    def _forward(self) -> int:
        """Beside the stash of earlier packs."""
        stash, most = 0, 0
        for call in self._calls:
            most = max(most, stash + call.alive_bytes + call.forward_bytes)
            stash += _stash_bytes(call)
        if self.is_last:
            call = self._calls[-1]
            most = max(most, stash - _stash_bytes(call) + call.alive_bytes + call.graph_bytes + self._costs.tail_bytes)
        return most

    def _fused(self, tied: list[int], sums: list[int]) -> int:
        """Everything that the micro-batch holds but the stash of earlier packs."""
        before = self._calls[0].alive_bytes  # beside it, the graphs of the pack's calls so far
        graphs = list(accumulate((call.graph_bytes for call in self._calls), initial=before))
        forward = max(graph + call.forward_bytes for graph, call in zip(graphs, self._calls, strict=False))
        most = max(forward, graphs[-1] + self._costs.tail_bytes) + sums[-1]
        gathered = 0
        for place, call in reversed(list(enumerate(self._calls))):
            back = max(graphs[place + 1] + call.settle_bytes, graphs[place] + call.backward_bytes)
            if self._calls[0].keeps_graph:  # and the backward pass, in which graphs otherwise go, beside all of them
                back = graphs[-1] + max(call.settle_bytes, call.backward_bytes)
            most = max(most, back + gathered + tied[place] + sums[place])
            gathered += call.leaf_bytes
        return most

    def _sums(self, pack: Pack) -> list[int]:
        """Sums of gradients that are not there yet (negative) while the first micro-batch is propagated through each
        call, and before that.
        """
        own = [call.gradient_bytes for call in self._calls]
        if sum(own) < pack.gradient_bytes:  # sums of another dtype: they come when the micro-batch is through
            return [0] * (len(own) + 1)
        there = [*reversed(list(accumulate(reversed(own)))), 0]
        return [min(nbytes, pack.gradient_bytes) - pack.gradient_bytes for nbytes in there]

    def _tied(self, pack: Pack) -> list[int]:
        """Gradients of parameters that calls from each one on use, and others before: all wait until they are added up."""
        layers = self._costs.calls[self.first : self.last + 1]
        by_layer = {layer: call.gradient_bytes for layer, call in zip(layers, self._calls, strict=True)}
        across = max(0, sum(by_layer.values()) - pack.gradient_bytes)  # parameters of several layers
        last = {layer: place for place, layer in enumerate(layers)}
        begin, end = [0] * len(layers), [0] * len(layers)
        for layer, nbytes in by_layer.items():
            begin[layers.index(layer)] += nbytes
            end[last[layer]] += nbytes
        repeated = accumulate(b - e for b, e in zip(begin, end, strict=True))
        waiting = [nbytes + across for nbytes in repeated]
        return [*waiting[:-1], 0]  # nothing has been propagated before the last call

    def _backward(self, sums: list[int]) -> int:
        """Beside what the micro-batch holds between its passes and the stash of earlier packs."""
        stash, gathered = self.stash_bytes, 0
        most = stash + sums[-1]
        for place, call in reversed(list(enumerate(self._calls))):
            most = max(most, stash + max(call.settle_bytes, call.backward_bytes) + gathered + sums[place])
            stash -= _stash_bytes(call)
            gathered += call.leaf_bytes
        return max(most, gathered + sums[0])


def _stash_bytes(call: CallCost) -> int:
    """What stashing the inputs of `call` keeps on the device."""
    return call.stash_bytes + call.pinned_bytes


class _Walk:
    def __init__(
        self, packs: tuple[Pack, ...], costs: CostTable, pack_costs: list[_PackCosts], parked: frozenset[int]
    ) -> None:
        self._costs = costs
        self._parked = parked
        self._packs = pack_costs
        self._plan_packs = packs
        self._updated: set[int] = set()  # packs, on the device
        self._stash_before = list(accumulate(map(_stash_bytes, costs.costs), initial=0))
        needing = [position for position, cost in enumerate(costs.costs) if cost.needs_backward]
        self._backward_ends = min(needing, default=0)
        self._loss = 2 * costs.scalar_bytes  # and its scaled copy
        self._held: dict[int, int] = {}  # by micro-batch: what it holds between its passes
        self._weights = _Total()
        self._gradients = _Total()
        self._waiting = _Total()  # by micro-batch: what it holds while others run
        self._stash = _Total()  # by micro-batch: what of it is on the device
        self._known: set[int] = set()  # micro-batches whose forward pass is among the tasks
        self._arrived = _Total()  # by (pack, micro-batch): stash that came back from the host
        self._leaving = _Total()  # stash on its way to the host
        self._runs: dict[TaskKind, Callable[[_PackCosts, Task], int]] = {
            TaskKind.FORWARD: self._forward,
            TaskKind.FUSED: self._fused,
            TaskKind.BACKWARD: self._backward,
        }

    def step(self, task: Task) -> tuple[int, int]:
        """Weights, and everything else, while `task` runs."""
        if task.kind in self._runs:
            activations = self._runs[task.kind](self._packs[task.pack], task) + self._costs.margin_bytes
            return self._weights.total, activations + self._gradients.total
        match task.kind:
            case TaskKind.SWAP_IN:
                self._weights.put(task.pack, self._packs[task.pack].weight_bytes)
            case TaskKind.STASH_OUT:
                self._stash_out(self._packs[task.pack], task)
            case TaskKind.STASH_IN:
                self._stash_in(self._packs[task.pack], task)
            case TaskKind.FREE_GRADIENTS:
                self._gradients.take(task.pack)
        working = self._plan_packs[task.pack].update_bytes if task.kind is TaskKind.UPDATE_ON_DEVICE else 0
        held = self._weights.total, self._gradients.total + self._between + working
        if task.kind is TaskKind.EVICT:
            self._weights.take(task.pack)
        if task.kind is TaskKind.UPDATE_ON_DEVICE:
            self._free_updated(task.pack)
        return held

    def _free_updated(self, pack: int) -> None:
        """Gradients of a parameter that resident packs share are kept until its owner's update."""
        self._updated.add(pack)
        done = {name for index in self._updated for name in self._plan_packs[index].owned}
        for index in [i for i in self._updated if done.issuperset(self._plan_packs[i].parameters)]:
            self._gradients.take(index)

    @property
    def _between(self) -> int:
        """What all micro-batches hold while none runs."""
        return self._waiting.total + self._stash.total + self._arrived.total + self._leaving.total

    def _forward(self, pack: _PackCosts, task: Task) -> int:
        self._known.add(task.micro_batch)
        self._waiting.take(task.micro_batch)
        most = self._between + pack.forward_bytes
        self._waiting.put(task.micro_batch, self._held_behind(pack, task))
        self._stash.put(task.micro_batch, self._stash.take(task.micro_batch) + pack.stash_bytes)
        return max(most, self._between)

    def _held_behind(self, pack: _PackCosts, task: Task) -> int:
        """What a micro-batch holds that has been run forward through `pack`, beside its stash."""
        following = pack.last + 1
        if following < len(self._costs.costs):
            return self._costs.costs[following].alive_bytes
        if task.micro_batch in self._parked:
            last = self._costs.costs[-1]
            return max(self._held_by(task), last.alive_bytes + last.graph_bytes)
        return self._held_by(task)

    def _fused(self, pack: _PackCosts, task: Task) -> int:
        self._known.add(task.micro_batch)
        again = self._gradients.put(task.pack, pack.gradient_bytes)
        self._waiting.take(task.micro_batch)
        most = self._between + pack.fused_bytes[again]
        # What it holds from before this pack waited with it; what came with this pack goes with its graph.
        self._held[task.micro_batch] = min(self._costs.held_bytes, pack.staying_bytes) + self._loss
        self._leave(pack, task)
        return max(most, self._between)

    def _held_by(self, task: Task) -> int:
        return self._held.get(task.micro_batch, self._costs.held_bytes + self._loss)

    def _backward(self, pack: _PackCosts, task: Task) -> int:
        again = self._gradients.put(task.pack, pack.gradient_bytes)
        key = (task.pack, task.micro_batch)
        excess = 0
        if self._arrived.take(key):
            excess = pack.excess_bytes
        else:
            # Of a micro-batch whose forward pass ran before the first task, all the stash is still there.
            own = self._stash.take(task.micro_batch)
            if task.micro_batch not in self._known:
                own = self._stash_before[pack.last + 1]
            self._stash.put(task.micro_batch, max(0, own - pack.stash_bytes))
        self._known.add(task.micro_batch)
        self._waiting.take(task.micro_batch)
        backward = self._held_by(task) + excess + pack.backward_bytes[again]
        if task.micro_batch in self._parked and pack.is_last:
            backward = max(backward, pack.forward_bytes)  # which holds the loss
        most = self._between + backward
        self._leave(pack, task)
        return max(most, self._between)

    def _leave(self, pack: _PackCosts, task: Task) -> None:
        done = pack.first <= self._backward_ends
        self._waiting.put(task.micro_batch, self._loss if done else self._held_by(task) + pack.shared_bytes)

    def _stash_out(self, pack: _PackCosts, task: Task) -> None:
        """The copies to the host leave the device when the next ones move."""
        self._leaving.take(None)
        self._leaving.put(None, pack.stash_bytes)
        self._stash.put(task.micro_batch, max(0, self._stash.take(task.micro_batch) - pack.stash_bytes))

    def _stash_in(self, pack: _PackCosts, task: Task) -> None:
        self._known.add(task.micro_batch)
        self._leaving.take(None)
        self._arrived.put((task.pack, task.micro_batch), pack.returning_bytes)
