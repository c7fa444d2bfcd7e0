"""Comparison up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harmony_ds.model.sameness import close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_close_up_to_rounding(dtype: torch.dtype) -> None:
    a = torch.linspace(-1.0, 1.0, 16, dtype=dtype)
    for difference, same in ((0.0, True), (torch.finfo(dtype).eps, True), (0.1, False)):
        b = a.clone()
        b[3] += difference
        assert close(a, b) is same


def test_large_tensors_are_compared_as_a_whole() -> None:
    """The largest value of all pieces sets the tolerance of each."""
    a = torch.zeros(2**20 + 2)
    b = a.clone()
    b[-1] = 1e-3
    assert not close(a, b)
    a[0] = b[0] = 100.0
    assert close(a, b)
    assert close(a.view(2, -1).t(), b.view(2, -1).t())
    b[-2] = float("nan")
    assert not close(a, b)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, INF]), False),
        (torch.empty(0), torch.empty(0), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.tensor([100_000]), torch.tensor([100_001]), False),
    ],
)
def test_shapes_dtypes_and_nans_must_agree(a: Tensor, b: Tensor, same: bool) -> None:
    assert close(a, b) is same
