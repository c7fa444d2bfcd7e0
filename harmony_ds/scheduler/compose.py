"""Packs and a group of micro-batches to the list of tasks of one optimizer step.

    forward     I0 (I1) F0.* E0 (I2) F1.* E1 ...          every forward pack
    fused       (I n-2) L n-1.*  O n-1  E n-1             forward, loss and backward of the last pack
    backward    (I n-3) B n-2.*  G n-1  O n-2  E n-2 ...  recompute and propagate back
    update      U p behind O p, or all of them in forward order behind N, where the norm of the gradients is known

Around all of that, I u brings the unlayered parameters, and O u, G u, E u take them away: in front of N, if there is one.
U u updates them, and U v those that the model does not use.

Without grouping, forward to backward once for each micro-batch, and the updates with the last one's. A micro-batch whose
forward pass ran alone has B n-1 in the place of L n-1.

Of several devices, R p in front of every O p, or behind it if gradients are added up on the host; and A p behind every I p
where each swaps in a share.

In brackets: swap-ins issued one pack ahead. A pack whose gradient is on its way to the host keeps it until the next
pack has been computed (G), so that the copy is hidden. A kept pack has neither the E of its forward pass nor the I of
its backward pass; a resident pack has neither I, E, O nor G, and D in the place of U. Of both, the first micro-batches may
have K in the place of F, which keeps the graph, and P in the place of B; their stash never moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from harmony_ds.scheduler.plan import Pack, Packing, Policy, Task, TaskKind


@dataclass(frozen=True, slots=True)
class Group:
    """The micro-batches of one optimizer step.

    Attributes:
        fresh: those of which nothing has run yet.
        forwarded: those whose forward pass ran earlier, because somebody looked at its result.
        begun: something of their step has run: the unlayered parameters are on the device.
    """

    fresh: tuple[int, ...]
    forwarded: tuple[int, ...] = ()
    begun: bool = False

    @staticmethod
    def of(count: int) -> Group:
        """Fresh ones, numbered from 0."""
        return Group(tuple(range(count)))

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted(self.fresh + self.forwarded))

    def rounds(self, grouping: bool) -> list[Group]:
        """What passes the packs together: all of them, or each on its own."""
        if grouping or len(self.all) < 2:
            return [self]
        return [Group((m,)) if m in self.fresh else Group((), (m,)) for m in self.all]


def compose_forward(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """The forward pass of one micro-batch alone, every pack cut: somebody wants its outputs now, and may want gradients
    later on, so that the unlayered parameters stay on the device.
    """
    return (*_begin(packing, group, policy), *_Composer(packing, group, policy).forward_alone())


def compose_evaluation(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """The forward passes of a group without gradients, each pack swapped in once for all of them."""
    tasks = [*_begin(packing, group, policy)]
    for index in packing.backward:
        runs = [Task(TaskKind.FORWARD, index, m) for m in group.fresh]
        if index not in policy.resident:
            runs = [*_weights_in(index, policy), *runs, Task(TaskKind.EVICT, index)]
        tasks += runs
    tasks += [Task(TaskKind.EVICT, pack.index) for pack in packing.always if not group.begun]
    return tuple(tasks)


def compose_step(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """Everything between the first micro-batch of a group and the last update."""
    rounds = [_Composer(packing, part, policy) for part in group.rounds(policy.grouping)]
    tasks = [*_begin(packing, group, policy)]
    for part in rounds:
        tasks += part.passes(last=part is rounds[-1])
    return (*tasks, *compose_end(packing, policy))


def compose_end(packing: Packing, policy: Policy) -> tuple[Task, ...]:
    """What of a step comes behind its last backward pass."""
    tasks: list[Task] = []
    away = [
        Task(kind, pack.index)
        for pack in packing.always
        for kind in (*_gradients_out(policy), TaskKind.FREE_GRADIENTS, TaskKind.EVICT)
    ]
    if policy.deferred_update:  # in forward order: what is needed first goes first
        updates = [_update(index, policy) for index in packing.backward if packing.packs[index].needs_backward]
        tasks += [*away, Task(TaskKind.NORM, 0), *updates]
    else:
        tasks += away
    tasks += [_update(index, policy) for index in (packing.unlayered, packing.uncalled) if index is not None]
    return tuple(tasks)


def stash_moves(packing: Packing, policy: Policy) -> tuple[set[int], set[int]]:
    """Forward packs whose stash goes to the host, and backward packs that take some of it back."""
    away = packing.forward[: policy.stash_on_host]
    positions = {p for index in away for p in packing.packs[index].positions}
    taking = {index for index in packing.backward if not positions.isdisjoint(packing.packs[index].positions)}
    return set(away), taking


def _begin(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    return () if group.begun else tuple(task for pack in packing.always for task in _weights_in(pack.index, policy))


def _weights_in(index: int, policy: Policy) -> list[Task]:
    kinds = (TaskKind.SWAP_IN, TaskKind.GATHER) if policy.shared else (TaskKind.SWAP_IN,)
    return [Task(kind, index) for kind in kinds]


def _gradients_out(policy: Policy) -> tuple[TaskKind, ...]:
    if policy.alone:
        return (TaskKind.SWAP_OUT,)
    return (TaskKind.SWAP_OUT, TaskKind.REDUCE) if policy.reduce_on_host else (TaskKind.REDUCE, TaskKind.SWAP_OUT)


def _update(index: int, policy: Policy) -> Task:
    return Task(TaskKind.UPDATE_ON_DEVICE if index in policy.resident else TaskKind.UPDATE, index)


class _Composer:
    """One forward and one backward pass."""

    def __init__(self, packing: Packing, group: Group, policy: Policy) -> None:
        self._packing = packing
        self._group = group
        self._policy = policy
        self._out, self._in = stash_moves(packing, policy)
        self._swap_ins: Iterator[list[Task]] = iter(())
        self._graphs: set[tuple[int, int]] = set()  # (pack, micro-batch)

    def forward_alone(self) -> Iterator[Task]:
        fused = self._packing.backward[-1]
        order = [*self._packing.forward, fused]
        if self._policy.stash_on_host:
            self._out.add(fused)
        self._swap_ins = self._issue([(index, index not in self._policy.resident) for index in order])
        yield from self._forward(order, kept=self._policy.resident)

    def passes(self, last: bool) -> Iterator[Task]:
        """Both passes; in the last round of a step with the updates that are due."""
        policy, packs = self._policy, self._packing.packs
        forward = self._packing.forward if self._group.fresh else ()
        *earlier, end = self._packing.backward
        backward = [end, *(i for i in reversed(earlier) if packs[i].needs_backward)]
        # Without a pass there and a pass back there is nothing to be kept for.
        kept = {*policy.resident, *(index for index in policy.kept if index in forward and index in backward)}
        self._graphs = {
            (index, m)
            for index, count in enumerate(policy.graphs)
            if index in kept and index in forward and packs[index].needs_backward
            for m in self._group.fresh[:count]
        }
        # One sequence, so that the last pack is swapped in while the one before it computes.
        self._swap_ins = self._issue(
            [(index, index not in policy.resident) for index in forward]
            + [(index, index not in kept) for index in backward]
        )
        yield from self._forward(forward, kept)
        yield from self._backward(backward, updates=last and not policy.deferred_update)

    def _forward(self, order: Sequence[int], kept: Collection[int]) -> Iterator[Task]:
        for index in order:
            yield from next(self._swap_ins)
            for m in self._group.fresh:
                if (index, m) in self._graphs:
                    yield Task(TaskKind.FORWARD_FOR_GRAPH, index, m)
                    continue
                yield Task(TaskKind.FORWARD, index, m)
                if index in self._out:
                    yield Task(TaskKind.STASH_OUT, index, m)
            if index not in kept:
                yield Task(TaskKind.EVICT, index)

    def _backward(self, order: Sequence[int], updates: bool) -> Iterator[Task]:
        freed: Task | None = None
        for index in order:
            pack = self._packing.packs[index]
            resident = index in self._policy.resident
            yield from next(self._swap_ins)
            yield from self._run_backward(pack, fused=self._group.fresh if index == order[0] else ())
            if freed:
                yield freed
                freed = None
            if pack.needs_backward and not resident:
                yield from (Task(kind, index) for kind in _gradients_out(self._policy))
                freed = Task(TaskKind.FREE_GRADIENTS, index)
            if pack.needs_backward and updates:
                yield _update(index, self._policy)
            if not resident:
                yield Task(TaskKind.EVICT, index)
        if freed:
            yield freed

    def _run_backward(self, pack: Pack, fused: tuple[int, ...]) -> Iterator[Task]:
        back = [m for m in self._group.all if m not in fused and self._stash_is_away(pack, m)]
        if back:
            yield Task(TaskKind.STASH_IN, pack.index, back.pop(0))
        for m in self._group.all:
            if m in fused:
                yield Task(TaskKind.FUSED, pack.index, m)
                continue
            if (pack.index, m) in self._graphs:
                yield Task(TaskKind.BACKWARD_FROM_GRAPH, pack.index, m)
                continue
            if back:
                yield Task(TaskKind.STASH_IN, pack.index, back.pop(0))
            yield Task(TaskKind.BACKWARD, pack.index, m)

    def _stash_is_away(self, pack: Pack, micro_batch: int) -> bool:
        if (pack.index, micro_batch) in self._graphs:
            return False
        if pack.index in self._in:
            return True
        # A forward pass that ran alone has cut, and stashed, the last pack too.
        last = pack.index == self._packing.backward[-1]
        return last and bool(self._policy.stash_on_host) and micro_batch in self._group.forwarded

    def _issue(self, order: list[tuple[int, bool]]) -> Iterator[list[Task]]:
        """For each pack in `order`, with whether it is swapped in: the swap-ins to issue before it runs."""
        tasks = [_weights_in(index, self._policy) if swapped else [] for index, swapped in order]
        ahead = self._policy.prefetch and len(tasks) > 1
        return iter([tasks[0] + tasks[1], *tasks[2:], []] if ahead else tasks)
