"""What a peak cannot be below, against the peak."""

from __future__ import annotations

import pytest

from harmony_ds.scheduler.peaks import Peaks
from harmony_ds.scheduler.policies import Policies
from tests.scheduler.test_graphs import random_cases


@pytest.mark.parametrize("seed", range(150))
def test_no_peak_is_below_what_it_is_at_least(seed: int) -> None:
    for costs, request, packing, policy in random_cases(seed):
        peaks = Peaks(costs, request)
        assert peaks.at_least(packing, Policies.of(packing, [policy]))[0] <= peaks.of(packing, policy)
