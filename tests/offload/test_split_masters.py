"""fp32 values as bf16 weights and the bits below them: every value comes back, and weights round as torch rounds."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.decomposer.graph import piece_of
from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess
from harmony_ds.errors import OptimizerError
from harmony_ds.offload import native, split_masters
from harmony_ds.offload.native import make_native
from harmony_ds.offload.split_masters import SplitMasters
from harmony_ds.optim.block_optimizer import SplitOptimizer
from harmony_ds.optim.cores import computing_with
from harmony_ds.optim.host_optimizer import HostOptimizer

FEW_LOW_BITS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_weight_with(low: tuple[int, ...]) -> Tensor:
    """fp32 values of every upper half, infinities and NaNs included, with each of these lower halves."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    return (high[:, None] | torch.tensor(low)).reshape(-1).to(torch.int32).view(torch.float32)


class OneOfThree(SingleProcess):
    """Memory as three processes share it."""

    def pieces(self, numel: int) -> list[slice]:
        return [piece_of(numel, rank, 3) for rank in range(3)]

    def piece_lists(self, numel: int) -> list[Tensor]:
        return [torch.zeros(1 + piece.stop - piece.start, dtype=torch.int64) for piece in self.pieces(numel)]


def split(values: Tensor, world: SingleProcess = SINGLE_PROCESS) -> tuple[SplitMasters, Tensor]:
    masters, weight = SplitMasters(world), torch.empty(values.shape, dtype=torch.bfloat16)
    masters.add("w", weight)
    masters.write("w", values, everywhere=True)
    return masters, weight


@pytest.mark.parametrize("world", [SINGLE_PROCESS, OneOfThree()], ids=["alone", "of three"])
@pytest.mark.parametrize("low", [FEW_LOW_BITS, (0x8000,), (0xFFFF,)])
def test_every_value_comes_back_and_its_weight_is_rounded_as_torch_rounds(
    low: tuple[int, ...], world: SingleProcess
) -> None:
    values = every_weight_with(low)
    masters, weight = split(values, world)
    numbers = ~values.isnan()
    assert torch.equal(masters.read("w")[numbers].view(torch.int32), values[numbers].view(torch.int32))
    assert torch.equal(weight[numbers], values[numbers].to(torch.bfloat16))
    assert weight[~numbers].isnan().all() and masters.read("w")[~numbers].isnan().all()


def test_ties_are_kept_and_forgotten_when_they_are_written_over() -> None:
    values = torch.ones(SplitMasters.block + 5)
    values[SplitMasters.block + 3] = 1 + 2**-8  # halfway above 1.0, which is even
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


def test_a_failed_compilation_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_masters.cpp_extension, "load", Mock(side_effect=RuntimeError("no compiler")))
    with pytest.raises(OptimizerError, match=r"harmony.split_masters .* failed \(no compiler\)"):
        split_masters._compiled.__wrapped__()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_of_other_dtypes_are_taken_in_fp32(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 1000).to(dtype)
    assert torch.equal(split(values)[0].read("w"), values.float())


@pytest.mark.parametrize("threads", [1, 2, None], ids=["one thread", "two threads", "block by block"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad"])
def test_deepspeeds_steps_are_those_of_masters_apart(
    name: str, decay: float, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threads is None:  # DeepSpeed's function is not found
        monkeypatch.setattr(native, "GilFreeOp", Mock(side_effect=OSError))
    values = every_weight_with(FEW_LOW_BITS)[3:]
    masters, weight = split(values)
    master, parameter = nn.Parameter(values.clone()), nn.Parameter(weight)
    options = {"lr": 1e-3, "weight_decay": decay, **({"adamw_mode": threads == 1} if name.endswith("Adam") else {})}
    with computing_with(threads or 1):
        apart = HostOptimizer(make_native(name, [master], options), {"w": master})
        ours = SplitOptimizer(make_native(name, [parameter], options), {"w": parameter}, masters)
        for step in range(3):
            gradient = torch.randn(values.shape, generator=torch.Generator().manual_seed(step))
            gradient[::2] = 0  # without decay, Adam keeps these ties
            for host in (apart, ours):
                host.step({"w": gradient.clone()}, host.hyper())
    found = {"master": masters.read("w"), "weight": weight, **(ours.state_of("w") or {})}
    expected = {"master": master.detach(), "weight": master.detach().bfloat16(), **(apart.state_of("w") or {})}
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
