"""What waits in host memory while a plan runs: gradients for their update, and stash for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.plan import Packing, Plan
from harmony_ds.scheduler.policies import Policies
from harmony_ds.scheduler.swaps import stash_bytes


@dataclass(frozen=True, slots=True)
class Waiting:
    """Bytes of host memory that one device's part of a plan takes."""

    gradient_bytes: int
    stash_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.gradient_bytes + self.stash_bytes


def waiting_of(plan: Plan, costs: CostTable) -> Waiting:
    """What waits in host memory while `plan` runs."""
    policies = Policies.of(plan.packing, [plan.policy])
    stash = away_bytes(plan.packing, policies, costs, plan.micro_batches)
    return Waiting(int(gradient_bytes(plan.packing, policies)[0]), int(stash[0]))


def gradient_bytes(packing: Packing, policies: Policies) -> NDArray[np.float64]:
    """Of one device, with each of `policies`: all of them where they wait for their norm, else those of a few packs."""
    base = policies.base
    pieces = np.array([packing.packs[index].piece_bytes() for index in packing.backward], float)[:, None]
    swapped = pieces * ~policies.resident
    waiting: NDArray[np.float64] = swapped.sum(axis=0)
    if not base.gradients_wait:
        waiting = np.minimum(waiting, base.gradient_slabs * swapped.max(axis=0, initial=0.0))
    waiting = waiting + sum(pack.piece_bytes() for pack in packing.always)
    if base.reduce_on_host:
        waiting = waiting + base.gradient_slabs * max(pack.gradient_bytes for pack in packing.packs)
    return waiting


def away_bytes(packing: Packing, policies: Policies, costs: CostTable, micro_batches: int) -> NDArray[np.float64]:
    """The stash of one device that is on the host, with each of `policies`."""
    of_packs = (stash_bytes(packing.packs[index], costs) for index in packing.forward)
    behind: NDArray[np.float64] = np.array([*accumulate(of_packs, initial=0)], float)
    return micro_batches * behind[policies.away]
