"""Checks every promise that a list of tasks makes, so that a broken plan is an error and not a wrong result or a hang."""

from __future__ import annotations

from harmony_ds.scheduler.compose import Group
from harmony_ds.scheduler.plan import Pack, Task, TaskKind

_NEEDS_WEIGHTS = (TaskKind.FORWARD, TaskKind.FUSED, TaskKind.BACKWARD)


class PlanError(AssertionError):
    """A list of tasks that must not be executed; always a fault of the scheduler, never of a user."""


def validate(packs: tuple[Pack, ...], tasks: tuple[Task, ...], group: Group) -> None:
    """Raises PlanError unless every micro-batch passes every pack once, forward in order and backward in reverse, with
    the pack's weights on the device; every gradient is swapped out once, behind the last backward, and updated once
    behind that; and nothing is left on the device.
    """
    _check_cover(packs)
    forward = {m: [*range(len(packs) - 1)] for m in group.fresh} | {m: [] for m in group.forwarded}
    backward = {m: [p.index for p in reversed(packs) if p.needs_backward or p is packs[-1]] for m in group.all}
    inside: set[int] = set()
    swapped_out: list[int] = []
    updated: list[int] = []
    for place, task in enumerate(tasks):
        if task.kind in _NEEDS_WEIGHTS:
            _check(task.pack in inside, place, task, "its weights are not on the device")
        match task.kind:
            case TaskKind.SWAP_IN:
                _check(task.pack not in inside, place, task, "it is on the device already")
                inside.add(task.pack)
            case TaskKind.EVICT:
                _check(task.pack in inside, place, task, "it is not on the device")
                inside.discard(task.pack)
            case TaskKind.FORWARD:
                _check(forward[task.micro_batch][:1] == [task.pack], place, task, "out of forward order")
                forward[task.micro_batch].pop(0)
            case TaskKind.FUSED | TaskKind.BACKWARD:
                _check(not forward[task.micro_batch], place, task, "its forward pass is not finished")
                _check(backward[task.micro_batch][:1] == [task.pack], place, task, "out of backward order")
                backward[task.micro_batch].pop(0)
            case TaskKind.SWAP_OUT:
                left = [m for m, order in backward.items() if task.pack in order]
                _check(not left and task.pack not in swapped_out, place, task, "swapped out early or twice")
                swapped_out.append(task.pack)
            case TaskKind.UPDATE:
                _check(task.pack in swapped_out and task.pack not in updated, place, task, "updated early or twice")
                updated.append(task.pack)
    left_over = [m for m in group.all if forward[m] or backward[m]]
    if left_over or inside or sorted(updated) != sorted(swapped_out):
        raise PlanError(f"unfinished micro-batches {left_over}, packs left inside {inside}, updates {updated}")


def _check_cover(packs: tuple[Pack, ...]) -> None:
    positions = [p for pack in packs for p in pack.positions]
    if positions != list(range(len(positions))):
        raise PlanError(f"the packs do not cover every call once and in order: {positions}")
    owned = [name for pack in packs for name in pack.owned]
    if len(owned) != len(set(owned)):
        raise PlanError("a parameter is owned by two packs")


def _check(holds: bool, place: int, task: Task, what: str) -> None:
    if not holds:
        raise PlanError(f"task {place} ({task}): {what}")
