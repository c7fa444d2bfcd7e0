"""Checks every promise that a list of tasks makes, so that a broken plan is an error and not a wrong result or a hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from harmony_ds.scheduler.compose import Group
from harmony_ds.scheduler.plan import Packing, Policy, Task, TaskKind
from harmony_ds.scheduler.resident import sharing


class PlanError(AssertionError):
    """A list of tasks that must not be executed; always a fault of the scheduler, never of a user."""


_DEFAULT = Policy()


def validate(packing: Packing, tasks: tuple[Task, ...], group: Group, policy: Policy = _DEFAULT) -> None:
    """Raises PlanError unless every micro-batch passes every pack once, forward in order and backward in reverse, with
    the pack's weights (gathered, where several devices share them) and its own stash on the device; every gradient is
    swapped out once (without grouping, once for each micro-batch), behind the last backward, freed as often, and updated
    once behind that (and behind the norm, if there is one, or the backward pass, as the policy says), and of several
    devices reduced before it is swapped out; and nothing is left on the device but the resident packs, which are never
    swapped and share no parameter with others. The unlayered parameters are there while anything runs. A pack whose graph
    is kept stays until that has been propagated through, and is not recomputed.
    """
    resident = policy.resident
    _check_cover(packing)
    for index in resident:
        shared = sharing(packing, index, resident)
        if shared is not None:
            raise PlanError(f"pack {index} is resident and shares {shared[0]} with pack {shared[1]}, which is not")
    walk = _Walk(packing, group, policy, deferred=any(task.kind is TaskKind.NORM for task in tasks))
    for place, task in enumerate(tasks):
        wrong = walk.pass_over(task)
        if wrong:
            raise PlanError(f"task {place} ({task}): {wrong}")
    wrong = walk.left_over()
    if wrong:
        raise PlanError(wrong)


def _check_cover(packing: Packing) -> None:
    packs = packing.packs
    if [pack.index for pack in packs] != list(range(len(packs))):
        raise PlanError(f"the packs are not numbered in order: {[pack.index for pack in packs]}")
    unused = set(range(len(packs))) - {*packing.forward, *packing.backward, packing.unlayered, packing.uncalled}
    if unused or not packing.backward:
        raise PlanError(f"packs {sorted(unused)} belong to no pass" if unused else "there is no pack")
    _check_pass("backward", packing, packing.backward, packs[packing.backward[-1]].positions[-1] + 1)
    _check_pass("forward", packing, packing.forward, packing.fused.positions[0])
    owned = [name for pack in packs for name in pack.owned]
    if len(owned) != len(set(owned)):
        raise PlanError("a parameter is owned by two packs")


def _check_pass(name: str, packing: Packing, numbers: tuple[int, ...], end: int) -> None:
    positions = [p for index in numbers for p in packing.packs[index].positions]
    if positions != list(range(end)):
        raise PlanError(f"the packs of the {name} pass do not cover {end} calls once and in order: {positions}")


class _Walk:
    """What has happened so far. Every handler returns what is wrong with its task, or None."""

    def __init__(self, packing: Packing, group: Group, policy: Policy, deferred: bool) -> None:
        packs = packing.packs
        self._group = group
        self._policy = policy
        self._packing = packing
        self._last = packing.backward[-1]
        self._resident = frozenset(policy.resident)
        self._coming: set[int] = set()  # packs of which each device has its share
        self._always = frozenset(pack.index for pack in packing.always)
        through_packs = [index for index in packing.backward if packs[index].needs_backward]
        without_calls = [index for index in (packing.unlayered, packing.uncalled) if index is not None]
        self._wanted = [*through_packs, *without_calls]
        rounds = len(group.rounds(policy.grouping))
        self._swapped = [index for index in through_packs if index not in self._resident for _ in range(rounds)]
        self._swapped += self._always
        through = packing.forward if policy.fuse_last_pack else (*packing.forward, self._last)
        self._forward = {m: [*through] for m in group.fresh} | {m: [] for m in group.forwarded}
        self._backward = {
            m: [i for i in reversed(packing.backward) if packs[i].needs_backward or i == self._last] for m in group.all
        }
        self._norm_missing = deferred
        self._inside: set[int] = {*policy.resident, *(self._always if group.begun else ())}
        self._gathered: set[int] = set()  # packs with gradients that have not been swapped out
        self._reduced: set[int] = set()  # packs whose gradients are the sums of all devices'
        self._apart: set[int] = set()  # packs whose gradients are on the host, those of every device for itself
        self._away: set[tuple[int, int]] = set()  # (position, micro-batch): stashes on the host
        self._graphs: set[tuple[int, int]] = set()  # (pack, micro-batch)
        self._out: Counter[int] = Counter()
        self._freed: Counter[int] = Counter()
        self._updated: Counter[int] = Counter()
        self._handlers: dict[TaskKind, Callable[[Task], str | None]] = {
            TaskKind.SWAP_IN: self._swap_in,
            TaskKind.GATHER: self._gather,
            TaskKind.EVICT: self._evict,
            TaskKind.FORWARD: self._run_forward,
            TaskKind.FUSED: self._run_backward,
            TaskKind.BACKWARD: self._run_backward,
            TaskKind.FORWARD_FOR_GRAPH: self._run_forward,
            TaskKind.BACKWARD_FROM_GRAPH: self._run_backward,
            TaskKind.REDUCE: self._reduce,
            TaskKind.SWAP_OUT: self._swap_out,
            TaskKind.FREE_GRADIENTS: self._free,
            TaskKind.STASH_OUT: self._stash_out,
            TaskKind.STASH_IN: self._stash_in,
            TaskKind.NORM: self._norm,
            TaskKind.UPDATE: self._update,
            TaskKind.UPDATE_ON_DEVICE: self._update,
        }

    def pass_over(self, task: Task) -> str | None:
        return self._handlers[task.kind](task)

    def left_over(self) -> str | None:
        unfinished = [m for m in self._group.all if self._forward[m] or self._backward[m]]
        if unfinished:
            return f"micro-batches {unfinished} are not finished"
        left = self._inside | self._coming
        if left != self._resident:
            return f"packs {sorted(left)} are left on the device, and {sorted(self._resident)} are resident"
        for what, done, wanted in (
            ("swapped out", self._out, self._swapped),
            ("freed", self._freed, self._swapped),
            ("updated", self._updated, self._wanted),
        ):
            if sorted(done.elements()) != wanted:
                return f"packs {wanted} have gradients to be so treated, but {sorted(done.elements())} are {what}"
        return None

    def _swap_in(self, task: Task) -> str | None:
        if task.pack in self._inside | self._coming:
            return "it is on the device already"
        (self._coming if self._policy.shared else self._inside).add(task.pack)
        return None

    def _gather(self, task: Task) -> str | None:
        if task.pack not in self._coming:
            return "gathered twice, or without a share"
        self._coming.discard(task.pack)
        self._inside.add(task.pack)
        return None

    def _evict(self, task: Task) -> str | None:
        if task.pack not in self._inside or task.pack in self._resident:
            return "it is not on the device, or resident"
        if any(pack == task.pack for pack, _ in self._graphs):
            return "its graphs are kept"
        self._inside.discard(task.pack)
        return None

    def _not_ready(self, task: Task) -> str | None:
        if task.micro_batch not in self._backward:
            return "there is no such micro-batch"
        if task.pack not in self._inside:
            return "its weights are not on the device"
        if not self._always <= self._inside:
            return "the unlayered parameters are not on the device"
        if self._out[task.pack] > self._freed[task.pack]:
            return "its earlier gradients have not been freed"
        return None

    def _run_forward(self, task: Task) -> str | None:
        order = self._forward.get(task.micro_batch, [])
        if order[:1] == [task.pack] and self._inside.issuperset((task.pack, *self._always)):
            order.pop(0)
            if task.kind is TaskKind.FORWARD_FOR_GRAPH:
                self._graphs.add((task.pack, task.micro_batch))
            return None
        return self._not_ready(task) or "out of forward order"

    def _run_backward(self, task: Task) -> str | None:
        wrong = self._not_ready(task)
        if wrong:
            return wrong
        if self._forward[task.micro_batch]:
            return "its forward pass is not finished"
        fresh = task.pack == self._last and task.micro_batch in self._group.fresh
        fused = fresh and self._policy.fuse_last_pack
        if fused != (task.kind is TaskKind.FUSED):
            return "fused where it must not be, or not fused where it must"
        kept = (task.pack, task.micro_batch) in self._graphs
        if kept != (task.kind is TaskKind.BACKWARD_FROM_GRAPH):
            return "recomputed though its graph is kept, or not recomputed though it is not"
        if any((p, task.micro_batch) in self._away for p in self._positions(task)):
            return "its stash is on the host"
        return self._propagate(task)

    def _propagate(self, task: Task) -> str | None:
        order = self._backward[task.micro_batch]
        if order[:1] != [task.pack]:
            return "out of backward order"
        order.pop(0)
        self._graphs.discard((task.pack, task.micro_batch))
        self._gathered.update((task.pack, *self._always))
        return None

    def _unfinished(self, task: Task) -> bool:
        """Whether gradients of the pack are still to come."""
        if not self._positions(task):
            return any(self._backward.values())
        return any(task.pack in order for order in self._backward.values())

    def _reduce(self, task: Task) -> str | None:
        if self._policy.alone or task.pack in self._reduced:
            return "reduced twice, or with no other device"
        if self._policy.reduce_on_host:
            if task.pack not in self._apart:
                return "reduced on the host twice, or before its gradients are there"
            self._apart.discard(task.pack)
            return None
        if task.pack not in self._gathered or (self._policy.grouping and self._unfinished(task)):
            return "reduced before all of its gradients are there"
        self._reduced.add(task.pack)
        return None

    def _swap_out(self, task: Task) -> str | None:
        on_host = self._policy.reduce_on_host
        if not self._policy.alone and not on_host and task.pack not in self._reduced:
            return "its gradients are one device's"
        self._reduced.discard(task.pack)
        if task.pack not in self._inside:
            return "its gradients went with its weights"
        if task.pack not in self._gathered or (self._policy.grouping and self._unfinished(task)):
            return "swapped out early or twice"
        self._gathered.discard(task.pack)
        self._apart.update({task.pack} if on_host else ())
        self._out[task.pack] += 1
        return None

    def _free(self, task: Task) -> str | None:
        if self._out[task.pack] <= self._freed[task.pack]:
            return "freed early or twice"
        self._freed[task.pack] += 1
        return None

    def _positions(self, task: Task) -> tuple[int, ...]:
        return self._packing.packs[task.pack].positions

    def _stash_out(self, task: Task) -> str | None:
        self._away.update((p, task.micro_batch) for p in self._positions(task))
        return None

    def _stash_in(self, task: Task) -> str | None:
        moved = {(p, task.micro_batch) for p in self._positions(task)}
        known = not self._away.isdisjoint(moved) or task.micro_batch in self._group.forwarded
        self._away -= moved
        return None if known else "its stash never left"

    def _norm(self, task: Task) -> str | None:
        self._norm_missing = False
        if self._apart:
            return "gradients on the host have not been reduced"
        return None if sorted(self._out.elements()) == self._swapped else "not every gradient has been swapped out"

    def _update(self, task: Task) -> str | None:
        if self._norm_missing:
            return "updated before the norm is known"
        if not self._policy.just_in_time_update and any(self._backward.values()):
            return "updated before the backward pass is over"
        on_device = task.kind is TaskKind.UPDATE_ON_DEVICE
        there = on_device or (self._out[task.pack] > 0 and task.pack not in self._gathered | self._apart)
        there = there or task.pack == self._packing.uncalled
        if (
            self._unfinished(task)
            or self._updated[task.pack]
            or on_device != (task.pack in self._resident)
            or not there
        ):
            return "updated early, twice or in the wrong place"
        self._updated[task.pack] += 1
        return None
