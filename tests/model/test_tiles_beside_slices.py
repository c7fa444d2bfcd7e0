"""The last layer and the loss in tiles of tokens, where layer calls take a few of a micro-batch's rows at a time.

The reference is plain PyTorch over whole micro-batches. Gradients are sums over slices and tiles: after three clipped steps
weights agree to 1e-5 relative.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds.errors import DoesNotFitError
from tests.engine.drive import config_of, engine_for, loop_plainly, loop_with
from tests.families import Batch, build_transformer

pytestmark = pytest.mark.fixed_times

VOCABULARY, LENGTH, ROWS = 2048, 32, 6
TOLERANCE = 1e-5
STEPS, ACCUMULATION = 3, 2
CUT: dict[str, Any] = {"tokens": 40, "micro_batch": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def llama(**settings: Any) -> nn.Module:
    return build_transformer("LlamaForCausalLM", **{**SIZES, **settings})


def batches(rows: int = ROWS, length: int = LENGTH) -> list[Batch]:
    source = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS * ACCUMULATION):
        words = torch.randint(0, VOCABULARY, (rows, length), generator=source)
        labels = words.masked_fill(torch.rand(words.shape, generator=source) < 0.2, -100)
        found.append({"input_ids": words, "labels": labels})
    return found


def ragged() -> list[Batch]:
    shapes = [(6, 32), (4, 20), (5, 27), (6, 32), (3, 9), (6, 31)]
    pairs = zip(batches(), shapes, strict=True)
    return [{key: value[:rows, :length] for key, value in one.items()} for one, (rows, length) in pairs]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def of_the_model(model: Any, one: Batch) -> Tensor:
    loss: Tensor = model(**one).loss
    return loss


def smoothed(model: Any, one: Batch) -> Tensor:
    logits, labels = model(input_ids=one["input_ids"]).logits[:, :-1].float(), one["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def log_probability(model: Any, one: Batch) -> Tensor:
    labels = one["input_ids"][:, 1:, None]
    return model(input_ids=one["input_ids"]).logits[:, :-1].log_softmax(-1).gather(-1, labels).mean((1, 2))


def preference(model: Any, one: Batch) -> Tensor:
    """The first rows are better than the others: DPO without a reference."""
    better, worse = log_probability(model, one).chunk(2)
    return -F.logsigmoid(better - worse).mean()


def preference_of_two_passes(model: Any, one: Batch) -> Tensor:
    other = {key: value.flip(1) for key, value in one.items()}
    return -F.logsigmoid(log_probability(model, one) - log_probability(model, other)).mean()


def of_some_rows_and_hidden_states(model: Any, one: Batch) -> Tensor:
    outputs = model(input_ids=one["input_ids"], output_hidden_states=True)
    loss = F.cross_entropy(outputs.logits[2:, :-1].flatten(0, 1), one["labels"][2:, 1:].flatten())
    return loss + 1e-2 * sum(states.square().mean() for states in outputs.hidden_states)


LOSSES = [of_the_model, smoothed, preference, preference_of_two_passes, of_some_rows_and_hidden_states]


def trained(
    model: nn.Module,
    data: list[Batch],
    loss_of: Callable[[Any, Any], Tensor] = of_the_model,
    rows: int = ROWS,
    **harmony: Any,
) -> tuple[nn.Module, list[float], Any]:
    """Train a copy of `model` on the CPU device; return it, the losses and the plan."""
    model = copy.deepcopy(model)
    config = config_of(ACCUMULATION, clip=1.0, harmony=harmony, train_micro_batch_size_per_gpu=rows)
    with engine_for(model, sgd, config) as engine:
        losses, ratios = loop_with(engine, data, loss_of)
        report, plan = engine.memory_report(), engine.plan
        assert report.device_peak_bytes == report.planned_peak_bytes
        assert ratios[-1] == 1.0
    return model, losses, plan


def assert_trains_as_plain_pytorch(
    model: nn.Module,
    data: list[Batch],
    loss_of: Callable[[Any, Any], Tensor] = of_the_model,
    rows: int = ROWS,
    **harmony: Any,
) -> Any:
    """Return the plan."""
    expected = copy.deepcopy(model)
    losses = loop_plainly(expected, data, ACCUMULATION, loss_of, make=sgd, clip=1.0)
    found, actual, plan = trained(model, data, loss_of, rows, **harmony)
    assert actual == pytest.approx(losses, rel=TOLERANCE)
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max(), name
    return plan


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda one: one.__name__)
def test_a_loss_runs_in_tiles_beside_slices(
    loss_of: Callable[[Any, Any], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    plan = assert_trains_as_plain_pytorch(llama(), batches(), loss_of, **CUT)
    assert (plan.policy.tile_tokens, plan.policy.backward_rows) == (40, 2)
    assert "at once" not in caplog.text


@pytest.mark.parametrize(
    "harmony",
    [{"pack_layers": 1, "residency": "off", "stash": "host"}, {"tokens": {"head": 40, "layers": 48}, "micro_batch": 4}],
    ids=["a pack for each layer", "parts of layers, too"],
)
def test_plans_of_several_kinds_train_as_plain_pytorch(harmony: dict[str, Any]) -> None:
    plan = assert_trains_as_plain_pytorch(llama(tie_word_embeddings=True), batches(), **{**CUT, **harmony})
    assert plan.policy.tile_tokens == 40


def test_micro_batches_of_several_shapes_train_as_plain_pytorch() -> None:
    assert_trains_as_plain_pytorch(llama(), ragged(), **CUT)


def test_the_same_tiles_and_slices_give_the_same_bits_whatever_the_packs() -> None:
    one, losses, _ = trained(llama(), batches(), **CUT, pack_layers=5, residency="off")
    other, losses_of_other, _ = trained(llama(), batches(), **CUT, pack_layers=1, stash="host")
    assert losses == losses_of_other
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_what_fits_neither_in_tiles_nor_in_slices_alone_is_cut_into_both() -> None:
    """Many short rows: layer calls of all of them take more than the budget, and so do the logits."""
    rows, length = 48, 16
    model, data = llama(intermediate_size=1024), batches(rows, length)
    budget = {"device_memory_gib": 0.6 * rows * length * VOCABULARY * 4 / 2**30}
    for alone in ({"tokens": "off"}, {"tokens": 16, "micro_batch": rows}):
        with pytest.raises(DoesNotFitError):
            trained(model, data, rows=rows, **budget, **alone)
    plan = assert_trains_as_plain_pytorch(model, data, rows=rows, **budget)
    assert plan.policy.tile_tokens > 0 and 0 < plan.policy.backward_rows < rows
    assert plan.policy.layer_tile_tokens == 0
