"""Layers that are found in modules, and parameters outside layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harmony_ds import ConfigError, ModelError
from harmony_ds.decomposer import Decomposition, find_layers
from harmony_ds.decomposer.find import Room
from tests.families import FAMILIES, MODULES, WIDTH, Block, Family

EVERY_FAMILY = FAMILIES + MODULES
LAYERS = {
    "gpt2": "transformer.wte transformer.wpe transformer.h.0 transformer.h.1 transformer.h.2 transformer.ln_f lm_head",
    "bert": "bert.embeddings bert.encoder.layer.0 bert.encoder.layer.1 bert.encoder.layer.2 cls.predictions",
    "t5": (
        "shared encoder.embed_tokens encoder.block.0 encoder.block.1 encoder.final_layer_norm "
        "decoder.embed_tokens decoder.block.0 decoder.block.1 decoder.final_layer_norm lm_head"
    ),
    "clip": (
        "text_model.embeddings.token_embedding text_model.embeddings.position_embedding text_model.encoder.layers.0 "
        "text_model.encoder.layers.1 text_model.final_layer_norm vision_model.embeddings vision_model.pre_layrnorm "
        "vision_model.encoder.layers.0 vision_model.encoder.layers.1 vision_model.post_layernorm visual_projection "
        "text_projection"
    ),
    "resnet": (
        "resnet.embedder.embedder.convolution resnet.embedder.embedder.normalization resnet.encoder.stages.0 "
        "resnet.encoder.stages.1 classifier.1"
    ),
    "BareParameterNet": "blocks.0 blocks.1 blocks.2",
    "SkipNet": "blocks.0 blocks.1 blocks.2 blocks.3 blocks.4 head",
    "SharedDepthNet": "blocks.0 head",
    "BatchNormNet": "blocks.0 blocks.1 blocks.2 head",
    "LayerDropNet": "blocks.0 blocks.1 blocks.2 blocks.3 head",
    "TwoPassNet": "encoder.blocks.0 encoder.blocks.1 encoder.blocks.2",
    "UntouchedNet": "blocks.0 blocks.1 blocks.2 blocks.3 unused_head",
    "OutsideParameterNet": "embed blocks.0 blocks.1 blocks.2",
    "InPlaceNet": "blocks.0 blocks.1 blocks.2 head",
}
RESIDENT = {
    "clip": ("logit_scale",),
    "BareParameterNet": ("scale", "shift"),
    "TwoPassNet": ("temperature",),
    "UntouchedNet": ("unused_scale",),
}


def family(name: str) -> Family:
    return next(one for one in EVERY_FAMILY if one.name == name)


def names(decomposition: Decomposition) -> str:
    return " ".join(layer.name for layer in decomposition.layers)


def test_a_layer_with_adapters_beside_it_is_one_layer() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["wte", "lm_head"])
    found = find_layers(peft.inject_adapter_in_model(settings, family("gpt2").build(0.0)))
    assert names(found) == LAYERS["gpt2"]
    assert [name.rpartition(".")[0] for name in found.layers[-1].parameters if "lora" in name] == [
        "lm_head.lora_A.default",
        "lm_head.lora_B.default",
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_the_blocks_and_every_other_owner_of_parameters(name: str) -> None:
    found = find_layers(family(name).build(0.0))

    assert names(found) == LAYERS[name]
    assert found.unlayered == RESIDENT.get(name, ())


@pytest.mark.parametrize("one", EVERY_FAMILY, ids=lambda one: one.name)
def test_layers_and_resident_set_cover_every_parameter(one: Family) -> None:
    model = one.build(0.0)
    found = find_layers(model)

    in_layers = {name for layer in found.layers for name in layer.parameters}
    assert in_layers | set(found.unlayered) == {name for name, _ in model.named_parameters()}
    assert not in_layers & set(found.unlayered)
    for place, layer in enumerate(found.layers):
        assert layer.index == place
        assert layer.module is model.get_submodule(layer.name)
        assert len(set(layer.parameters)) == len(layer.parameters)
        inside = set(layer.module.modules()) - {layer.module}
        assert not [inner.name for inner in found.layers if inner.module in inside]


def test_a_tied_parameter_has_the_first_name_in_every_layer_that_holds_it() -> None:
    found = find_layers(family("gpt2").build(0.0))
    parameters = {layer.name: layer.parameters for layer in found.layers}

    assert parameters["transformer.wte"] == parameters["lm_head"] == ("transformer.wte.weight",)
    assert "lm_head.weight" not in found.canonical.values()


def test_parameters_tied_inside_one_layer_are_listed_once() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    block[1].weight = block[0].weight
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    (layer,) = find_layers(model).layers

    assert layer.parameters == ("blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.bias")


def test_a_model_that_is_one_layer_is_named_by_the_empty_string() -> None:
    found = find_layers(nn.Linear(2, 2))

    assert [(layer.name, layer.parameters) for layer in found.layers] == [("", ("weight", "bias"))]


class Embeddings(nn.Module):
    """What a BERT begins with: embeddings, a norm of their sum, and what a test adds."""

    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.words, self.places, self.dropout = nn.Embedding(9, 2), nn.Embedding(4, 2), nn.Dropout(0.1)
        self.norm = nn.LayerNorm(2)
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the norm of the sum of both."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.norm(self.words(tokens) + self.places(places)))


class CalledByParts(Embeddings):
    """Embeddings without a forward: another module calls what is inside."""

    forward = nn.Module.forward


PARTS = "embeddings.words embeddings.places embeddings.norm"
TAKEN = 2 * (9 * 2 + 4 * 2 + 2 + 2) * 8
"""Bytes of a device of which weights and gradients of `Embeddings` take half."""


@pytest.mark.parametrize(
    ("embeddings", "patterns", "fits_bytes", "expected"),
    [
        (Embeddings(), (), None, "embeddings"),
        (Embeddings(), (), TAKEN, "embeddings"),
        (Embeddings(), (), TAKEN - 1, PARTS),
        (Embeddings(), ("embeddings.words",), None, PARTS),
        (Embeddings(head=nn.Linear(2, 2)), (), None, f"{PARTS} embeddings.head"),
        (CalledByParts(), (), None, PARTS),
    ],
    ids=("whole", "fits", "too large", "a part is named", "a part is neither", "no forward"),
)
def test_embeddings_and_their_norm_are_one_layer(
    embeddings: nn.Module, patterns: tuple[str, ...], fits_bytes: int | None, expected: str
) -> None:
    model = nn.ModuleDict({"embeddings": embeddings, "blocks": nn.ModuleList([Block(0.0)])})
    room = None if fits_bytes is None else Room(fits_bytes, weight_bytes=4, gradient_bytes=4)
    found = names(find_layers(model, patterns, room))
    assert found.replace(f" {parts_of(0)}", "").replace(" blocks.0", "") == expected


SHARED = Block(0.0)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleList([nn.ModuleList([Block(0.0), Block(0.0)]), nn.ModuleList([Block(0.0)])]), "0.0 0.1 1.0"),
        (nn.Sequential(Block(0.0), Block(0.0)), "0 1"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "0 2"),
        (nn.ModuleDict({"blocks": nn.ModuleList([SHARED, Block(0.0), SHARED])}), "blocks.0 blocks.1"),
        (nn.ModuleDict({"embed": SHARED.widen, "head": nn.Linear(4, 3), "again": SHARED.widen}), "embed head"),
    ],
    ids=("nested lists", "a Sequential", "no parameters", "a block in two places", "a module in two places"),
)
def test_elements_of_lists_are_layers_once_where_they_have_parameters(model: nn.Module, expected: str) -> None:
    assert names(find_layers(model)) == expected


def test_parameters_of_lists_are_resident() -> None:
    model = nn.Module()
    model.scales = nn.ParameterList([torch.ones(2), torch.ones(3)])
    model.head = nn.Linear(2, 2)
    found = find_layers(model)

    assert found.unlayered == ("scales.0", "scales.1")
    assert names(found) == "head"


def test_frozen_parameters_belong_to_their_layers_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)

    assert [layer.parameters for layer in find_layers(model).layers] == [("0.weight", "0.bias"), ("1.weight", "1.bias")]


def parts_of(block: int) -> str:
    return " ".join(f"blocks.{block}.{part}" for part in ("norm", "widen", "narrow"))


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("gpt2", ("transformer",), "transformer lm_head"),
        ("InPlaceNet", ("blocks.*",), "blocks.0 blocks.1 blocks.2 head"),  # of nested matches the outer one counts
        ("InPlaceNet", ("blocks.1",), f"{parts_of(0)} blocks.1 {parts_of(2)} head"),
        ("InPlaceNet", ("blocks.0", "blocks.1", "blocks.2.widen"), f"blocks.0 blocks.1 {parts_of(2)} head"),
    ],
)
def test_patterns_replace_the_repeated_blocks(name: str, patterns: tuple[str, ...], expected: str) -> None:
    assert names(find_layers(family(name).build(0.0), patterns)) == expected


def test_a_pattern_may_match_inside_blocks_but_no_list() -> None:
    model = family("gpt2").build(0.0)

    assert "transformer.h.1.mlp" in names(find_layers(model, ("transformer.h.*.mlp",))).split()
    with pytest.raises(ConfigError, match=r"transformer.h"):
        find_layers(model, ("transformer.h",))


class Attention(nn.Module):
    """A layer that holds a list, as every attention of diffusers does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.to_out = nn.Linear(width, width), nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])


class UpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.attentions = nn.ModuleList([Attention(width) for _ in range(2)])
        self.upsampler = nn.Linear(width, width)


class CoarseNet(nn.Module):
    """Blocks of which one holds nearly all parameters, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.up_blocks = nn.ModuleList([UpBlock(16), UpBlock(2)])


INSIDE_UP_BLOCK_0 = (
    "up_blocks.0.resnets.0 up_blocks.0.resnets.1 up_blocks.0.attentions.0 up_blocks.0.attentions.1 "
    "up_blocks.0.upsampler"
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("up_blocks.*", "up_blocks.0 up_blocks.1"),
        ("up_blocks.[0-9]", "up_blocks.0 up_blocks.1"),
        ("*.attentions.*", f"{INSIDE_UP_BLOCK_0} {INSIDE_UP_BLOCK_0.replace('up_blocks.0', 'up_blocks.1')}"),
        ("up_blocks*", "up_blocks.0 up_blocks.1"),  # the list itself, too: its elements are meant
    ],
)
def test_a_pattern_may_match_lists_inside_a_layer(pattern: str, expected: str) -> None:
    assert names(find_layers(CoarseNet(), (pattern,))) == expected


def test_a_list_of_which_a_pattern_matches_no_element_is_an_error_that_names_them() -> None:
    with pytest.raises(ConfigError, match=r'matches up_blocks.0.resnets.*such as "up_blocks.0.resnets.\*"'):
        find_layers(CoarseNet(), ("up_blocks.?.resnets",))


@pytest.mark.parametrize(
    ("frozen", "fits_bytes", "expected"),
    [
        (False, None, "up_blocks.0 up_blocks.1"),
        (False, 2 * 7 * 272 * 8, "up_blocks.0 up_blocks.1"),
        (False, 2 * 7 * 272 * 8 - 1, f"{INSIDE_UP_BLOCK_0} up_blocks.1"),
        (True, 2 * 7 * 272 * 4, "up_blocks.0 up_blocks.1"),  # a frozen one has no gradients
        (False, 2 * 272 * 8, "up_blocks.0.resnets.0 up_blocks.0.resnets.1 up_blocks.0.attentions.0.q "
            "up_blocks.0.attentions.0.to_out.0 up_blocks.0.attentions.1.q up_blocks.0.attentions.1.to_out.0 "
            "up_blocks.0.upsampler up_blocks.1"),
    ],
)  # fmt: skip
def test_a_block_that_takes_more_than_half_of_the_device_is_cut_finer(
    frozen: bool, fits_bytes: int | None, expected: str
) -> None:
    model = CoarseNet().requires_grad_(not frozen)
    room = None if fits_bytes is None else Room(fits_bytes, weight_bytes=4, gradient_bytes=4)
    assert names(find_layers(model, room=room)) == expected


def test_a_block_without_lists_stays_whole_whatever_the_device_holds() -> None:
    model = nn.ModuleList([Block(0.0), Block(0.0)])
    assert names(find_layers(model, room=Room(1, weight_bytes=4, gradient_bytes=4))) == "0 1"


def test_a_pattern_that_matches_nothing_is_an_error_that_names_it() -> None:
    with pytest.raises(
        ConfigError, match=r'harmony.layers: the pattern "model.layers.\*" matches no module of InPlaceNet'
    ):
        find_layers(family("InPlaceNet").build(0.0), ("blocks.*", "model.layers.*"))


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(ModelError, match="ReLU has no parameters"):
        find_layers(nn.ReLU())


def test_decomposing_changes_nothing() -> None:
    model = nn.Sequential(Block(0.0), nn.Linear(WIDTH, WIDTH))
    before = [(name, id(p)) for name, p in model.named_parameters()]
    find_layers(model)

    assert [(name, id(p)) for name, p in model.named_parameters()] == before
    assert all("forward" not in module.__dict__ for module in model.modules())
