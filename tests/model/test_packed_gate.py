"""Quantized weights that the program reads, writes, copies and pickles while an engine trains beside them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import ModelError, UsageError
from tests import quantized
from tests.engine.drive import config_of, engine_for, loop, seed_of
from tests.engine.test_quantized import ACCUMULATION, GROUPS, adamw_of, trained_by
from tests.offload.test_disk import WEIGHTS, on
from tests.oracle import train_plainly

LAYERS = 2
BLOCK = 1
KINDS = [
    "bitsandbytes NF4, double",
    "bitsandbytes int8",
    "torchao int8",
    "torchao NF4",
    "integer parameter",
    "float8 parameter",
]
Write = Callable[[nn.Module], None]


def build(kind: str) -> nn.Module:
    return quantized.build(kind, layers=LAYERS)


def base_of(model: nn.Module) -> Any:
    return model.model.layers[BLOCK].mlp.up_proj.base


def weight_of(model: nn.Module) -> Any:
    return next(base_of(model).parameters())


def values_of(model: nn.Module) -> Any:
    """Return other values for the weight, of its own kind."""
    return next(model.model.layers[BLOCK].mlp.gate_proj.base.parameters()).detach()


def by_data(model: nn.Module) -> None:
    weight_of(model).data.copy_(values_of(model))


def by_alias(model: nn.Module) -> None:
    alias = weight_of(model).data
    alias.copy_(values_of(model))


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    weight_of(model).copy_(values_of(model))


def by_detached(model: nn.Module) -> None:
    weight_of(model).detach().copy_(values_of(model))


def as_data(model: nn.Module) -> None:
    weight_of(model).data = values_of(model).clone()


def by_scales(model: nn.Module) -> None:
    base = base_of(model)
    base.meta["scale"].mul_(2)


def by_quant_state(model: nn.Module) -> None:
    base_of(model).quant_state.state2.absmax.mul_(2)


def by_buffer(model: nn.Module) -> None:
    base_of(model).qweight.zero_()


CASES: list[tuple[str, Write]] = [
    (kind, write) for kind in KINDS for write in (by_data, by_alias, in_place, by_detached)
]
CASES += [(kind, as_data) for kind in ("bitsandbytes NF4, double", "integer parameter")]
CASES += [
    ("integer parameter", by_scales),
    ("bitsandbytes NF4, double", by_quant_state),
    ("buffers in groups, read in backward", by_buffer),
]


def trained_plainly(kind: str, write: Write) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return losses and trained weights of two steps, between which `write` changes the base."""
    model = build(kind)
    optimizer = adamw_of(model)
    losses: list[list[float]] = []
    for step, group in enumerate(GROUPS):
        losses += train_plainly(model, [group], optimizer, clip=None, seed_of=lambda _, i, step=step: seed_of(step, i))
        write(model)
    return losses, trained_by(model)


@pytest.mark.parametrize("residency", ["off", LAYERS + 3])
@pytest.mark.parametrize(("kind", "write"), CASES)
def test_what_is_written_between_steps_is_taken_over(kind: str, write: Write, residency: Any) -> None:
    losses, weights = trained_plainly(kind, write)
    model = build(kind)
    optimizer = adamw_of(model)
    with engine_for(model, lambda _: optimizer, config_of(ACCUMULATION, None, {"residency": residency})) as engine:
        found: list[list[float]] = []
        for group in GROUPS:
            found += loop(engine, [group])
            write(model)
    assert found == losses
    assert all(torch.equal(weight, weights[name]) for name, weight in trained_by(model).items())


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "torchao int8", "integer parameter"])
def test_what_is_written_into_a_base_on_a_disk_is_taken_over(kind: str, tmp_path: Path) -> None:
    losses, _ = trained_plainly(kind, by_data)
    model = build(kind)
    optimizer = adamw_of(model)
    with engine_for(model, lambda _: optimizer, config_of(ACCUMULATION, **on(tmp_path, WEIGHTS))) as engine:
        first = loop(engine, GROUPS[:1])
        by_data(model)
        assert first + loop(engine, GROUPS[1:]) == losses


@pytest.mark.parametrize("residency", ["off", LAYERS + 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_after_a_write_reads_what_was_written(kind: str, residency: Any) -> None:
    plain, model = build(kind), build(kind)
    optimizer = adamw_of(model)
    train_plainly(plain, GROUPS[:1], adamw_of(plain), clip=None, seed_of=seed_of)
    with engine_for(model, lambda _: optimizer, config_of(ACCUMULATION, None, {"residency": residency})) as engine:
        loop(engine, GROUPS[:1])
        for one in (plain, model):
            by_data(one)
        with torch.no_grad():
            assert torch.equal(engine(**GROUPS[0][0]).logits, plain(**GROUPS[0][0]).logits)


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("bitsandbytes NF4, double", in_place),
        ("bitsandbytes NF4, double", by_quant_state),
        ("torchao int8", in_place),
        ("integer parameter", in_place),
        ("integer parameter", by_scales),
        ("buffers in groups, read in backward", by_buffer),
    ],
)
def test_a_write_while_micro_batches_wait_is_refused_by_name(kind: str, write: Write) -> None:
    model = build(kind)

    def write_within_a_step() -> None:
        engine(**GROUPS[0][0])
        write(model)
        engine(**GROUPS[0][1])

    with (
        engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine,
        pytest.raises((ModelError, UsageError), match=r"model\.layers\.1\.mlp\.up_proj\.base"),
    ):
        write_within_a_step()


def test_a_buffer_that_is_replaced_is_refused_by_name() -> None:
    model = build("int8 buffers")
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine:
        loop(engine, GROUPS[:1])
        base_of(model).weight = base_of(model).weight.clone()
        with pytest.raises(ModelError, match=r"the buffer model\.layers\.1\.mlp\.up_proj\.base\.weight is replaced"):
            engine(**GROUPS[1][0])


def test_data_of_a_wrapper_that_is_replaced_is_refused_by_name() -> None:
    model = build("torchao int8")
    with (
        engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)),
        pytest.raises(ModelError, match=r"data of model\.layers\.1\.mlp\.up_proj\.base\.weight is replaced"),
    ):
        as_data(model)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_are_those_of_the_class(kind: str) -> None:
    model = build(kind)
    expected = [type(one) for one in copies_of(weight_of(model))]
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine:
        loop(engine, GROUPS[:1])
        engine.finish_updates()
        weight = weight_of(model)
        assert isinstance(weight, expected[0])
        copied = copies_of(weight)
        assert isinstance(weight, expected[0]) and "_hp_mapping" in vars(weight)
    assert [type(one) for one in copied] == expected
    assert type(weight_of(model)) is expected[0] and "_hp_mapping" not in vars(weight_of(model))


def copies_of(tensor: Tensor) -> list[Tensor]:
    """Return a deep copy, and what is loaded of a file that the tensor was saved to."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return [copy.deepcopy(tensor), torch.load(file, weights_only=False)]
