"""What a peak cannot be below, against the peak."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.profiler.costs import CallCost
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.peaks import Peaks
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.policies import Policies
from tests.scheduler.examples import FP32, costs_of, graph_of
from tests.scheduler.test_graphs import random_cases


@pytest.mark.parametrize("seed", range(40))
def test_no_peak_is_below_its_bounds(seed: int) -> None:
    """Neither below what it is at least, nor below what its packs take back."""
    draw = Random(seed)
    for costs, request, packing, policy in random_cases(seed):
        peaks = Peaks(costs, request)
        assert peaks.at_least(packing, Policies.of(packing, [policy]))[0] <= peaks.of(packing, policy)
        other = replace(
            policy,
            prefetch=draw.random() < 0.5,
            deferred_update=draw.random() < 0.5,
        )
        peaks = Peaks(replace(costs, scalar_bytes=draw.choice((0, 512)), margin_bytes=77), request)
        for one in (policy, other):
            assert peaks.at_least_closely(packing, one) <= peaks.of(packing, one)


def test_where_little_fits_packs_that_run_back_tell_the_peak() -> None:
    """A pack that is large when it runs back, all others' stash being away."""
    large = CallCost(stash_bytes=100, alive_bytes=100, shared_bytes=10, backward_bytes=10_000, needs_backward=True)
    costs = costs_of((0, 1, 2, 3), large, held_bytes=5)
    packing = Packer(graph_of([1_000] * 4), costs, FP32).packing((0, 1, 2, 3, 4))
    request = PlanRequest(HarmonySettings(), 6, None, 0, Policy())
    for policy in (
        Policy(stash_on_host=3, prefetch=False),
        Policy(stash_on_host=3),
        Policy(stash_on_host=3, kept=(0,)),
    ):
        peaks = Peaks(costs, request)
        assert peaks.at_least_closely(packing, policy) == peaks.of(packing, policy)
