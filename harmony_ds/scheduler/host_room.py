"""Bytes that wait in host memory while a plan runs: gradients for their update, and stash for its backward pass.

And those of the buffer for casts, which every plan needs alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.crossing import CrossingBytes, crossing_moves
from harmony_ds.scheduler.plan import Packing, Plan, Policy, held_transfers
from harmony_ds.scheduler.swaps import stash_bytes

_CAST_BYTES = 2**22
"""Small gradients are cast so many bytes at a time: an optimizer's step has a price of its own."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Bytes of host memory that one device's part of a plan takes."""

    gradient_bytes: int
    stash_bytes: int
    crossing_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.gradient_bytes + self.stash_bytes + self.crossing_bytes


def waiting_of(plan: Plan, costs: CostTable) -> Waiting:
    """Return what waits in host memory while `plan` runs."""
    away = plan.packing.forward[: plan.policy.stash_on_host]
    if plan.policy.slices_from_host:
        away = (*away, plan.packing.backward[-1])
    shared = crossing_moves(plan.packing, plan.policy)
    stash = plan.micro_batches * sum(stash_bytes(plan.packs[index], costs, shared) for index in away)
    crossing = plan.micro_batches * _crossing_bytes(plan, costs)
    return Waiting(gradient_bytes(plan.packing, plan.policy), stash, crossing)


def _crossing_bytes(plan: Plan, costs: CostTable) -> int:
    """Return the most that one micro-batch has on the host between two packs, beside its stash."""
    packing = plan.packing
    if not crossing_moves(packing, plan.policy):
        return 0
    firsts = [packing.packs[index].positions[0] for index in packing.backward]
    gradients = max(costs.crossing_gradient_bytes(first, fused=firsts[-1]) for first in firsts)
    return max(CrossingBytes(packing, costs.crossing).unstashed_bytes(packing), gradients)


def gradient_bytes(packing: Packing, policy: Policy) -> int:
    """Return the bytes of one device: of all gradients where they wait for their norm; else no more than these, and no more
    than those of as many of the largest pack as may wait at a time.
    """
    swapped = [packing.packs[index] for index in packing.backward if index not in policy.resident]
    own = [pack.piece_bytes() for pack in (*swapped, *packing.unlayered_packs)]
    waiting = sum(own)
    if not policy.gradients_wait:
        transfers = policy.gradient_slabs + held_transfers(packing, policy)
        waiting = min(waiting, transfers * max(own, default=0))
    if policy.reduce_on_host:
        waiting += policy.gradient_slabs * max(pack.gradient_bytes for pack in packing.packs)
    return waiting


def cast_bytes(elements: Iterable[int], gradient_bytes: int, master_bytes: int) -> int:
    """Return the bytes of the buffer that gradients are cast in for the optimizer; 0: there are none to be cast.

    Args:
        elements: numbers of each parameter that is trained.
        gradient_bytes, master_bytes: of a number of a gradient that waits, and of a parameter that the optimizer steps.
    """
    if gradient_bytes == master_bytes:
        return 0
    sizes = [slab_bytes(numel, master_bytes) for numel in elements]
    return min(sum(sizes), max(_CAST_BYTES, *sizes)) if sizes else 0
