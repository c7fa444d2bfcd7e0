"""Models as people have them: frozen, adapted, with parameter groups, skipped layers and unused parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.drive import (
    Groups,
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    means_of,
    plain_model,
    seed_of,
    sgd,
    train_groups,
)
from tests.families import Family
from tests.oracle import assert_same, train_plainly

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 3)
Change = Callable[[nn.Module], nn.Module]


def assert_changed_model_trains_plainly(
    one: Family, change: Change, groups: Groups, make: Any = adamw, pack: int = 1
) -> nn.Module:
    """`change` is done to the plain model and to the engine's; both train alike. Returns the engine's model."""
    plain, model = change(plain_model(one, 0.1)), change(one.build(0.1))
    losses = train_plainly(plain, groups, make(plain.parameters()), clip=0.5, seed_of=seed_of)
    with engine_for(model, make, config_of(len(groups[0]), 0.5, {"pack_layers": pack})) as engine:
        actual = train_groups(engine, groups)
        assert engine.swap_report().ratio == 1.0
    assert_same(model, plain, one.bitwise)
    assert actual == pytest.approx(means_of(losses), rel=0.0 if one.bitwise else 1e-6)
    return model


def freeze(names: tuple[str, ...]) -> Change:
    def change(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))
        return model

    return change


@pytest.mark.parametrize(
    ("frozen", "pack"),
    [
        (("mlp",), 1),
        (("embed_tokens", "layers.0", "layers.1"), 1),
        (("layers.2", "lm_head"), 2),
        (("layers", "embed"), 1),
    ],
    ids=["part of every layer", "most", "late", "all but the head"],
)
def test_frozen_parameters(frozen: tuple[str, ...], pack: int) -> None:
    model = assert_changed_model_trains_plainly(LLAMA, freeze(frozen), GROUPS, pack=pack)
    before = dict(LLAMA.build(0.1).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is any(part in name for part in frozen), name


def test_lora() -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> nn.Module:
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(3)
            changed: nn.Module = peft.get_peft_model(model, settings)
        return changed

    model = assert_changed_model_trains_plainly(LLAMA, adapted, GROUPS)
    before = LLAMA.build(0.1).model.layers[0].mlp.up_proj.weight
    assert torch.equal(model.base_model.model.model.layers[0].mlp.up_proj.weight, before)


def decaying_matrices_only(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5, "lr": 1e-2},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-2},
    ]


def test_parameter_groups_of_an_optimizer_by_name() -> None:
    plain, model = LLAMA.build(0.1), LLAMA.build(0.1)
    reference = torch.optim.AdamW(decaying_matrices_only(plain), fused=True)
    train_plainly(plain, GROUPS, reference, clip=0.5, seed_of=seed_of)
    optimizer = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1.0}}
    groups = decaying_matrices_only(model)
    with engine_for(model, None, config_of(3, 0.5, optimizer=optimizer), model_parameters=groups) as engine:
        assert engine.get_lr() == [1e-2, 3e-2]
        train_groups(engine, GROUPS)
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("name", ["LayerDropNet", "opt", "bart", "whisper"])
def test_layers_skipped_at_random(name: str) -> None:
    one = family(name)
    assert_changed_model_trains_plainly(one, lambda m: m, groups_of(one, 4, 3), adamw if one.bitwise else sgd)


def test_unused_parameters_have_no_state_and_do_not_decay() -> None:
    one = family("UntouchedNet")
    model, before = one.build(0.0), dict(one.build(0.0).named_parameters())
    unused = [n for n in before if "ignored" in n or "unused" in n or n.startswith("blocks.2.")]
    with engine_for(model, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.9), config_of(2, 0.5)) as engine:
        train_groups(engine, groups_of(one, 2, 2))
        engine.finish_updates()
        assert len(engine.optimizer.state) == len(before) - len(unused)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in unused), name


def test_generate_leaves_training_unchanged_and_is_the_models_own() -> None:
    prompt = GROUPS[0][0]["input_ids"][:, :4]
    models = [LLAMA.build(0.1), LLAMA.build(0.1)]
    for model, generates in zip(models, (False, True), strict=True):
        with engine_for(model, adamw, config_of(3, 0.5, {"pack_layers": 1})) as engine:
            for group in GROUPS:
                engine.train_batch(iter(group))
                if generates:
                    engine.eval()
                    words = engine.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
                    expected = copy.deepcopy(model).generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
                    engine.train()
                    assert torch.equal(words, expected)
    assert_same(models[0], models[1], bitwise=True)
