"""Walks the tasks of a plan and counts the device bytes alive at each.

`activation_bytes` of a task is everything that autograd and the code between the layers hold while it runs: waiting
micro-batches, the stash, gradients, the working memory of the call. Weights come on top, from swap-in to evict.
"""

from __future__ import annotations

from dataclasses import dataclass

from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.plan import Pack, Task, TaskKind

_LOSS_BYTES = 512
"""A micro-batch's loss and its scaled copy, at the granularity of CUDA's allocator."""


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
    walk = _Walk(packs, costs)
    rows = [walk.step(task) for task in tasks]
    return MemoryProfile(tuple(w for w, _ in rows), tuple(a for _, a in rows))


class _Walk:
    def __init__(self, packs: tuple[Pack, ...], costs: CostTable) -> None:
        self._packs = packs
        self._costs = costs.costs
        self._tail_bytes = costs.tail_bytes
        self._weights: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        self._waiting: dict[int, int] = {}  # micro-batch -> bytes it holds while others run
        self._stash: dict[tuple[int, int], int] = {}  # (position, micro-batch) -> bytes of it on the device
        self._leaving: list[tuple[int, int]] = []
        self._updated: set[int] = set()  # packs, on the device
        self._held = costs.held_bytes + _LOSS_BYTES

    def step(self, task: Task) -> tuple[int, int]:
        working = 0
        pack = self._packs[task.pack] if task.kind is not TaskKind.NORM else None
        match task.kind:
            case TaskKind.SWAP_IN:
                assert pack is not None
                self._weights[task.pack] = pack.weight_bytes
            case TaskKind.FORWARD:
                assert pack is not None
                working = self._forward(pack, task.micro_batch)
            case TaskKind.FUSED:
                assert pack is not None
                working = self._fused(pack, task.micro_batch)
            case TaskKind.BACKWARD:
                assert pack is not None
                working = self._backward(pack, task.micro_batch)
            case TaskKind.STASH_OUT:
                assert pack is not None
                self._let_go()
                self._leaving = [(position, task.micro_batch) for position in pack.positions]
            case TaskKind.STASH_IN:
                assert pack is not None
                self._let_go()
                for position in pack.positions:
                    self._stash[position, task.micro_batch] = self._costs[position].stash_bytes
            case TaskKind.FREE_GRADIENTS:
                self._gradients.pop(task.pack, None)
            case TaskKind.UPDATE_ON_DEVICE:
                assert pack is not None
                working = pack.update_bytes
        weights = sum(self._weights.values())
        held = sum(self._gradients.values()) + sum(self._waiting.values()) + sum(self._stash.values())
        self._leave(task)
        return weights, held + working

    def _leave(self, task: Task) -> None:
        """What is gone once the task is done."""
        if task.kind is TaskKind.EVICT:
            self._weights.pop(task.pack, None)
        if task.kind is TaskKind.UPDATE_ON_DEVICE:
            # Gradients of a parameter that resident packs share are kept until its owner's update.
            self._updated.add(task.pack)
            done = {name for index in self._updated for name in self._packs[index].owned}
            for index in [i for i in self._updated if done.issuperset(self._packs[i].parameters)]:
                self._gradients.pop(index, None)

    def _let_go(self) -> None:
        """A stash that was copied to the host leaves the device when the next one moves."""
        for key in self._leaving:
            self._stash.pop(key, None)
        self._leaving = []

    def _after(self, pack: Pack) -> int:
        """Bytes that a micro-batch holds once it has left `pack` forward."""
        following = pack.positions[-1] + 1
        return self._costs[following].alive_bytes if following < len(self._costs) else self._held

    def _forward(self, pack: Pack, micro_batch: int) -> int:
        self._waiting.pop(micro_batch, None)
        others = sum(self._waiting.values())
        stash = 0
        most = 0
        for position in pack.positions:
            cost = self._costs[position]
            most = max(most, stash + cost.alive_bytes + cost.forward_bytes)
            stash += cost.stash_bytes
            self._stash[position, micro_batch] = cost.stash_bytes
        self._waiting[micro_batch] = self._after(pack)
        # What it holds afterwards is counted with the waiting ones; only the excess is working memory.
        kept = others + self._waiting[micro_batch] + stash
        return max(0, others + most - kept)

    def _fused(self, pack: Pack, micro_batch: int) -> int:
        self._gradients[pack.index] = pack.gradient_bytes
        costs = [self._costs[p] for p in pack.positions]
        before = self._waiting.pop(micro_batch, costs[0].alive_bytes)
        graph = sum(c.graph_bytes for c in costs)
        transient = max(max(c.forward_bytes, c.backward_bytes) - c.graph_bytes for c in costs)
        glue = max(c.alive_bytes for c in costs)
        self._waiting[micro_batch] = self._held + costs[0].shared_bytes
        kept = self._waiting[micro_batch]
        return max(0, max(before, glue) + graph + max(transient, self._tail_bytes, 0) - kept)

    def _backward(self, pack: Pack, micro_batch: int) -> int:
        self._gradients[pack.index] = pack.gradient_bytes
        following = pack.positions[-1] + 1
        gradient = self._costs[following].shared_bytes if following < len(self._costs) else self._tail_bytes
        most = 0
        for position in reversed(pack.positions):
            cost = self._costs[position]
            most = max(most, gradient + cost.backward_bytes)
            gradient = cost.shared_bytes
        self._waiting[micro_batch] = self._held + self._costs[pack.positions[0]].shared_bytes
        # A micro-batch that ran its forward pass alone left its stash in an earlier list of tasks.
        stash = sum(self._stash.pop((p, micro_batch), self._costs[p].stash_bytes) for p in pack.positions)
        return max(0, self._held + most + stash - self._waiting[micro_batch])
