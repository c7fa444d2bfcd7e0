"""fp32 values as bf16 weights and the bits below them: every value comes back, and weights round as torch rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harmony_ds.offload.split_masters import SplitMasters

FEW_LOW_BITS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_weight_with(low: tuple[int, ...]) -> Tensor:
    """fp32 values of every upper half, infinities and NaNs included, with each of these lower halves."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    bits = (high[:, None] | torch.tensor(low)).reshape(-1)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def split(values: Tensor) -> tuple[SplitMasters, Tensor]:
    masters, weight = SplitMasters(), torch.empty(values.shape, dtype=torch.bfloat16)
    masters.add("w", weight, values)
    return masters, weight


def test_every_value_comes_back_and_its_weight_is_rounded_as_torch_rounds() -> None:
    values = every_weight_with(FEW_LOW_BITS)
    masters, weight = split(values)
    numbers = ~values.isnan()
    assert torch.equal(masters.read("w")[numbers].view(torch.int32), values[numbers].view(torch.int32))
    assert torch.equal(weight[numbers], values[numbers].to(torch.bfloat16))
    assert weight[~numbers].isnan().all() and masters.read("w")[~numbers].isnan().all()


def test_ties_are_kept_by_block_and_forgotten_when_they_are_written_over() -> None:
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32).item()  # halfway above 1.0, which is even
    values = torch.ones(SplitMasters.block + 5)
    values[SplitMasters.block + 3] = tie
    masters, weight = split(values)
    assert torch.equal(masters.read("w"), values) and torch.equal(weight, values.to(torch.bfloat16))
    assert masters.host_bytes == 2 * values.numel() + 8
    masters.write("w", torch.ones_like(values))
    assert masters.host_bytes == 2 * values.numel()


def test_weights_that_were_written_into_become_the_masters_and_others_stay() -> None:
    values = torch.randn(3, SplitMasters.block, generator=torch.Generator().manual_seed(0))
    masters, weight = split(values)
    before = weight.clone()
    weight[1, 7] = 4.0
    masters.round("w", weight != before)
    values[1, 7] = 4.0
    assert torch.equal(masters.read("w").view(values.shape), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_of_other_dtypes_are_taken_in_fp32(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 1000).to(dtype)
    masters, _ = split(values)
    assert torch.equal(masters.read("w"), values.float())
