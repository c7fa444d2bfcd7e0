"""Adapters on a quantized, frozen base: plain PyTorch's bits, and each byte of the base swapped in once a pack and pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import ModelError
from tests import quantized
from tests.engine.drive import Groups, adamw, config_of, engine_for, loop, seed_of
from tests.oracle import train_plainly

KINDS = list(quantized.KINDS)
ACCUMULATION = 3
GROUPS: Groups = [[quantized.batch(step * ACCUMULATION + i) for i in range(ACCUMULATION)] for step in range(2)]
BF16 = torch.bfloat16


def trained_by(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    return adamw([parameter for parameter in model.parameters() if parameter.requires_grad])


def train_both(
    build: Callable[[], nn.Module], groups: Groups = GROUPS, clip: float | None = None, **harmony: Any
) -> tuple[Any, nn.Module]:
    """Train in plain PyTorch and with an engine, and compare all bits; return the last step's swaps, and the model."""
    plain = build()
    expected = train_plainly(plain, groups, adamw_of(plain), clip=clip, seed_of=seed_of)
    model = build()
    optimizer = adamw_of(model)
    config = config_of(ACCUMULATION, clip, {"pack_layers": 1, **harmony})
    with engine_for(model, lambda _: optimizer, config) as engine:
        assert loop(engine, groups) == expected
        engine.finish_updates()
        report = engine.swap_report()
    wanted = trained_by(plain)
    for name, weight in trained_by(model).items():
        assert torch.equal(weight, wanted[name]), name
    return report, model


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_quantized_base_train_to_plain_pytorchs_bits(kind: str) -> None:
    report, _ = train_both(lambda: quantized.build(kind), clip=0.5)
    assert sum(report.host_to_device.values()) + sum(report.device_to_host.values()) >= report.lower_bound_bytes > 0


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "torchao int8", "integer parameter"])
def test_a_base_and_adapters_in_bf16_train_to_plain_pytorchs_bits(kind: str) -> None:
    train_both(lambda: quantized.build(kind, BF16))


@pytest.mark.parametrize("kind", ["bitsandbytes NF4", "torchao int8"])
def test_fp32_adapters_beside_a_bf16_base_are_computed_with_as_they_are(kind: str) -> None:
    def build() -> nn.Module:
        model = quantized.build(kind, BF16, lora=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name and parameter.requires_grad)
        return model

    train_both(build)


@pytest.mark.parametrize("kind", ["hand-written wrapper", "bitsandbytes int8", "torchao NF4"])
@pytest.mark.parametrize("residency", ["auto", 2])
def test_resident_packs_of_a_quantized_base_train_to_the_same_bits(kind: str, residency: Any) -> None:
    train_both(lambda: quantized.build(kind), residency=residency)


def test_packed_bytes_are_what_is_swapped() -> None:
    few, _ = train_both(lambda: quantized.build("bitsandbytes NF4"))
    many, _ = train_both(lambda: quantized.build("torchao int8"))
    blocks = quantized.build("torchao int8").model.layers
    codes = sum(linear.base.weight.numel() for linear in blocks.modules() if isinstance(linear, quantized.LoraLinear))
    saved = many.host_to_device["weights"] - few.host_to_device["weights"]
    # Twice a step, but for the last block, which forward and backward share: half a byte and absmax of every 64 codes less.
    assert abs(saved - 2 * codes * (0.5 - 4 / 64)) < 0.25 * codes


def test_the_program_sees_the_same_base_before_and_after() -> None:
    kept = dict(quantized.build("hand-written wrapper").named_parameters())
    _, model = train_both(lambda: quantized.build("hand-written wrapper"))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, quantized.HalvedTensor):
            assert torch.equal(parameter.codes, kept[name].codes) and torch.equal(parameter.scale, kept[name].scale)


def refused(model: nn.Module) -> str:
    with pytest.raises(ModelError) as raised, engine_for(model, adamw, config_of(2)):
        pass
    return re.sub(r"\s+", " ", str(raised.value))


def test_a_quantized_weight_that_requires_a_gradient_is_refused_by_name() -> None:
    model = quantized.build("hand-written wrapper")
    weight = model.model.layers[1].mlp.up_proj.base.weight
    weight.requires_grad_(True)
    said = refused(model)
    assert "model.layers.1.mlp.up_proj.base.weight is a HalvedTensor" in said and "requires_grad_(False)" in said


class Sealed(Tensor):
    """A wrapper of which no inner tensor can be found."""

    @staticmethod
    def __new__(cls) -> Sealed:
        return Tensor._make_wrapper_subclass(cls, (4, 4))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Sealed()
        raise NotImplementedError(f"{func}")


def test_a_class_that_cannot_be_taken_apart_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(Sealed(), requires_grad=False)
    said = refused(model)
    assert "1.weight is a Sealed" in said and "__tensor_flatten__" in said
