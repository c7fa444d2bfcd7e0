"""Packs and a group of micro-batches to the list of tasks of one optimizer step.

    forward     I0 (I1) F0.* E0 (I2) F1.* E1 ...          every forward pack
    fused       (I n-2) L n-1.*  O n-1  E n-1             forward, loss and backward of the last pack
    backward    (I n-3) B n-2.*  G n-1  O n-2  E n-2 ...  recompute and propagate back
    update      U p after O p, or all of them in forward order after N, where the norm of the gradients is known

Around all of that, I u brings the unlayered parameters, and O u, G u, E u take them away: before N, if there is one.
U u updates them, and U v those that the model does not use.

Without grouping, forward to backward once for each micro-batch, and the updates with the last one's. A micro-batch whose
forward pass ran alone has B n-1 in the place of L n-1. Of those that share a loss, the last one has L n-1, which makes the
loss of all their outputs; the others have F n-1 before and B n-1 after it. They go back in reverse order, as autograd does.

Of several devices, R p before every O p, or after it if gradients are added up on the host; and A p after every I p
where each swaps in a share.

In brackets: swap-ins issued one pack early, or later by `Policy.swap_in_delays` (see `delays`): the host is still updating
the pack's weights after the step before. The first stash of a pack that waits on the host comes back (T) before the
last run of the pack before it, the others one run early, so that no run waits for the next pack's weights.

A pack whose gradient is on its way to the host keeps it until the next pack has been computed (G), so that the copy is
hidden. A kept pack has neither the E of its forward pass nor the I of its backward pass; a resident pack has neither I, E,
O nor G, and D in the place of U. Of both, the first micro-batches may have K in the place of F, which keeps the graph, and
P in the place of B; their stash never moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harmony_ds.scheduler.delays import delay_swap_ins
from harmony_ds.scheduler.plan import Packing, Policy, Task, TaskKind
from harmony_ds.scheduler.waves import Visit, issued


@dataclass(frozen=True, slots=True)
class Group:
    """The micro-batches of one optimizer step.

    Attributes:
        fresh: those of which nothing has run yet.
        forwarded: those whose forward pass ran earlier, because the program read its result.
        begun: something of their step has run: the unlayered parameters are on the device.
        sharing: sets of fresh ones that share a loss, since it is made of the outputs of all of them.
    """

    fresh: tuple[int, ...]
    forwarded: tuple[int, ...] = ()
    begun: bool = False
    sharing: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(count: int) -> Group:
        """Fresh ones, numbered from 0."""
        return Group(tuple(range(count)))

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted(self.fresh + self.forwarded))

    @property
    def by_loss(self) -> list[tuple[int, ...]]:
        """The micro-batches, those that share a loss together, in the order of the last one of each loss."""
        by_last = {sharing[-1]: sharing for sharing in self.sharing}
        waiting = {m for sharing in self.sharing for m in sharing[:-1]}
        return [by_last.get(m, (m,)) for m in self.all if m not in waiting]

    @property
    def back(self) -> list[int]:
        """The micro-batches in the order of their backward passes."""
        return [m for sharing in self.by_loss for m in reversed(sharing)]

    def rounds(self, grouping: bool) -> list[Group]:
        """Return the sets that pass the packs together: all micro-batches, or those of each loss on their own."""
        if grouping or len(self.all) < 2:
            return [self]
        rounds = []
        for sharing in self.by_loss:
            if len(sharing) > 1:
                rounds.append(Group(sharing, sharing=(sharing,)))
            else:
                rounds.append(Group(sharing) if sharing[0] in self.fresh else Group((), sharing))
        return rounds


def compose_forward(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """Return the forward pass of one micro-batch alone, every pack cut: its outputs are wanted now, and perhaps gradients
    later on, so that the unlayered parameters stay on the device.
    """
    return (*_begin(packing, group, policy), *issued(_Composer(packing, group, policy).forward_alone()))


def compose_evaluation(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """Return the forward passes of a group without gradients, each pack swapped in once for all of them."""
    visits = []
    for index in packing.backward:
        visit = Visit(packing.packs[index], [(m, [Task(TaskKind.FORWARD, index, m)]) for m in group.fresh])
        if index not in policy.resident:
            visit.before += _weights_in(index, policy)
            visit.after.append(Task(TaskKind.EVICT, index))
        visits.append(visit)
    end = [Task(TaskKind.EVICT, pack.index) for pack in packing.unlayered_packs if not group.begun]
    return (*_begin(packing, group, policy), *issued(visits), *end)


def compose_step(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """Everything between the first micro-batch of a group and the last update."""
    rounds = [_Composer(packing, part, policy) for part in group.rounds(policy.grouping)]
    tasks = [*_begin(packing, group, policy)]
    for part in rounds:
        tasks += issued(part.passes(last=part is rounds[-1]), last_first=not policy.deferred_update)
    if not group.begun:  # else the part of the step that ran before this one has waited for the updates
        tasks = delay_swap_ins(tasks, packing, policy.swap_in_delays)
    return (*tasks, *compose_end(packing, policy))


def compose_end(packing: Packing, policy: Policy) -> tuple[Task, ...]:
    """Return the part of a step after its last backward pass."""
    tasks: list[Task] = []
    away = [
        Task(kind, pack.index)
        for pack in packing.unlayered_packs
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
    return (
        ()
        if group.begun
        else tuple(task for pack in packing.unlayered_packs for task in _weights_in(pack.index, policy))
    )


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
        self._order = group.back
        self._out, self._in = stash_moves(packing, policy)
        self._graphs: set[tuple[int, int]] = set()  # (pack, micro-batch)

    def forward_alone(self) -> list[Visit]:
        fused = self._packing.backward[-1]
        if self._policy.stash_on_host:
            self._out.add(fused)
        stay = self._policy.resident
        visits = [self._forward(index, stay) for index in (*self._packing.forward, fused)]
        self._swap_in([(visit, visit.pack.index not in stay) for visit in visits])
        return visits

    def passes(self, last: bool) -> list[Visit]:
        """Both passes; in the last round of a step with the updates that are due."""
        policy, packs = self._policy, self._packing.packs
        forward = self._packing.forward if self._group.fresh else ()
        *earlier, end = self._packing.backward
        backward = [end, *(i for i in reversed(earlier) if packs[i].needs_backward)]
        # Without a pass there and a pass back there is nothing to be kept for.
        stay = (*policy.kept, *self._packing.last_forward_packs)
        kept = {*policy.resident, *(index for index in stay if index in forward and index in backward)}
        self._graphs = {
            (index, m)
            for index, count in enumerate(policy.graphs)
            if index in kept and index in forward and packs[index].needs_backward
            for m in self._group.fresh[:count]
        }
        there = [self._forward(index, kept) for index in forward]
        back = [self._end(end), *(self._backward(index) for index in backward[1:])]
        self._gradients_out(back, updates=last and not policy.deferred_update)
        self._stash_in(back)
        # One sequence, so that the last pack is swapped in while the one before it computes.
        self._swap_in(
            [(visit, visit.pack.index not in policy.resident) for visit in there]
            + [(visit, visit.pack.index not in kept) for visit in back]
        )
        return there + back

    def _forward(self, index: int, kept: Collection[int]) -> Visit:
        visit = Visit(self._packing.packs[index])
        for m in self._group.fresh:
            graph = (index, m) in self._graphs
            tasks = [Task(TaskKind.FORWARD_FOR_GRAPH if graph else TaskKind.FORWARD, index, m)]
            if index in self._out and not graph:
                tasks.append(Task(TaskKind.STASH_OUT, index, m))
            visit.runs.append((m, tasks))
        if index not in kept:
            visit.after.append(Task(TaskKind.EVICT, index))
        return visit

    def _end(self, index: int) -> Visit:
        """Return the visit of the last pack, in which fresh micro-batches turn: forward, loss and backward."""
        visit = Visit(self._packing.packs[index], is_backward=True)
        by_last = {sharing[-1]: sharing for sharing in self._group.by_loss}
        for m in self._group.all:
            if m in self._group.forwarded:
                visit.runs.append((m, [Task(TaskKind.BACKWARD, index, m)]))
            elif m in by_last:
                visit.runs.append((m, [Task(TaskKind.FUSED, index, m)]))
                for other in reversed(by_last[m][:-1]):
                    visit.runs.append((other, [Task(TaskKind.BACKWARD, index, other)]))
            else:
                visit.runs.append((m, [Task(TaskKind.FORWARD, index, m)]))
        return visit

    def _backward(self, index: int) -> Visit:
        visit = Visit(self._packing.packs[index], is_backward=True)
        for m in self._order:
            kept = (index, m) in self._graphs
            kind = TaskKind.BACKWARD_FROM_GRAPH if kept else TaskKind.BACKWARD
            visit.runs.append((m, [Task(kind, index, m)]))
        return visit

    def _stash_in(self, visits: Sequence[Visit]) -> None:
        """Bring every stash back before the run ahead of the one that takes it.

        With prefetch, the first stash of a pack comes during the last run of the device's pack before it, and the second
        one before the first run: both are ahead of the swap-in of the next pack's weights, which shares their stream and
        takes as long as several runs. No more of them are on the device at once than while the other runs are under way.
        """
        visit_before: dict[int, Visit] = {}  # by device
        for visit in visits:
            index, device = visit.pack.index, visit.pack.device
            earlier = visit_before.get(device)
            visit_before[device] = visit
            runs: list[list[Task]] = []
            moves: list[Task] = []
            for m, tasks in visit.runs:
                if tasks[0].kind is TaskKind.BACKWARD and self._stash_is_away(index, m):
                    runs.append(tasks)
                    moves.append(Task(TaskKind.STASH_IN, index, m))
            for place, move in enumerate(moves):
                if place == 0:
                    if self._policy.prefetch and earlier is not None and len(earlier.runs) > 1:
                        _, last_run = earlier.runs[-1]
                        last_run.insert(0, move)
                    else:
                        visit.before.append(move)
                elif place == 1 and self._policy.prefetch and visit.runs[0][1] is runs[0]:
                    visit.before.append(move)
                else:
                    runs[place - 1].insert(0, move)

    def _gradients_out(self, visits: Sequence[Visit], updates: bool) -> None:
        """Yield what comes after each pack's backward pass; its gradients are freed after that of the device's next one."""
        freed: dict[int, Task] = {}
        for visit in visits:
            pack, resident = visit.pack, visit.pack.index in self._policy.resident
            if pack.device in freed:
                visit.after.append(freed.pop(pack.device))
            if pack.needs_backward and not resident:
                visit.after += (Task(kind, pack.index) for kind in _gradients_out(self._policy))
                freed[pack.device] = Task(TaskKind.FREE_GRADIENTS, pack.index)
            if pack.needs_backward and updates:
                visit.after.append(_update(pack.index, self._policy))
            if not resident:
                visit.after.append(Task(TaskKind.EVICT, pack.index))
        visits[-1].after += freed.values()

    def _stash_is_away(self, index: int, micro_batch: int) -> bool:
        if (index, micro_batch) in self._graphs:
            return False
        if index in self._in:
            return True
        # A forward pass that ran alone has cut, and stashed, the last pack too.
        last = index == self._packing.backward[-1]
        return last and bool(self._policy.stash_on_host) and micro_batch in self._group.forwarded

    def _swap_in(self, visits: Sequence[tuple[Visit, bool]]) -> None:
        """Put the swap-ins of `visits`, each with whether there is one, before what the same device runs before; after the
        stash that this needs.
        """
        by_device: defaultdict[int, list[tuple[Visit, bool]]] = defaultdict(list)
        for visit, swapped in visits:
            by_device[visit.pack.device].append((visit, swapped))
        for own in by_device.values():
            earlier: Visit | None = None
            for visit, swapped in own:
                weights = _weights_in(visit.pack.index, self._policy) if swapped else []
                if self._policy.prefetch and earlier is not None:
                    earlier.before += weights
                else:
                    visit.before[:0] = weights
                earlier = visit
