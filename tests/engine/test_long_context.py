"""`harmony.tokens`: the last layer and the loss in tiles of tokens, under budgets that do not hold the logits.

The reference is plain PyTorch over whole micro-batches. The last layer's gradient is a sum over tiles, so that weights
agree to 1e-5 relative after three clipped steps, not bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds import HarmonyEngine
from harmony_ds.errors import DoesNotFitError
from tests.engine.drive import config_of, engine_for, seed_of, train_groups
from tests.families import Batch, build_transformer
from tests.oracle import train_plainly

VOCABULARY, LENGTH, ROWS = 4096, 96, 2
LOGITS_BYTES = ROWS * LENGTH * VOCABULARY * 4
TOLERANCE = 1e-5
STEPS, ACCUMULATION = 3, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def llama(**settings: Any) -> nn.Module:
    return build_transformer("LlamaForCausalLM", **{**SIZES, **settings})


def batch(index: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + index)
    words = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": words, "labels": words.masked_fill(torch.rand(words.shape, generator=generator) < 0.2, -100)}


def groups() -> list[list[Batch]]:
    return [[batch(step * ACCUMULATION + place) for place in range(ACCUMULATION)] for step in range(STEPS)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def relative_difference(model: nn.Module, expected: nn.Module) -> float:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def gib(nbytes: float) -> float:
    return nbytes / 2**30


def plainly_trained(model: nn.Module) -> nn.Module:
    expected = copy.deepcopy(model)
    train_plainly(expected, groups(), sgd(expected.parameters()), clip=1.0, seed_of=seed_of)
    return expected


def trained(
    model: nn.Module, look: Callable[[HarmonyEngine], object] | None = None, **harmony: Any
) -> tuple[nn.Module, list[float]]:
    """Train a copy of `model` on the CPU device; return it, and the losses. `look` is given the engine in the end."""
    model = copy.deepcopy(model)
    with engine_for(model, sgd, config_of(ACCUMULATION, clip=1.0, harmony=harmony)) as engine:
        losses = train_groups(engine, groups())
        if look is not None:
            look(engine)
    return model, losses


def test_a_budget_that_does_not_hold_the_logits_trains_as_plain_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()

    def check_bytes(engine: HarmonyEngine) -> None:
        report = engine.memory_report()
        assert report.device_peak_bytes == report.planned_peak_bytes < LOGITS_BYTES

    found, _ = trained(model, check_bytes, device_memory_gib=gib(0.8 * LOGITS_BYTES))

    assert relative_difference(found, plainly_trained(model)) < TOLERANCE
    assert "lm_head and the loss run in tiles of " in caplog.text


def test_tiles_are_off_where_the_logits_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()

    def check_policy(engine: HarmonyEngine) -> None:
        assert engine.plan.policy.tile_tokens == 0

    automatic, losses = trained(model, check_policy, device_memory_gib=gib(20 * LOGITS_BYTES))
    whole, losses_of_whole = trained(model, device_memory_gib=gib(20 * LOGITS_BYTES), tokens="off")

    assert losses == losses_of_whole
    assert all(map(torch.equal, automatic.parameters(), whole.parameters()))
    assert "tiles" not in caplog.text


def test_tiles_that_are_off_do_not_fit() -> None:
    with pytest.raises(DoesNotFitError):
        trained(llama(), device_memory_gib=gib(0.8 * LOGITS_BYTES), tokens="off")


@pytest.mark.parametrize("packs", [{"pack_layers": 1}, {"pack_layers": 2, "stash": "host"}], ids=str)
def test_the_same_tiles_give_the_same_bits_whatever_the_packs(packs: dict[str, Any]) -> None:
    model = llama()
    one, losses = trained(model, tokens=40, pack_layers=5, residency="off")
    other, losses_of_other = trained(model, tokens=40, **packs)

    assert losses == losses_of_other
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_saved_plan_runs_in_the_same_tiles(tmp_path: Any) -> None:
    model, path = llama(), tmp_path / "plan.json"

    def save(engine: HarmonyEngine) -> None:
        path.write_text(engine.plan.to_json())

    one, losses = trained(model, save, device_memory_gib=gib(0.8 * LOGITS_BYTES))
    other, losses_of_other = trained(model, plan=str(path))

    assert losses == losses_of_other
    assert all(map(torch.equal, one.parameters(), other.parameters()))
