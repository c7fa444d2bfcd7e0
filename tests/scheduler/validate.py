"""Rules that a list of tasks must keep to, task by task: what the composer issues is checked against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.plan import Packing, Policy, Task, TaskKind
from harmony_ds.scheduler.resident import tied_closure


class PlanError(AssertionError):
    """A list of tasks that must not be executed."""


_DEFAULT = Policy()


def composed(packing: Packing, group: Group, policy: Policy) -> tuple[Task, ...]:
    """`compose_step`, validated."""
    tasks = compose_step(packing, group, policy)
    validate(packing, tasks, group, policy)
    return tasks


def validate(packing: Packing, tasks: tuple[Task, ...], group: Group, policy: Policy = _DEFAULT) -> None:
    """Raises PlanError unless every micro-batch passes every pack once, forward in order and backward in reverse, with
    the pack's weights (gathered, where several devices share them) and its own stash on the device; every gradient is
    swapped out once (without grouping, once for each micro-batch), after the last backward, freed as often, and updated
    once after that (and after the norm, if there is one, or the backward pass, as the policy says), and of several
    devices reduced before it is swapped out; and nothing is left on the device but the resident packs, which are never
    swapped and share no parameter with others. The unlayered parameters are there while anything runs. A pack whose graph
    is kept stays until that has been propagated through, and is not recomputed. Of several devices that one process
    drives, a micro-batch is moved to the device of the pack that it passes next, once, before it does. Those that share a
    loss go through the last pack forward, then the last of them turns there, and the others go back after it. What waits
    between two packs leaves after the one and comes back before the other, forward as values and back as gradients. Slices
    that come from the host need no stash on the device.
    """
    _require(
        tied_closure(packing, policy.resident) == policy.resident, "a resident pack shares a parameter with another"
    )
    walk = _Walk(packing, group, policy, deferred=any(task.kind is TaskKind.NORM for task in tasks))
    for place, task in enumerate(tasks):
        try:
            walk.handlers[task.kind](task)
        except PlanError as error:
            raise PlanError(f"task {place} ({task}): {error}") from None
    walk.check_end()


def _require(holds: bool, wrong: str) -> None:
    if not holds:
        raise PlanError(wrong)


class _Walk:
    """The events so far."""

    def __init__(self, packing: Packing, group: Group, policy: Policy, deferred: bool) -> None:
        self._packing, self._group, self._policy = packing, group, policy
        packs, self._last = packing.packs, packing.backward[-1]
        self._resident = frozenset(policy.resident)
        self._always = frozenset(pack.index for pack in packing.unlayered_packs)
        through_packs = [index for index in packing.backward if packs[index].needs_backward]
        without_calls = [index for index in (packing.unlayered, packing.uncalled) if index is not None]
        self._wanted = [*(index for index in packing.backward if packs[index].is_updated), *without_calls]
        rounds = len(group.rounds(policy.grouping))
        self._swapped = [index for index in through_packs if index not in self._resident for _ in range(rounds)]
        self._swapped += self._always
        self._turning = {sharing[-1]: sharing for sharing in group.by_loss if sharing[-1] in group.fresh}
        self._loss_members = {m: members for members in group.shared_losses for m in members}
        self._forward = {m: [*packing.forward] for m in group.fresh} | {m: [] for m in group.forwarded}
        for m in group.fresh:
            if m not in self._turning:
                self._forward[m].append(self._last)
        self._backward = {
            m: [i for i in reversed(packing.backward) if packs[i].needs_backward or i == self._last] for m in group.all
        }
        self._norm_missing = deferred
        self._coming: set[int] = set()  # packs of which each device has its share
        self._inside: set[int] = {*policy.resident, *(self._always if group.has_unlayered else ())}
        self._gathered: set[int] = set()  # packs with gradients that have not been swapped out
        self._reduced: set[int] = set()  # packs whose gradients are the sums of all devices'
        self._apart: set[int] = set()  # packs whose gradients are on the host, those of every device for itself
        self._away: set[tuple[int, int]] = set()  # (position, micro-batch): stashes on the host
        self._graphs: set[tuple[int, int]] = set()  # (pack, micro-batch)
        self._crossing_away: set[tuple[bool, int]] = set()  # (whether gradients, micro-batch)
        self._passed: dict[int, int] = {}  # by micro-batch: the pack that it has passed last
        self._on: dict[int, int] = {}  # by micro-batch that has begun: its device
        self._out: Counter[int] = Counter()
        self._freed: Counter[int] = Counter()
        self._updated: Counter[int] = Counter()
        self.handlers: dict[TaskKind, Callable[[Task], None]] = {
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
            TaskKind.CROSSING_OUT: self._crossing_out,
            TaskKind.CROSSING_GRADIENTS_OUT: self._crossing_out,
            TaskKind.CROSSING_IN: self._crossing_in,
            TaskKind.CROSSING_GRADIENTS_IN: self._crossing_in,
            TaskKind.MOVE: self._move,
            TaskKind.MOVE_BACK: self._move,
            TaskKind.NORM: self._norm,
            TaskKind.UPDATE: self._update,
            TaskKind.UPDATE_ON_DEVICE: self._update,
        }

    def _move(self, task: Task) -> None:
        through = self._forward[task.micro_batch] or self._backward[task.micro_batch]
        _require(through[:1] == [task.pack], "it does not go to the pack that comes next")
        there, back = (
            self._packing.packs[task.pack].device,
            task.pack != self._last and not self._forward[task.micro_batch],
        )
        _require(self._on.get(task.micro_batch, there) != there, "it is there already, or has not begun")
        _require(back == (task.kind is TaskKind.MOVE_BACK), "moved back on its way there, or the other way round")
        self._on[task.micro_batch] = there

    def check_end(self) -> None:
        _require(not self._crossing_away, f"{sorted(self._crossing_away)} are left on the host")
        unfinished = [m for m in self._group.all if self._forward[m] or self._backward[m]]
        _require(not unfinished, f"micro-batches {unfinished} are not finished")
        left = self._inside | self._coming
        _require(left == self._resident, f"packs {sorted(left)} are left on the device")
        for what, done, wanted in (
            ("swapped out", self._out, self._swapped),
            ("freed", self._freed, self._swapped),
            ("updated", self._updated, self._wanted),
        ):
            _require(sorted(done.elements()) == wanted, f"{sorted(done.elements())} are {what}, and not {wanted}")

    def _swap_in(self, task: Task) -> None:
        _require(task.pack not in self._inside | self._coming, "it is on the device already")
        (self._coming if self._policy.swaps_in_shares else self._inside).add(task.pack)

    def _gather(self, task: Task) -> None:
        _require(task.pack in self._coming, "gathered twice, or without a share")
        self._coming.discard(task.pack)
        self._inside.add(task.pack)

    def _evict(self, task: Task) -> None:
        _require(task.pack in self._inside - self._resident, "it is not on the device, or resident")
        _require(all(pack != task.pack for pack, _ in self._graphs), "its graphs are kept")
        self._inside.discard(task.pack)

    def _run_forward(self, task: Task) -> None:
        self._check_ready(task)
        _require(self._forward[task.micro_batch][:1] == [task.pack], "out of forward order")
        self._forward[task.micro_batch].pop(0)
        if task.kind is TaskKind.FORWARD_FOR_GRAPH:
            self._graphs.add((task.pack, task.micro_batch))

    def _run_backward(self, task: Task) -> None:
        self._check_ready(task)
        _require(self._out[task.pack] <= self._freed[task.pack], "its earlier gradients have not been freed")
        _require(not self._forward[task.micro_batch], "its forward pass is not finished")
        sharing = self._loss_members.get(task.micro_batch, (task.micro_batch,))
        _require(not any(self._forward[m] for m in sharing), "the loss that it shares cannot be made yet")
        fused = task.pack == self._last and task.micro_batch in self._turning
        later = sharing[sharing.index(task.micro_batch) + 1 :]
        _require(
            all(task.pack not in self._backward[m] for m in later), "a later one that shares its loss comes after it"
        )
        _require(fused == (task.kind is TaskKind.FUSED), "fused where it must not be, or not fused where it must")
        kept = (task.pack, task.micro_batch) in self._graphs
        _require(kept == (task.kind is TaskKind.BACKWARD_FROM_GRAPH), "recomputed though its graph is kept, or not")
        by_slices = self._policy.slices_from_host  # what comes back is in the run
        _require(by_slices or self._away.isdisjoint(self._stashes(task)), "its stash is on the host")
        _require(self._backward[task.micro_batch][:1] == [task.pack], "out of backward order")
        self._backward[task.micro_batch].pop(0)
        self._graphs.discard((task.pack, task.micro_batch))
        self._gathered.update((task.pack, *self._always))

    def _check_ready(self, task: Task) -> None:
        _require(task.micro_batch in self._backward, "there is no such micro-batch")
        _require(task.pack in self._inside, "its weights are not on the device")
        _require(self._always <= self._inside, "the unlayered parameters are not on the device")
        there = self._packing.packs[task.pack].device
        away = {m for _, m in self._crossing_away}
        _require(task.micro_batch not in away, "what it holds is on the host")
        self._passed[task.micro_batch] = task.pack
        _require(self._on.setdefault(task.micro_batch, there) == there, "it is on another device")

    def _unfinished(self, task: Task) -> bool:
        """Whether gradients of the pack are still to come."""
        without_calls = not self._packing.packs[task.pack].positions
        return any(order if without_calls else task.pack in order for order in self._backward.values())

    def _is_there(self, task: Task) -> bool:
        """Whether the pack's gradients are on the device: all of them, as far as they are to come together."""
        return task.pack in self._gathered and not (self._policy.grouping and self._unfinished(task))

    def _reduce(self, task: Task) -> None:
        _require(not self._policy.alone, "reduced with no other device")
        if self._policy.reduce_on_host:
            _require(task.pack in self._apart, "reduced on the host twice, or before its gradients are there")
            self._apart.discard(task.pack)
            return
        _require(task.pack not in self._reduced, "reduced twice")
        _require(self._is_there(task), "reduced before all of its gradients are there")
        self._reduced.add(task.pack)

    def _swap_out(self, task: Task) -> None:
        reduced = self._policy.alone or self._policy.reduce_on_host or task.pack in self._reduced
        _require(reduced, "its gradients are one device's")
        _require(task.pack in self._inside, "its gradients went with its weights")
        _require(self._is_there(task), "swapped out early or twice")
        self._reduced.discard(task.pack)
        self._gathered.discard(task.pack)
        self._apart.update({task.pack} if self._policy.reduce_on_host else ())
        self._out[task.pack] += 1

    def _free(self, task: Task) -> None:
        _require(self._out[task.pack] > self._freed[task.pack], "freed early or twice")
        self._freed[task.pack] += 1

    def _crossing_out(self, task: Task) -> None:
        gradients = task.kind is TaskKind.CROSSING_GRADIENTS_OUT
        _require(self._passed.get(task.micro_batch) == task.pack, "it has not just passed that pack")
        _require(all(m != task.micro_batch for _, m in self._crossing_away), "what it holds is on the host already")
        back = self._has_turned(task.micro_batch)
        _require(back == gradients, "values leave on the way back, or gradients on the way there")
        _require(gradients or all(m != task.micro_batch for _, m in self._graphs), "a graph holds its values")
        _require(bool(self._backward[task.micro_batch]), "it waits for nothing more")
        self._crossing_away.add((gradients, task.micro_batch))

    def _crossing_in(self, task: Task) -> None:
        gradients = task.kind is TaskKind.CROSSING_GRADIENTS_IN
        through = self._forward[task.micro_batch] or self._backward[task.micro_batch]
        _require((gradients, task.micro_batch) in self._crossing_away, "what it holds never left, or came back")
        _require(through[:1] == [task.pack], "it comes back for another pack than the next one")
        self._crossing_away.discard((gradients, task.micro_batch))

    def _has_turned(self, micro_batch: int) -> bool:
        """Whether it has been through the last pack backward."""
        return self._last not in self._backward[micro_batch]

    def _stashes(self, task: Task) -> set[tuple[int, int]]:
        return {(position, task.micro_batch) for position in self._packing.packs[task.pack].positions}

    def _stash_out(self, task: Task) -> None:
        self._away |= self._stashes(task)

    def _stash_in(self, task: Task) -> None:
        known = not self._away.isdisjoint(self._stashes(task)) or task.micro_batch in self._group.forwarded
        _require(known, "its stash never left")
        self._away -= self._stashes(task)

    def _norm(self, _: Task) -> None:
        _require(not self._apart, "gradients on the host have not been reduced")
        _require(sorted(self._out.elements()) == self._swapped, "not every gradient has been swapped out")
        self._norm_missing = False

    def _update(self, task: Task) -> None:
        _require(not self._norm_missing, "updated before the norm is known")
        on_device = task.kind is TaskKind.UPDATE_ON_DEVICE
        there = on_device or (self._out[task.pack] > 0 and task.pack not in self._gathered | self._apart)
        there = there or not self._packing.packs[task.pack].needs_backward
        first = not self._updated[task.pack] and not self._unfinished(task)
        right = on_device == (task.pack in self._resident)
        _require(there and first and right, "updated early, twice or in the wrong place")
        self._updated[task.pack] += 1
