"""Weights from safetensors files for models from the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import harmony_ds
from harmony_ds import CheckpointError, ModelError
from harmony_ds.offload.host_memory import MappedFiles
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, means_of, seed_of, train_groups
from tests.families import FAMILIES, MODULES, Family, build_seeded
from tests.oracle import assert_same, train_plainly

RENAMED = ("gpt_neox", "vit", "mixtral", "qwen3_moe", "deepseek_v3")
"""Families whose files have other names than their parameters."""
LOADED = [one for one in FAMILIES + MODULES if one.name not in RENAMED]


class Net(nn.Module):
    """Embedding and head tied, a frozen layer, batch statistics, and a table that no file holds."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.scale = Scale()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)


class Scale(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(5.0, device=self.table.device))


def meta(one: type[nn.Module]) -> Any:
    with torch.device("meta"):
        return one()


def meta_like(plain: nn.Module) -> nn.Module:
    """Return the same model on the meta device, ties and all."""
    if not isinstance(plain, PreTrainedModel):
        return plain.to("meta")
    with torch.device("meta"):
        return type(plain)(plain.config).train()


def saved(model: nn.Module, folder: Path) -> Path:
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(folder)
    else:
        save_model(model, str(folder / "model.safetensors"))
    return folder


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@pytest.mark.parametrize("one", LOADED, ids=lambda one: one.name)
def test_a_meta_model_becomes_what_was_saved(one: Family, tmp_path: Path) -> None:
    saved(one.build(0.0), tmp_path)
    model = meta_like(one.build(0.0))
    before = {name: (id(t), t.requires_grad) for name, t in tensors_of(model)}
    harmony_ds.load_weights(model, tmp_path)

    expected = dict(tensors_of(one.build(0.0)))
    assert {name: (id(t), t.requires_grad) for name, t in tensors_of(model)} == before
    assert expected.keys() == before.keys()
    for name, tensor in tensors_of(model):
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype


@pytest.mark.parametrize("name", RENAMED)
def test_files_with_other_names_are_refused_for_from_pretrained(name: str, tmp_path: Path) -> None:
    saved(family(name).build(0.0), tmp_path)

    with pytest.raises(CheckpointError, match=r"lacks .* and has .* from_pretrained"):
        harmony_ds.load_weights(meta_like(family(name).build(0.0)), tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_training_is_plain_training_of_the_model_from_pretrained(name: str, tmp_path: Path) -> None:
    one = family(name)
    saved(one.build(0.0), tmp_path)
    groups = groups_of(one, 2, 2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    losses = means_of(train_plainly(plain, groups, adamw(plain.parameters()), clip=1.0, seed_of=seed_of))
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    loaded = meta_like(one.build(0.0))
    harmony_ds.load_weights(loaded, tmp_path)

    assert one.bitwise
    for model in (mapped, loaded):
        with engine_for(model, adamw, config_of(2, clip=1.0)) as engine:
            assert train_groups(engine, groups) == losses
        assert_same(model, plain, bitwise=True)


def test_parameters_are_mapped_until_an_engine_takes_them_and_training_leaves_the_file(tmp_path: Path) -> None:
    one = family("llama")
    saved(one.build(0.0), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = meta_like(one.build(0.0))
    harmony_ds.load_weights(model, tmp_path)
    mapped = MappedFiles()
    assert all(mapped.holds(p) for p in model.parameters())

    with engine_for(model, adamw, config_of(1)) as engine:
        assert not any(MappedFiles().holds(p) for p in model.parameters())
        train_groups(engine, groups_of(one, 1, 1))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    plain = build_seeded(Net)
    whole = {name: t.clone() for name, t in plain.state_dict().items() if name != "head.weight"}
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = meta(Net)
        harmony_ds.load_weights(model, path)
        assert_same(model, plain, bitwise=True)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.scale.table, torch.arange(5.0))
        assert not model.blocks[1].weight.requires_grad


def changed(tmp_path: Path, change: dict[str, Tensor | None]) -> Path:
    """Write a file with the weights of a Net, some of them replaced, added, or (None) left out."""
    tensors: dict[str, Tensor | None] = {**build_seeded(Net).state_dict(), **change}
    file = tmp_path / "changed.safetensors"
    save_file({name: t.clone() for name, t in tensors.items() if t is not None}, file)
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.bias": None}, r"changed\.safetensors lacks norm\.bias\. Weights of"),
        ({"extra": torch.ones(1)}, r"has extra, which the model has not"),
        ({"scale.table": torch.ones(5)}, r"has scale\.table, which the model has not"),
        ({"embed.weight": None, "head.weight": None}, r"lacks embed\.weight\."),
        ({"embed.weight": torch.ones(7, 4)}, r"embed\.weight and head\.weight are one tensor .* different values"),
        (
            {"blocks.2.bias": torch.ones(5)},
            r"bias is torch\.float32 of shape \(5,\) in the file, and torch\.float32 of shape \(4,\) in the model",
        ),
        ({"blocks.2.bias": torch.ones(4).int()}, r"2\.bias is torch\.int32 of .* in the file, and torch\.float32 of"),
    ],
)
def test_files_that_are_not_the_models_are_refused(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    file = changed(tmp_path, change)

    with pytest.raises(CheckpointError, match=message):
        harmony_ds.load_weights(meta(Net), file)


def test_either_name_of_a_tied_parameter_is_enough_and_the_dtype_is_the_files(tmp_path: Path) -> None:
    half = {name: t.bfloat16() for name, t in build_seeded(Net).state_dict().items() if t.is_floating_point()}
    model = meta(Net)
    harmony_ds.load_weights(model, changed(tmp_path, half))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name in ("embed.weight", "head.weight"):
        model = meta(Net)
        harmony_ds.load_weights(model, changed(tmp_path, {name: None}))
        assert_same(model, build_seeded(Net), bitwise=True)


def test_a_model_that_an_engine_holds_is_refused(tmp_path: Path) -> None:
    model = family("llama").build(0.0)
    saved(model, tmp_path)
    with engine_for(model, adamw, config_of(1)), pytest.raises(ModelError, match="belongs to an engine"):
        harmony_ds.load_weights(model, tmp_path)
    harmony_ds.load_weights(model, tmp_path)
    assert_same(model, family("llama").build(0.0), bitwise=True)


def test_paths_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nor any other safetensors file"):
        harmony_ds.load_weights(meta(Net), tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        harmony_ds.load_weights(meta(Net), tmp_path / "missing.safetensors")
    file = changed(tmp_path, {})
    with pytest.raises(CheckpointError, match=r"name one of changed\.safetensors"):
        harmony_ds.load_weights(meta(Net), tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        harmony_ds.load_weights(meta(Net), file)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        harmony_ds.load_weights(meta(Net), tmp_path)


class Positioned(nn.Linear):
    positions: Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("positions", torch.arange(3), persistent=False)


class Forgetful(Scale):
    def reset_parameters(self) -> None:
        """Compute nothing."""


@pytest.mark.parametrize(("kind", "name"), [(Positioned, "positions"), (Forgetful, "table")])
def test_a_buffer_that_is_not_computed_is_named(kind: type[nn.Module], name: str, tmp_path: Path) -> None:
    saved(Positioned() if kind is Positioned else nn.Module(), tmp_path)
    with pytest.raises(ModelError, match=rf"^{name} \({kind.__name__}\): on the meta device, not in the files"):
        harmony_ds.load_weights(meta(kind), tmp_path)
