"""What one run of the executor does, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from harmony_ds.offload.updater import GradientNorm
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.scheduler.plan import Pack, Policy, Task

UNLAYERED = -1
"""The pack number under which what no layer owns is updated: needed first in the next step, it comes before all packs."""
UNCALLED = 2**30
"""And what no layer call uses: nobody waits for it, so it comes last."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one run of the executor does.

    Attributes:
        packs: of the plan.
        tasks: to execute, in order.
        activation_bytes: per task, what it holds beside weights; charged where no allocator counts it.
        order: the call order that positions refer to.
        micro_batches: by index.
        policy: of the plan; its resident packs are on the device before the first task and behind the last.
        parked: micro-batches that wait behind their last call for their backward pass (see `scheduler.plan.parked`).
        unlayered: parameters that no layer owns, which are on the device from the first task to the end of the step.
        uncalled: trained parameters that no call uses: only the user's own backward passes reach them.
        held_deliveries: packs whose gradients wait on the host for something else than their update.
        in_pieces: whether layer calls are cut into pieces of a micro-batch.
    """

    packs: tuple[Pack, ...]
    tasks: tuple[Task, ...]
    activation_bytes: tuple[int, ...]
    order: tuple[int, ...]
    micro_batches: Mapping[int, MicroBatch]
    policy: Policy
    parked: frozenset[int]
    unlayered: tuple[str, ...]
    uncalled: tuple[str, ...]
    held_deliveries: int
    in_pieces: bool

    def parks(self, task: Task) -> bool:
        """Whether the micro-batch of `task`, which runs through a pack, waits behind that pack."""
        return task.micro_batch in self.parked and self.packs[task.pack].positions[-1] == len(self.order) - 1


@dataclass(slots=True)
class Outcome:
    """What is known of a step, from its begin on.

    Attributes:
        norm: of all gradients; promised when the step returns.
        overflow: whether its updates were skipped, because gradients were not finite.
        updates_issued: packs whose weights it has changed, or will.
        others_update: whether other processes may change weights, whatever becomes of the step here.
    """

    norm: Future[GradientNorm] | None = None
    overflow: bool = False
    updates_issued: int = 0
    others_update: bool = False


def owners_of(packs: tuple[Pack, ...], pack: Pack) -> list[int]:
    """The packs whose update `pack` must wait for before it is swapped in: its own, and those it borrows from."""
    borrowed = set(pack.parameters) - set(pack.owned)
    return [pack.index, *(other.index for other in packs if other is not pack and borrowed & set(other.owned))]
