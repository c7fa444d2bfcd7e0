"""All processes have to take the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import UsageError
from harmony_ds.step.step_checks import check_same_step

MANY = 500


class Two(SingleProcess):
    """The first process says something; the second one hears it."""

    size = 2

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def agree(self, kind: str, payload: bytes = b"") -> list[bytes]:
        self.told.append(payload)
        return self.told


def check(first: Any, second: Any) -> list[bytes]:
    """`lr` of the last of many parameter groups, in either process."""
    world = Two()
    for lr in (first, second):
        check_same_step(world, 2, (*({"lr": 0.1} for _ in range(MANY)), {"lr": lr}))
    return world.told


@pytest.mark.parametrize(
    ("first", "second"), [(0.1, 0.2), (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1 + 1e-9).double())]
)
def test_a_difference_is_seen_wherever_it_is(first: Any, second: Any) -> None:
    with pytest.raises(UsageError, match="rank 1 are"):
        check(first, second)


def test_equal_ones_are_told_in_few_bytes() -> None:
    assert all(len(told) < 4096 for told in check(torch.tensor(0.1), torch.tensor(0.1)))
