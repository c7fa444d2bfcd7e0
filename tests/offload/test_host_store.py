"""A model's parameters move into aligned slabs and stay what they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.families import FAMILIES, MODULES, Family
from tests.offload.examples import odd_sizes, stored
from tests.oracle import assert_same

EVERY_FAMILY = [one for one in FAMILIES + MODULES if one.name in ("gpt2", "t5", "resnet", "clip") or one in MODULES]


@pytest.mark.parametrize("one", EVERY_FAMILY, ids=lambda one: one.name)
def test_parameters_are_equal_before_and_after(one: Family) -> None:
    model = one.build(0.0)
    ids = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    stored(model)
    assert_same(model, one.build(0.0), bitwise=True)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_starts_at_a_multiple_of_64_bytes(dtype: torch.dtype) -> None:
    one = stored(odd_sizes(), dtype)
    assert {p.data_ptr() % 64 for p in one.model.parameters()} == {0}
    assert {p.dtype for p in one.model.parameters()} == {dtype}


def test_parameters_lie_in_one_slab_per_layer() -> None:
    one = stored(odd_sizes())
    weights = {name: one.store.weight(name) for name, _ in one.model.named_parameters()}
    slabs = {name: weight.untyped_storage().data_ptr() for name, weight in weights.items()}
    assert slabs["0.weight"] == slabs["0.bias"]
    assert len(set(slabs.values())) == 3
    assert {name: p.data_ptr() for name, p in one.model.named_parameters()} == {
        name: weight.data_ptr() for name, weight in weights.items()
    }
    assert one.store.host_bytes() == {"weights": 2 * (128 + 64) + (64 + 64), "masters": 0}


def test_a_file_of_one_parameter_holds_that_alone() -> None:
    """`torch.save` writes whole storages: adapters are saved without the frozen weights of their layers."""
    one = stored(odd_sizes())
    for name, parameter in one.model.named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
    one.store.release()
    with torch.no_grad():
        one.model.get_parameter("0.weight").fill_(2.0)
    assert (one.store.weight("0.weight") == 2.0).all()


def test_in_fp32_parameters_are_their_own_masters() -> None:
    one = stored(odd_sizes())
    assert one.store.masters.keys() == dict(one.model.named_parameters()).keys()
    assert all(one.store.masters[name] is p for name, p in one.model.named_parameters())
    assert one.store.compute_copy("0.weight") is None


def test_in_bf16_masters_keep_the_values_that_trained_parameters_round() -> None:
    model = odd_sizes()
    model[0].requires_grad_(False)
    original = dict(odd_sizes().named_parameters())
    one = stored(model, torch.bfloat16)

    assert sorted(one.store.masters) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, original[name].bfloat16())
        assert parameter.requires_grad is (name in one.store.masters)
    for name, master in one.store.masters.items():
        assert torch.equal(master, original[name])
        copy = one.store.compute_copy(name)
        assert copy is not None
        assert copy.data_ptr() == one.store.parameters[name].data_ptr()
    assert one.store.host_bytes()["masters"] == 4 * sum(m.numel() for m in one.store.masters.values())


def test_a_transposed_parameter_becomes_contiguous_with_the_same_values() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False))
    values = torch.arange(15.0).view(3, 5)
    model[0].weight = nn.Parameter(values.t())
    one = stored(model)
    assert torch.equal(one.model[0].weight, values.t())
    assert one.model[0].weight.is_contiguous()


def test_a_layers_parameters_are_one_part() -> None:
    one = stored(odd_sizes())
    (piece,) = one.store.parts_of(["1.weight", "1.bias"])

    assert [(name, place.start) for name, place in piece.places.items()] == [("1.weight", 0), ("1.bias", 32)]
    assert piece.memory.numel() == 32 + 16
    assert piece.memory.is_contiguous()
    assert torch.equal(piece.memory[:25], one.model[1].weight.flatten())
    assert torch.equal(piece.memory[32:37], one.model[1].bias)


def test_a_gap_makes_two_parts() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])})
    store = stored(model).store

    assert len(store.parts_of(["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight"])) == 1
    assert len(store.parts_of(["blocks.0.0.weight", "blocks.0.1.weight"])) == 2
    assert store.parts_of([]) == []
    backwards = store.parts_of(["blocks.0.1.weight", "blocks.0.0.bias", "blocks.0.0.weight"])
    assert [list(piece.places) for piece in backwards] == [
        ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight"]
    ]


def test_a_tied_parameter_lies_with_its_first_layer() -> None:
    gpt2 = next(one for one in FAMILIES if one.name == "gpt2")
    one = stored(gpt2.build(0.0))
    assert one.model.lm_head.weight is one.model.transformer.wte.weight
    pieces = one.store.parts_of(["transformer.wte.weight", "transformer.ln_f.weight"])
    assert [name for piece in pieces for name in piece.places] == ["transformer.wte.weight", "transformer.ln_f.weight"]


def test_a_release_unlocks_every_slab_and_parameters_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    one, freed = stored(odd_sizes()), []
    monkeypatch.setattr(one.device, "host_free", freed.append)
    one.store.release()
    assert [slab.data_ptr() for slab in freed] == [layer.weight.data_ptr() for layer in one.model]
    assert_same(one.model, odd_sizes(), bitwise=True)
