"""Packs and a group of micro-batches to the list of tasks of one optimizer step.

    forward     I0 (I1) F0.* E0 (I2) F1.* E1 ...          every pack but the last
    fused       (I n-2) L n-1.*  O n-1  E n-1             forward, loss and backward of the last pack
    backward    (I n-3) B n-2.*  G n-1  O n-2  E n-2 ...  recompute and propagate back
    update      U p behind O p, or all of them in forward order behind N, where the norm of the gradients is known

In brackets: swap-ins issued one pack ahead. A pack whose gradient is on its way to the host keeps it until the next
pack has been computed (G), so that the copy is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harmony_ds.scheduler.plan import Pack, Task, TaskKind


@dataclass(frozen=True, slots=True)
class Group:
    """The micro-batches of one optimizer step.

    Attributes:
        fresh: those of which nothing has run yet.
        forwarded: those whose forward pass ran earlier, because somebody looked at its result.
    """

    fresh: tuple[int, ...]
    forwarded: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted(self.fresh + self.forwarded))


@dataclass(frozen=True, slots=True)
class Policy:
    """How tasks are placed.

    Attributes:
        prefetch: swap the next pack in while this one computes.
        stash_on_host: move stashed inputs to the host between forward and backward.
        deferred_update: no update before the norm of all gradients is known.
    """

    prefetch: bool = True
    stash_on_host: bool = False
    deferred_update: bool = True


def compose_forward(packs: tuple[Pack, ...], micro_batch: int, policy: Policy) -> tuple[Task, ...]:
    """The forward pass of one micro-batch alone, every pack cut: somebody wants its outputs now."""
    swap_ins = _swap_ins([pack.index for pack in packs], policy)
    return tuple(_forward(packs, [micro_batch], policy, swap_ins))


def compose_step(packs: tuple[Pack, ...], group: Group, policy: Policy) -> tuple[Task, ...]:
    """Everything between the first micro-batch of a group and the update of the last pack."""
    forward = packs[:-1] if group.fresh else ()
    backward = (packs[-1], *(pack for pack in reversed(packs[:-1]) if pack.needs_backward))
    # One sequence, so that the last pack is swapped in while the one before it computes.
    swap_ins = _swap_ins([pack.index for pack in (*forward, *backward)], policy)
    tasks = list(_forward(forward, group.fresh, policy, swap_ins))
    tasks += _backward(backward, group, policy, swap_ins)
    if policy.deferred_update:
        tasks.append(Task(TaskKind.NORM, 0))
        tasks += [Task(TaskKind.UPDATE, pack.index) for pack in packs if pack.needs_backward]
    return tuple(tasks)


def _forward(
    packs: tuple[Pack, ...], micro_batches: Iterable[int], policy: Policy, swap_ins: Iterator[list[Task]]
) -> Iterator[Task]:
    for pack in packs:
        yield from next(swap_ins)
        for m in micro_batches:
            yield Task(TaskKind.FORWARD, pack.index, m)
            if policy.stash_on_host:
                yield Task(TaskKind.STASH_OUT, pack.index, m)
        yield Task(TaskKind.EVICT, pack.index)


def _backward(order: tuple[Pack, ...], group: Group, policy: Policy, swap_ins: Iterator[list[Task]]) -> Iterator[Task]:
    freed: Task | None = None
    for pack in order:
        yield from next(swap_ins)
        fused = group.fresh if pack is order[0] else ()
        yield from _run_backward(pack.index, group.all, fused, policy)
        if freed:
            yield freed
        if pack.needs_backward:
            yield Task(TaskKind.SWAP_OUT, pack.index)
            if not policy.deferred_update:
                yield Task(TaskKind.UPDATE, pack.index)
            freed = Task(TaskKind.FREE_GRADIENTS, pack.index)
        yield Task(TaskKind.EVICT, pack.index)
    if freed:
        yield freed


def _run_backward(pack: int, micro_batches: tuple[int, ...], fused: tuple[int, ...], policy: Policy) -> Iterator[Task]:
    back = [m for m in micro_batches if m not in fused] if policy.stash_on_host else []
    if back:
        yield Task(TaskKind.STASH_IN, pack, back.pop(0))
    for m in micro_batches:
        if m in fused:
            yield Task(TaskKind.FUSED, pack, m)
            continue
        if back:
            yield Task(TaskKind.STASH_IN, pack, back.pop(0))
        yield Task(TaskKind.BACKWARD, pack, m)


def _swap_ins(order: list[int], policy: Policy) -> Iterator[list[Task]]:
    """For each pack in `order`: the swap-ins to issue before it runs."""
    tasks = [Task(TaskKind.SWAP_IN, index) for index in order]
    for place in range(len(order)):
        if not policy.prefetch:
            yield [tasks[place]]
        else:
            yield tasks[0:2] if place == 0 else tasks[place + 1 : place + 2]
