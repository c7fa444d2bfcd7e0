"""Composes the list of tasks of one optimizer step.

What enters: the packs of both passes, a group of micro-batches, and the policy. What leaves: tasks, in the order in which
the executor runs them. In the way that tasks print (see `plan`; `*` stands for all micro-batches):

    forward     I0 (I1) F0.* E0 (I2) F1.* E1 ...          every forward pack
    fused       (I n-2) L n-1.*  O n-1  E n-1             forward, loss and backward of the last pack
    backward    (I n-3) B n-2.*  G n-1  O n-2  E n-2 ...  recompute and propagate back
    update      U p after O p, or all of them in forward order after N, where the norm of the gradients is known

So three packs and two micro-batches, without prefetch and with immediate updates, are

    I0 F0.0 F0.1 E0  I1 F1.0 F1.1 E1  I2 L2.0 L2.1 O2 U2 E2  I1 B1.0 B1.1 G2 O1 U1 E1  I0 B0.0 B0.1 G1 O0 U0 E0 G0

The list is made in four steps:

    1. `PackPass`: for each pack in each pass, the runs (F, L, B) of all micro-batches
    2. `_Composer._add_...`: around these, the tasks that bring weights and stashes in, and take gradients and stashes out
    3. `order_tasks`: all of them in one list
    4. `delay_swap_ins`: some swap-ins of that list are moved to a later place

The unlayered parameters are a pack, too, here called u: I u is the first task of a step, and O u, G u, E u follow the last
backward pass, before N, if there is one. U u updates them. U v updates parameters that the model does not use.

Without grouping, each micro-batch has its own forward, fused and backward tasks, and the updates come with those of the
last one. A micro-batch whose forward pass has run before the step has B n-1 instead of L n-1. Where several micro-batches
share a loss, L n-1 of the last one computes it from the outputs of all; so the others have F n-1 before it, and B n-1
after it. Their backward passes run in reverse order, as autograd's would.

With several devices, R p comes before every O p, or after it if gradients are added up on the host. Where each device swaps
in a share of a pack, A p, which gathers the shares, follows every I p.

In brackets: swap-ins issued one pack early, or later by `Policy.swap_in_delays` (see `delays`): the host is still updating
the pack's weights after the step before. The first stash of a pack that waits on the host comes back (T) before the
last run of the pack before it, the others one run early, so that no run waits for the next pack's weights.

Where crossing tensors go to the host, those of a micro-batch leave after its run through one pack (X forward, V backward)
and come back before its run through the next one (Y, Z), at the places where its stash would come back:

    F0.0 X0.0 F0.1 X0.1 Y1.0 F0.2 X0.2 E0   Y1.1 F1.0 X1.0 Y1.2 F1.1 X1.1 ...

Where slices of rows take their inputs from the host, no stash comes back by itself (there is no T), that of the fused pack
leaves, too (F n-1 S n-1; L n-1 sends its own before the loss), and crossing tensors come back right before their runs:

    F0.0 S0.0 X0.0 F0.1 S0.1 X0.1 E0   Y1.0 F1.0 S1.0 X1.0 Y1.1 F1.1 ...

Then gradients are freed as soon as they have left, too.

A pack whose gradient is on its way to the host keeps it until the next pack has been computed (G), so that the copy is
hidden. A kept pack has neither the E of its forward pass nor the I of its backward pass; a resident pack has neither I, E,
O nor G, and D in the place of U. Of both, the first micro-batches may have K in the place of F, which keeps the graph, and
P in the place of B; their stash never moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harmony_ds.scheduler.crossing import crossing_moves
from harmony_ds.scheduler.delays import delay_swap_ins
from harmony_ds.scheduler.plan import Packing, Policy, Task, TaskKind
from harmony_ds.scheduler.waves import PackPass, order_tasks


@dataclass(frozen=True, slots=True)
class Group:
    """The micro-batches of one optimizer step.

    Attributes:
        fresh: the micro-batches of which nothing has run yet.
        forwarded: the micro-batches whose forward pass ran earlier, because the program read its result.
        has_unlayered: whether a part of the step has run, and has left the unlayered parameters on the device.
        shared_losses: sets of fresh micro-batches that share a loss, which is made of the outputs of all of them.
    """

    fresh: tuple[int, ...]
    forwarded: tuple[int, ...] = ()
    has_unlayered: bool = False
    shared_losses: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def with_fresh(count: int) -> Group:
        """Return a group of so many fresh micro-batches, numbered from 0."""
        return Group(tuple(range(count)))

    @property
    def all(self) -> tuple[int, ...]:
        """Every micro-batch of the group, in the order of their numbers."""
        return tuple(sorted(self.fresh + self.forwarded))

    @property
    def by_loss(self) -> list[tuple[int, ...]]:
        """The micro-batches, those that share a loss together, in the order of the last one of each loss."""
        by_last = {members[-1]: members for members in self.shared_losses}
        waiting = {m for members in self.shared_losses for m in members[:-1]}
        return [by_last.get(m, (m,)) for m in self.all if m not in waiting]

    @property
    def back(self) -> list[int]:
        """The micro-batches in the order of their backward passes."""
        return [m for members in self.by_loss for m in reversed(members)]

    def rounds(self, grouping: bool) -> list[Group]:
        """Return the sets that pass the packs together: all micro-batches, or those of each loss on their own."""
        if grouping or len(self.all) < 2:
            return [self]
        rounds = []
        for members in self.by_loss:
            if len(members) > 1:
                rounds.append(Group(members, shared_losses=(members,)))
            else:
                rounds.append(Group(members) if members[0] in self.fresh else Group((), members))
        return rounds


def compose_forward(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """Return the forward pass of one micro-batch alone, for a program that reads its outputs before the step.

    Every pack, also the last, stashes its inputs and keeps no graph, and the unlayered parameters stay on the device: a
    backward pass may follow.
    """
    return (*_begin(packing, group, policy), *order_tasks(_Composer(packing, group, policy).forward_alone()))


def compose_evaluation(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """Return the forward passes of a group without gradients, each pack swapped in once for all of them."""
    passes = []
    for index in packing.backward:
        pack_pass = PackPass(packing.packs[index], [(m, [Task(TaskKind.FORWARD, index, m)]) for m in group.fresh])
        if index not in policy.resident:
            pack_pass.before += _weights_in(index, policy)
            pack_pass.after.append(Task(TaskKind.EVICT, index))
        passes.append(pack_pass)
    end = [Task(TaskKind.EVICT, pack.index) for pack in packing.unlayered_packs if not group.has_unlayered]
    return (*_begin(packing, group, policy), *order_tasks(passes), *end)


def compose_step(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """Return the whole step of a group, from the first swap-in to the last update."""
    rounds = [_Composer(packing, part, policy) for part in group.rounds(policy.grouping)]
    tasks = [*_begin(packing, group, policy)]
    for part in rounds:
        tasks += order_tasks(part.both_passes(is_last=part is rounds[-1]), last_first=not policy.deferred_update)
    if not group.has_unlayered:  # else the part of the step that ran before this one has waited for the updates
        tasks = delay_swap_ins(tasks, packing, policy.swap_in_delays)
    return (*tasks, *compose_end(packing, policy))


def compose_end(packing: Packing, policy: Policy) -> tuple[Task, ...]:
    """Return the part of a step after its last backward pass, such as `O4 G4 E4 N U0 U1 U2 U3 U4`."""
    tasks: list[Task] = []
    away = [
        Task(kind, pack.index)
        for pack in packing.unlayered_packs
        for kind in (*_gradients_out(policy), TaskKind.FREE_GRADIENTS, TaskKind.EVICT)
    ]
    # In forward order: the pack that the next step needs first is updated first.
    updated = [index for index in packing.backward if packing.packs[index].is_updated]
    tasks += away
    if policy.deferred_update:
        tasks.append(Task(TaskKind.NORM, 0))
    else:  # the others were updated after their backward passes
        updated = [index for index in updated if not packing.packs[index].needs_backward]
    updated += [index for index in (packing.unlayered, packing.uncalled) if index is not None]
    tasks += [_update(index, policy) for index in updated]
    return tuple(tasks)


def stash_moves(packing: Packing, policy: Policy) -> tuple[set[int], set[int]]:
    """Return the forward packs whose stash goes to the host, and the backward packs that take some of it back."""
    away = packing.forward[: policy.stash_on_host]
    positions = {p for index in away for p in packing.packs[index].positions}
    taking = {index for index in packing.backward if not positions.isdisjoint(packing.packs[index].positions)}
    return set(away), taking


def _sends_out(run: Sequence[Task], move: Task) -> bool:
    """Return whether a run is followed by the task that takes to the host what `move` brings back between two packs."""
    outward = {
        TaskKind.CROSSING_IN: TaskKind.CROSSING_OUT,
        TaskKind.CROSSING_GRADIENTS_IN: TaskKind.CROSSING_GRADIENTS_OUT,
    }
    kind = outward.get(move.kind)
    return any(task.kind is kind and task.micro_batch == move.micro_batch for task in run)


def _begin(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    return (
        ()
        if group.has_unlayered
        else tuple(task for pack in packing.unlayered_packs for task in _weights_in(pack.index, policy))
    )


def _weights_in(index: int, policy: Policy) -> list[Task]:
    kinds = (TaskKind.SWAP_IN, TaskKind.GATHER) if policy.swaps_in_shares else (TaskKind.SWAP_IN,)
    return [Task(kind, index) for kind in kinds]


def _gradients_out(policy: Policy) -> tuple[TaskKind, ...]:
    if policy.alone:
        return (TaskKind.SWAP_OUT,)
    return (TaskKind.SWAP_OUT, TaskKind.REDUCE) if policy.reduce_on_host else (TaskKind.REDUCE, TaskKind.SWAP_OUT)


def _update(index: int, policy: Policy) -> Task:
    return Task(TaskKind.UPDATE_ON_DEVICE if index in policy.resident else TaskKind.UPDATE, index)


class _Composer:
    """Composer of one forward and one backward pass of a group of micro-batches."""

    def __init__(self, packing: Packing, group: Group, policy: Policy) -> None:
        self._packing = packing
        self._group = group
        self._policy = policy
        self._order = group.back
        self._out, self._in = stash_moves(packing, policy)
        if policy.slices_from_host:
            self._out.add(packing.backward[-1])
        self._graphs: set[tuple[int, int]] = set()  # (pack, micro-batch) of which the graph is kept
        self._crossing_moves = crossing_moves(packing, policy) and len(group.all) > 1
        self._coming_back: dict[tuple[bool, int, int], Task] = {}
        """By pass (whether it is a backward one), pack and micro-batch: what brings its crossing tensors back."""

    def forward_alone(self) -> list[PackPass]:
        """Return the forward passes of all packs, none of which is fused, such as `I0 F0.3 E0` and `I1 F1.3 E1`."""
        fused = self._packing.backward[-1]
        if self._policy.stash_on_host:
            self._out.add(fused)
        stay = self._policy.resident
        passes = [self._forward(index, stay) for index in (*self._packing.forward, fused)]
        self._add_swap_ins([(one, one.pack.index not in stay) for one in passes])
        return passes

    def both_passes(self, is_last: bool) -> list[PackPass]:
        """Return the forward passes of packs, then their backward passes; in the last round of a step with updates."""
        policy, packs = self._policy, self._packing.packs
        forward = self._packing.forward if self._group.fresh else ()
        *earlier, end = self._packing.backward
        backward = [end, *(i for i in reversed(earlier) if packs[i].needs_backward)]
        # Where only one of the two passes is run here, weights would be kept for nothing.
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
        self._add_gradients_out(back, updates=is_last and not policy.deferred_update)
        if self._crossing_moves:
            self._add_crossing_out(there + back)
            self._add_moves_in(there + back)
        else:
            self._add_moves_in(back)
        # One sequence, so that the last pack is swapped in while the one before it computes.
        self._add_swap_ins(
            [(one, one.pack.index not in policy.resident) for one in there]
            + [(one, one.pack.index not in kept) for one in back]
        )
        return there + back

    def _forward(self, index: int, kept: Collection[int]) -> PackPass:
        """Return the forward pass of one pack: `F1.0 F1.1 E1`, or `F1.0 S1.0 F1.1 S1.1 E1` with the stash on the host."""
        pack_pass = PackPass(self._packing.packs[index])
        for m in self._group.fresh:
            graph = (index, m) in self._graphs
            tasks = [Task(TaskKind.FORWARD_FOR_GRAPH if graph else TaskKind.FORWARD, index, m)]
            if index in self._out and not graph:
                tasks.append(Task(TaskKind.STASH_OUT, index, m))
            pack_pass.runs.append((m, tasks))
        if index not in kept:
            pack_pass.after.append(Task(TaskKind.EVICT, index))
        return pack_pass

    def _end(self, index: int) -> PackPass:
        """Return the fused pass of the last pack, such as `L3.0 L3.1`: forward, loss and backward of each micro-batch."""
        pack_pass = PackPass(self._packing.packs[index], is_backward=True)
        by_last = {members[-1]: members for members in self._group.by_loss}
        for m in self._group.all:
            if m in self._group.forwarded:
                pack_pass.runs.append((m, [Task(TaskKind.BACKWARD, index, m)]))
            elif m in by_last:
                pack_pass.runs.append((m, [Task(TaskKind.FUSED, index, m)]))
                for other in reversed(by_last[m][:-1]):
                    pack_pass.runs.append((other, [Task(TaskKind.BACKWARD, index, other)]))
            else:
                leaving = [Task(TaskKind.STASH_OUT, index, m)] if index in self._out else []
                pack_pass.runs.append((m, [Task(TaskKind.FORWARD, index, m), *leaving]))
        return pack_pass

    def _backward(self, index: int) -> PackPass:
        """Return the backward pass of one pack, such as `B1.0 B1.1`, or `P1.0 B1.1` where one graph is kept."""
        pack_pass = PackPass(self._packing.packs[index], is_backward=True)
        for m in self._order:
            kept = (index, m) in self._graphs
            kind = TaskKind.BACKWARD_FROM_GRAPH if kept else TaskKind.BACKWARD
            pack_pass.runs.append((m, [Task(kind, index, m)]))
        return pack_pass

    def _add_crossing_out(self, passes: Sequence[PackPass]) -> None:
        """Add the tasks that take what a micro-batch holds to the host after each of its passes but the last.

        A graph that is kept may hold the same tensors: a micro-batch with one stays on the device on its way forward.
        """
        with_graphs = {m for _, m in self._graphs}
        for one, following in pairwise(passes):
            if following.is_backward and one.is_backward:
                out, back, stay = TaskKind.CROSSING_GRADIENTS_OUT, TaskKind.CROSSING_GRADIENTS_IN, set[int]()
            else:
                out, back, stay = TaskKind.CROSSING_OUT, TaskKind.CROSSING_IN, with_graphs
            last_runs = dict(one.runs)  # of those that pass the pack twice, the second run
            for m in dict.fromkeys(m for m, _ in following.runs):
                if m in last_runs and m not in stay:
                    last_runs[m].append(Task(out, one.pack.index, m))
                    key = following.is_backward, following.pack.index, m
                    self._coming_back[key] = Task(back, following.pack.index, m)

    def _add_moves_in(self, passes: Sequence[PackPass]) -> None:
        """Add the tasks that bring stashes and crossing tensors back, each one run before the run that needs it.

        What enters: backward passes, such as `B2.0 B2.1 B2.2 | B1.0 B1.1 B1.2`. What leaves, with prefetch:
        `B2.0 B2.1 T1.0 B2.2 | T1.1 B1.0 T1.2 B1.1 B1.2`, where pack 2's stash is on the device; without:
        `B2.0 B2.1 B2.2 | T1.0 T1.1 B1.0 T1.2 B1.1 B1.2`.

        With prefetch, what is for the first two runs of a pack comes before the swap-in of the next pack's weights, which
        shares their stream and takes as long as several runs. No more is on the device at once than during other runs.
        """
        pass_before: dict[int, PackPass] = {}  # by device
        for pack_pass in passes:
            device = pack_pass.pack.device
            earlier = pass_before.get(device)
            pass_before[device] = pack_pass
            runs: list[list[Task]] = []
            moves: list[list[Task]] = []
            for m, tasks in pack_pass.runs:
                needed = self._moves_in_before(pack_pass, m, tasks[0].kind)
                if self._policy.slices_from_host:
                    tasks[:0] = needed
                elif needed:
                    runs.append(tasks)
                    moves.append(needed)
            for place, needed in enumerate(moves):
                if place == 0:
                    if self._policy.prefetch and earlier is not None and len(earlier.runs) > 1:
                        _, last_run = earlier.runs[-1]
                        # What that run itself sends to the host comes back after it.
                        last_run[:0] = [task for task in needed if not _sends_out(last_run, task)]
                        pack_pass.before += [task for task in needed if _sends_out(last_run, task)]
                    else:
                        pack_pass.before += needed
                elif place == 1 and self._policy.prefetch and pack_pass.runs[0][1] is runs[0]:
                    pack_pass.before += needed
                else:
                    runs[place - 1][:0] = needed

    def _moves_in_before(self, pack_pass: PackPass, micro_batch: int, kind: TaskKind) -> list[Task]:
        """Return the tasks that bring back what a run of this kind needs."""
        index = pack_pass.pack.index
        moves: list[Task] = []
        by_slices = self._policy.slices_from_host  # they bring their own
        if kind is TaskKind.BACKWARD and not by_slices and self._stash_is_away(index, micro_batch):
            moves.append(Task(TaskKind.STASH_IN, index, micro_batch))
        crossing = self._coming_back.pop((pack_pass.is_backward, index, micro_batch), None)
        if crossing is not None:
            moves.append(crossing)
        return moves

    def _add_gradients_out(self, passes: Sequence[PackPass], updates: bool) -> None:
        """Add what follows each pack's backward pass: its gradients leave, it is updated and evicted.

        What enters: backward passes, such as `L2.0 | B1.0 | B0.0`. What leaves, with `updates`:
        `L2.0 O2 U2 E2 | B1.0 G2 O1 U1 E1 | B0.0 G1 O0 U0 E0 G0`. A pack's gradients are freed after the backward pass of
        the device's next pack, which hides their way to the host; at once where no copy is to be hidden.
        """
        freed: dict[int, Task] = {}
        for pack_pass in passes:
            pack, resident = pack_pass.pack, pack_pass.pack.index in self._policy.resident
            if pack.device in freed:
                pack_pass.after.append(freed.pop(pack.device))
            if pack.needs_backward and not resident:
                pack_pass.after += (Task(kind, pack.index) for kind in _gradients_out(self._policy))
                if self._policy.slices_from_host:
                    pack_pass.after.append(Task(TaskKind.FREE_GRADIENTS, pack.index))
                else:
                    freed[pack.device] = Task(TaskKind.FREE_GRADIENTS, pack.index)
            if pack.needs_backward and updates:
                pack_pass.after.append(_update(pack.index, self._policy))
            if not resident:
                pack_pass.after.append(Task(TaskKind.EVICT, pack.index))
        passes[-1].after += freed.values()

    def _stash_is_away(self, index: int, micro_batch: int) -> bool:
        if (index, micro_batch) in self._graphs:
            return False
        if index in self._in:
            return True
        # A forward pass that ran alone has cut, and stashed, the last pack too.
        last = index == self._packing.backward[-1]
        return last and bool(self._policy.stash_on_host) and micro_batch in self._group.forwarded

    def _add_swap_ins(self, passes: Sequence[tuple[PackPass, bool]]) -> None:
        """Add swap-ins to `passes`, each given with whether its pack is swapped in for it.

        What enters: such as `F0.0 E0 | F1.0 E1 | L2.0 E2`. What leaves: `I0 F0.0 E0 | I1 F1.0 E1 | I2 L2.0 E2`; with
        prefetch, where each comes before the runs of the pass before it on the same device (after the stash that comes back
        there): `I0 I1 F0.0 E0 | I2 F1.0 E1 | L2.0 E2`.
        """
        by_device: defaultdict[int, list[tuple[PackPass, bool]]] = defaultdict(list)
        for pack_pass, swapped in passes:
            by_device[pack_pass.pack.device].append((pack_pass, swapped))
        for own in by_device.values():
            earlier: PackPass | None = None
            for pack_pass, swapped in own:
                weights = _weights_in(pack_pass.pack.index, self._policy) if swapped else []
                if self._policy.prefetch and earlier is not None:
                    earlier.before += weights
                else:
                    pack_pass.before[:0] = weights
                earlier = pack_pass
