"""`harmony.tokens`: the last layer and the loss in tiles of tokens, under budgets that do not hold the logits.

The reference is plain PyTorch over whole micro-batches. The last layer's gradient is a sum over tiles, so that weights
agree to 1e-5 relative after three clipped steps, not bit by bit.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.errors import BatchError, DoesNotFitError
from harmony_ds.model.token_expression import HeadCall
from harmony_ds.scheduler.swaps import swaps_of
from tests.engine.drive import (
    config_of,
    engine_for,
    family,
    groups_of,
    loop_plainly,
    loop_with,
    seed_of,
    train_groups,
)
from tests.engine.drive import sgd as small_sgd
from tests.families import Batch, build_transformer
from tests.inside import planner_of
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


def test_tiles_and_boundaries_on_the_host_train_where_neither_alone_fits() -> None:
    """Many micro-batches: what waits between packs would take the budget, and so would the logits of one of them."""
    model, count = llama(hidden_size=96), 36
    head_bytes, waiting_bytes = VOCABULARY * 96 * 4, 2 * count * ROWS * LENGTH * 96 * 4
    batches = [batch(index) for index in range(count)]
    copies = [copy.deepcopy(model) for _ in range(2)]
    # The first part is for the head's weights, their gradients and those of a tile. The rest is half of what waits.
    harmony = {"pack_layers": 1, "device_memory_gib": gib(3 * head_bytes + waiting_bytes // 2)}
    with pytest.raises(DoesNotFitError):
        trained(model, **harmony, tokens="off")
    with engine_for(copies[0], sgd, config_of(count, clip=1.0, harmony=harmony)) as engine:
        train_groups(engine, [batches, batches])
        report, policy, planned = engine.memory_report(), engine.plan.policy, engine.plan.peak_bytes
        costs, _ = planner_of(engine).costs
        swaps, moved = engine.swap_report(), swaps_of(engine.plan, costs)
    train_plainly(copies[1], [batches, batches], sgd(copies[1].parameters()), clip=1.0, seed_of=seed_of)

    assert policy.tile_tokens > 0
    assert policy.crossing_on_host
    assert report.device_peak_bytes == report.planned_peak_bytes == planned
    assert swaps.device_to_host["activations"] == moved.stash_out + moved.crossing_out
    assert relative_difference(*copies) < TOLERANCE


def test_tiles_are_off_where_the_logits_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()

    def check_policy(engine: HarmonyEngine) -> None:
        assert engine.plan.policy.tile_tokens == 0

    automatic, losses = trained(model, check_policy, device_memory_gib=gib(20 * LOGITS_BYTES))
    whole, losses_of_whole = trained(model, device_memory_gib=gib(20 * LOGITS_BYTES), tokens="off")

    assert losses == losses_of_whole
    assert all(map(torch.equal, automatic.parameters(), whole.parameters()))
    assert "tiles" not in caplog.text


@pytest.mark.parametrize("packs", [{"pack_layers": 1}, {"pack_layers": 2, "stash": "host"}], ids=str)
def test_the_same_tiles_give_the_same_bits_whatever_the_packs(packs: dict[str, Any]) -> None:
    model = llama()
    one, losses = trained(model, tokens=40, pack_layers=5, residency="off")
    other, losses_of_other = trained(model, tokens=40, **packs)

    assert losses == losses_of_other
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_run_that_goes_on_with_more_memory_keeps_its_tiles(tmp_path: Any) -> None:
    first, second, both = groups()
    model = llama()
    tight, ample = gib(0.8 * LOGITS_BYTES), gib(20 * LOGITS_BYTES)
    with engine_for(copy.deepcopy(model), sgd, config_of(ACCUMULATION, harmony={"device_memory_gib": tight})) as engine:
        train_groups(engine, [first, second])
        engine.save_checkpoint(str(tmp_path))
        expected = train_groups(engine, [both])
        tile_tokens = engine.plan.policy.tile_tokens
    with engine_for(copy.deepcopy(model), sgd, config_of(ACCUMULATION, harmony={"device_memory_gib": ample})) as engine:
        engine.load_checkpoint(str(tmp_path))

        assert train_groups(engine, [both]) == expected
        assert engine.plan.policy.tile_tokens == tile_tokens > 0


def test_longer_rows_that_come_later_are_cut() -> None:
    short = [{key: value[:, :8] for key, value in batch(index).items()} for index in range(ACCUMULATION)]
    model = llama()
    expected = copy.deepcopy(model)
    several = [short, *groups()]
    train_plainly(expected, several, sgd(expected.parameters()), clip=1.0, seed_of=seed_of)
    block = {"device_memory_gib": gib(0.8 * LOGITS_BYTES)}
    with engine_for(model, sgd, config_of(ACCUMULATION, clip=1.0, harmony=block)) as engine:
        train_groups(engine, several[:1])
        assert engine.plan.policy.tile_tokens == 0
        train_groups(engine, several[1:])
        assert engine.plan.policy.tile_tokens > 0

    assert relative_difference(model, expected) < TOLERANCE


# ---- a loop's own loss of the logits


def own_cross_entropy(model: Any, one: Batch) -> Tensor:
    outputs = model(input_ids=one["input_ids"])
    logits, labels = outputs.logits[:, :-1].float(), one["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def preference(model: Any, one: Batch) -> Tensor:
    """The first row is better than the second: DPO without a reference."""
    labels = one["input_ids"][:, 1:]
    chosen = torch.log_softmax(model(input_ids=one["input_ids"]).logits[:, :-1], -1).gather(-1, labels[..., None])
    better, worse = chosen.squeeze(-1).mean(-1)
    return -nn.functional.logsigmoid(better - worse)


def distillation(model: Any, one: Batch) -> Tensor:
    teacher = torch.randn(ROWS, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(4)).softmax(-1)
    student = nn.functional.log_softmax(model(input_ids=one["input_ids"]).logits / 3.0, dim=-1)
    return nn.functional.kl_div(student, teacher, reduction="batchmean") / LENGTH


def of_the_models_own_and_more(model: Any, one: Batch) -> Tensor:
    outputs = model(**one)
    loss: Tensor = outputs.loss + 1e-2 * outputs.logits.logsumexp(-1).pow(2).mean()
    return loss


LOSSES = [own_cross_entropy, preference, distillation, of_the_models_own_and_more]


@pytest.mark.parametrize("by_hand", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda one: one.__name__)
def test_losses_of_a_loops_own_run_in_tiles(
    loss_of: Callable[[Any, Any], Tensor], by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches = llama(), [batch(index) for index in range(2 * ACCUMULATION)]
    expected = copy.deepcopy(model)
    losses = loop_plainly(expected, batches, ACCUMULATION, loss_of)

    with engine_for(model, small_sgd, config_of(ACCUMULATION, harmony={"tokens": 40})) as engine:
        found, ratios = loop_with(engine, batches, loss_of, by_hand)
        assert engine.plan.policy.tile_tokens == 40

    assert found == pytest.approx(losses, rel=1e-5)
    assert relative_difference(model, expected) < TOLERANCE
    assert max(ratios) == 1.0
    assert "at once" not in caplog.text


def log_probability(model: Any, one: Batch) -> Tensor:
    labels = one["input_ids"][:, 1:, None]
    return model(input_ids=one["input_ids"]).logits[:, :-1].log_softmax(-1).gather(-1, labels).mean((1, 2))


def better_than_another(model: Any, both: tuple[Batch, Batch]) -> Tensor:
    better, worse = (log_probability(model, one) for one in both)
    return -nn.functional.logsigmoid(better - worse).mean()


def test_a_loss_of_two_forward_passes_runs_in_tiles() -> None:
    model, both = llama(), [(batch(2 * index), batch(2 * index + 1)) for index in range(4)]
    expected = copy.deepcopy(model)
    losses = loop_plainly(expected, both, ACCUMULATION, better_than_another)

    with engine_for(model, small_sgd, config_of(ACCUMULATION, harmony={"tokens": 24})) as engine:
        found, _ = loop_with(engine, both, better_than_another)
        report = engine.memory_report()

    assert found == pytest.approx(losses, rel=1e-5)
    assert relative_difference(model, expected) < TOLERANCE
    assert report.device_peak_bytes == report.planned_peak_bytes < 3 * LOGITS_BYTES


def test_what_a_program_keeps_of_the_logits_is_there_after_the_step() -> None:
    model, one = llama(), batch(0)
    with torch.no_grad():
        expected = model(**one).logits
    with engine_for(model, sgd, config_of(1, harmony={"tokens": 40})) as engine:
        outputs = engine(**one)
        hits = (outputs.logits.argmax(-1) == one["labels"]).sum()
        engine.backward(outputs.loss)
        engine.step()

        assert hits.item() == (expected.argmax(-1) == one["labels"]).sum().item()
        torch.testing.assert_close(outputs.logits.cpu(), expected, rtol=1e-4, atol=1e-5)


# ---- forward passes that run by themselves, since the program reads what they give


@pytest.mark.parametrize("by_hand", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda one: one.__name__)
def test_losses_that_are_read_before_the_step_run_in_tiles(
    loss_of: Callable[[Any, Any], Tensor], by_hand: bool
) -> None:
    model, batches = llama(), [batch(index) for index in range(2 * ACCUMULATION)]
    expected = copy.deepcopy(model)
    losses = loop_plainly(expected, batches, ACCUMULATION, loss_of)

    def read(engine: Any, one: Batch) -> Tensor:
        loss = loss_of(engine, one)
        assert loss.item() > 0
        return loss

    block = {"tokens": 40}
    with engine_for(model, small_sgd, config_of(ACCUMULATION, harmony=block)) as engine, pytest.warns(RuntimeWarning):
        found, _ = loop_with(engine, batches, read, by_hand)

    assert found == pytest.approx(losses, rel=1e-5)
    assert relative_difference(model, expected) < TOLERANCE


class TwoLosses(nn.Module):
    """Two losses of its logits, each times a number that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        scores, temperature = self.head(hidden), self.log_temperature.exp()
        loss = F.cross_entropy((scores * temperature).flatten(0, 1), words.flatten())
        return loss + (scores * temperature).logsumexp(-1).mean()


@pytest.mark.parametrize("is_read", [False, True], ids=["not read", "read"])
@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_two_losses_of_one_head_propagate_back_through_a_tensor_that_both_use(is_read: bool) -> None:
    torch.manual_seed(0)
    model = TwoLosses()
    expected = copy.deepcopy(model)
    batches = [torch.arange(16)[None] + 16 * index for index in range(2 * ACCUMULATION)]
    loop_plainly(expected, batches, ACCUMULATION, lambda call, words: call(words))

    def read(engine: Any, words: Tensor) -> Tensor:
        loss: Tensor = engine(words)
        assert not is_read or loss.item() > 0
        return loss

    with engine_for(model, small_sgd, config_of(ACCUMULATION, harmony={"tokens": 4})) as engine:
        loop_with(engine, batches, read, by_hand=False)

    assert relative_difference(model, expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_logits_can_be_read_until_the_weights_change() -> None:
    model, (one, other) = llama(), (batch(0), batch(1))
    with torch.no_grad():
        expected = model(**one).logits
    with engine_for(model, sgd, config_of(2, harmony={"tokens": 40})) as engine:
        outputs = engine(**one)
        hits = (outputs.logits.argmax(-1) == one["labels"]).sum()
        assert outputs.loss.item() > 0
        assert hits.item() == (expected.argmax(-1) == one["labels"]).sum().item()
        torch.testing.assert_close(outputs.logits.detach().cpu(), expected)
        engine.backward(outputs.loss)
        engine.step()
        engine.backward(engine(**other).loss)
        engine.step()
        assert engine.was_step_applied()

        later = engine(**other)
        assert later.loss.item() > 0
        engine.backward(later.loss)
        engine.step()
        engine.backward(engine(**one).loss)
        engine.step()
        with pytest.raises(BatchError, match="outputs are not known any more"):
            later.logits.sum().item()


class Branching(nn.Module):
    """Words, layers of which one is for some data alone, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layer, self.another, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.words(ids)))
        if ids[0, 0] == 0:
            hidden = self.another(hidden)
        return self.head(torch.tanh(self.last(hidden)))


def words_of(index: int, first: int) -> Batch:
    one = batch(index)
    one["input_ids"][0, 0] = first
    return {"ids": one["input_ids"], "labels": one["labels"]}


def of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_forward_passes_whose_outputs_the_program_has_let_go_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an evaluation without `torch.no_grad()`, and of a loop that skips micro-batches with a large loss."""
    heads: list[weakref.ref[HeadCall]] = []
    own = HeadCall.__init__

    def noted(self: HeadCall, *arguments: Any) -> None:
        own(self, *arguments)
        heads.append(weakref.ref(self))

    with engine_for(llama(), small_sgd, config_of(ACCUMULATION, harmony={"tokens": 40})) as engine:
        train_groups(engine, groups()[:1])
        monkeypatch.setattr(HeadCall, "__init__", noted)
        gc.disable()  # nothing waits for a collection
        try:
            for index in range(3):
                assert engine(**batch(index)).loss.item() > 0
        finally:
            gc.enable()
        assert [head() is not None for head in heads] == [False, False, True]


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_logits_that_are_kept_keep_their_forward_pass() -> None:
    model, one = llama(), batch(0)
    expected = copy.deepcopy(model)
    with engine_for(model, small_sgd, config_of(1, harmony={"tokens": 40})) as engine:
        logits = engine(input_ids=one["input_ids"]).logits
        logits.argmax(-1).tolist()
        shifted = logits[:, :-1].float()
        del logits
        engine(input_ids=batch(1)["input_ids"]).logits.argmax(-1).tolist()  # what is out of reach is forgotten now
        engine.backward(nn.functional.cross_entropy(shifted.flatten(0, 1), one["input_ids"][:, 1:].flatten()))
        engine.step()
    loop_plainly(expected, [{**one, "labels": one["input_ids"]}], 1, own_cross_entropy)

    assert relative_difference(model, expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_logits_that_were_read_before_a_new_plan_are_propagated_back_from() -> None:
    torch.manual_seed(0)
    model, (one, other) = Branching(), (words_of(0, first=1), words_of(1, first=0))
    expected = copy.deepcopy(model)
    loop_plainly(expected, [one, other], 2, lambda made, two: of_logits(made(two["ids"]), two["labels"]), small_sgd)

    with engine_for(model, small_sgd, config_of(2, harmony={"tokens": 40, "pack_layers": 1})) as engine:
        logits = engine(one["ids"])
        logits.argmax(-1).sum().item()
        calls = len(engine.plan.calls)
        of_others = of_logits(engine(other["ids"]), other["labels"])
        of_others.item()  # another layer is called: measured and planned anew
        assert len(engine.plan.calls) > calls
        for loss in (of_logits(logits, one["labels"]), of_others):
            engine.backward(loss)
            engine.step()

    assert relative_difference(model, expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_losses_that_are_read_are_of_weights_that_stay_on_the_device() -> None:
    torch.manual_seed(0)
    model, batches = Branching(), [words_of(index, first=0) for index in range(4)]
    expected = copy.deepcopy(model)
    losses = loop_plainly(expected, batches, 1, lambda made, one: of_logits(made(one["ids"]), one["labels"]), sgd)

    block = {"tokens": 40, "pack_layers": 1, "residency": 10}
    with engine_for(model, sgd, config_of(1, harmony=block)) as engine:
        found = []
        for one in batches:
            logits = engine(one["ids"])
            logits.argmax(-1).sum().item()  # forward runs, and the logits are computed again for the loss
            loss = of_logits(logits, one["labels"])
            found.append(loss.item())
            engine.backward(loss)
            engine.step()
        assert engine.plan.policy.resident

    assert found == pytest.approx(losses, rel=1e-6)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_gradients_that_are_read_before_the_step_are_there() -> None:
    model, one = llama(), batch(0)
    expected = copy.deepcopy(model)
    expected(**one).loss.backward()
    with engine_for(model, sgd, config_of(1, harmony={"tokens": 40})) as engine:
        outputs = engine(**one)
        assert outputs.loss.item() > 0
        engine.backward(outputs.loss)
        for (name, parameter), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other[1].grad, rtol=1e-4, atol=1e-6, msg=name)
        engine.step()


def test_eval_batch_runs_in_tiles(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    with torch.no_grad():
        expected = torch.stack([model(**batch(index)).loss for index in range(ACCUMULATION)]).mean()
    with engine_for(
        model, lambda ps: torch.optim.SGD(ps, lr=0.0), config_of(ACCUMULATION, harmony={"tokens": 40})
    ) as engine:
        train_groups(engine, groups()[:1])
        loss = engine.eval_batch(iter([batch(index) for index in range(ACCUMULATION)]))

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


# ---- models


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "bert", "t5", "whisper", "mixtral", "deepseek_v3"])
def test_heads_of_families_are_found(name: str) -> None:
    one = family(name)
    model = one.build(0.0)
    expected, groups = copy.deepcopy(model), groups_of(one, 2, 2)
    train_plainly(expected, groups, sgd(expected.parameters()), clip=1.0, seed_of=seed_of)

    with engine_for(model, sgd, config_of(2, clip=1.0, harmony={"tokens": 5})) as engine:
        train_groups(engine, groups)
        assert engine.plan.policy.tile_tokens == 5

    assert relative_difference(model, expected) < TOLERANCE


VISION: dict[str, Any] = {
    "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2,
    "spatial_merge_size": 1, "temporal_patch_size": 1,
}  # fmt: skip
IMAGE, BEGIN_OF_IMAGE = 9, 10
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
UNDER_LESS_THAN_LOGITS: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {
        **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "tie_word_embeddings": True,
    },
    "BartForConditionalGeneration": {**ENCODER_DECODER, "max_position_embeddings": 128, "forced_eos_token_id": 2},
    "WhisperForConditionalGeneration": {
        **ENCODER_DECODER, "max_source_positions": 50, "max_target_positions": 128, "num_mel_bins": 8,
    },
    "Gemma2ForCausalLM": {**SIZES, "head_dim": 8, "final_logit_softcapping": 30.0},
    "MixtralForCausalLM": {**SIZES, "num_local_experts": 4, "output_router_logits": True},
    "GptOssForCausalLM": {
        **SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    },
    "FalconH1ForCausalLM": {
        **SIZES, "head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 16, "lm_head_multiplier": 0.5,
    },
    "MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Qwen2VLForConditionalGeneration": {
        "text_config": {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "vision_config": VISION, "image_token_id": IMAGE, "vision_start_token_id": BEGIN_OF_IMAGE,
    },
}  # fmt: skip


def with_more_inputs(architecture: str, one: Batch, index: int) -> Batch:
    """Return a batch of words with what else the architecture is given, or in their place."""
    generator = torch.Generator().manual_seed(index)
    if architecture.startswith("Whisper"):
        return {"input_features": torch.randn(ROWS, 8, 100, generator=generator), "labels": one["labels"]}
    if not architecture.startswith("Qwen2VL"):
        return one
    words = one["input_ids"].clamp(min=20)
    words[:, 0], words[:, 1:5] = BEGIN_OF_IMAGE, IMAGE
    return {
        "input_ids": words,
        "labels": one["labels"].index_fill(1, torch.arange(5), -100),
        "mm_token_type_ids": (words == IMAGE).int(),
        "pixel_values": torch.randn(ROWS * 4, 3 * 64, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * ROWS),
    }


@pytest.mark.parametrize("architecture", UNDER_LESS_THAN_LOGITS)
def test_families_train_under_budgets_that_do_not_hold_their_logits(architecture: str) -> None:
    model = build_transformer(architecture, **UNDER_LESS_THAN_LOGITS[architecture])
    expected = copy.deepcopy(model)
    batches = [
        [with_more_inputs(architecture, one, 10 * step + place) for place, one in enumerate(group)]
        for step, group in enumerate(groups())
    ]
    train_plainly(expected, batches, sgd(expected.parameters()), clip=1.0, seed_of=seed_of)
    harmony = {"device_memory_gib": gib(0.9 * LOGITS_BYTES)}
    with engine_for(model, sgd, config_of(ACCUMULATION, clip=1.0, harmony=harmony)) as engine:
        train_groups(engine, batches)
        assert engine.plan.policy.tile_tokens > 0
        report = engine.memory_report()

    assert report.device_peak_bytes == report.planned_peak_bytes < LOGITS_BYTES
    for (name, one), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        if name.endswith("k_proj.bias"):  # attention is the same whatever it is: its gradient is what rounding leaves
            continue
        assert (one - other).abs().max() < TOLERANCE * other.abs().max(), name


def packed(index: int, is_one_row: bool) -> Batch:
    """Rows of several texts each, whose positions begin anew; or all of them in one row."""
    one = batch(index)
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    for row in range(ROWS):
        begin = 30 + 7 * row + index % 5
        positions[row, begin:] = torch.arange(LENGTH - begin)
    found = {**one, "labels": one["labels"].masked_fill(positions == 0, -100), "position_ids": positions}
    return {name: value.view(1, -1) for name, value in found.items()} if is_one_row else found


@pytest.mark.parametrize(
    ("is_one_row", "harmony", "size"),
    [
        (False, {"micro_batch": 2 * ROWS}, ("joined_count", 2)),
        (False, {"micro_batch": ROWS // 2}, ("forward_rows", ROWS // 2)),
        (False, {"tokens": {"head": 40, "layers": 48}}, ("layer_tile_tokens", 48)),
        (True, {"micro_batch": 2}, ("joined_count", 2)),
        (True, {"tokens": {"head": 40, "layers": 48}}, ("layer_tile_tokens", 48)),
    ],
)
def test_packed_rows_are_joined_sliced_and_cut(is_one_row: bool, harmony: Any, size: tuple[str, int]) -> None:
    model = llama(max_position_embeddings=ROWS * LENGTH)
    expected = copy.deepcopy(model)
    batches = [[packed(10 * step + place, is_one_row) for place in range(ACCUMULATION)] for step in range(STEPS)]
    train_plainly(expected, batches, sgd(expected.parameters()), clip=1.0, seed_of=seed_of)
    with engine_for(model, sgd, config_of(ACCUMULATION, clip=1.0, harmony=harmony)) as engine:
        train_groups(engine, batches)
        assert getattr(engine.plan.policy, size[0]) == size[1]

    assert relative_difference(model, expected) < TOLERANCE


def test_dropout_draws_the_same_numbers_with_tiles() -> None:
    model = llama(attention_dropout=0.1)

    found, _ = trained(model, tokens=40)

    assert relative_difference(found, plainly_trained(model)) < TOLERANCE


class TwoHeads(nn.Module):
    """A model whose first of two heads is not its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.first, self.second = nn.Linear(16, VOCABULARY), nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.words(input_ids)
        first, second = self.first(hidden), self.second(hidden)
        loss = nn.functional.cross_entropy(first.flatten(0, 1), labels.flatten())
        return loss + nn.functional.cross_entropy(second.flatten(0, 1), labels.clamp(min=0).flatten() % 64)


def test_only_the_last_layer_waits_for_the_loss() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TwoHeads()

    def check_heads(engine: HarmonyEngine) -> None:
        costs = planner_of(engine).costs[0]
        assert [cost.runs_with_loss for cost in costs.costs] == [False, False, True]

    found, _ = trained(model, check_heads, tokens=40)

    assert relative_difference(found, plainly_trained(model)) < TOLERANCE


def test_a_frozen_head_passes_gradients_on() -> None:
    model = llama()
    model.lm_head.requires_grad_(False)
    expected = copy.deepcopy(model)
    trained_parameters = [own for own in expected.parameters() if own.requires_grad]
    train_plainly(expected, groups(), torch.optim.SGD(trained_parameters, lr=0.1), clip=1.0, seed_of=seed_of)

    found, _ = trained(model, tokens=40)

    assert relative_difference(found, expected) < TOLERANCE


def test_an_adapter_on_the_head_is_a_part_of_it() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(llama(), settings).train()
    expected = copy.deepcopy(model)
    adapters = [own for own in expected.parameters() if own.requires_grad]
    train_plainly(expected, groups(), torch.optim.SGD(adapters, lr=0.1), clip=1.0, seed_of=seed_of)

    def check_head(engine: HarmonyEngine) -> None:
        assert engine.plan.policy.tile_tokens > 0

    found, _ = trained(model, check_head, device_memory_gib=gib(0.8 * LOGITS_BYTES))

    assert relative_difference(found, expected) < TOLERANCE


def test_gradients_in_bf16_are_summed_in_fp32() -> None:
    model, expected = llama(), llama()
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    with engine_for(model, sgd, config_of(ACCUMULATION, clip=1.0, harmony={"tokens": 24}, **half)) as engine:
        train_groups(engine, groups())
    with engine_for(expected, sgd, config_of(ACCUMULATION, clip=1.0, **half)) as engine:
        train_groups(engine, groups())

    assert relative_difference(model, expected) < 2e-2


class CentredHead(nn.Linear):
    """A head that subtracts from its hidden states their mean over rows (0), over tokens of rows of one length (1), or over
    the values of each token (2).
    """

    over = 2

    def forward(self, hidden: Tensor) -> Tensor:
        if self.over != 1 or hidden.shape[1] == LENGTH:
            hidden = hidden - hidden.mean(self.over, keepdim=True)
        return super().forward(hidden)


@pytest.mark.parametrize(
    ("over", "runs_in_tiles"), [(0, False), (1, False), (2, True)], ids=["rows", "tokens", "values"]
)
def test_a_head_that_mixes_rows_or_tokens_is_computed_whole(over: int, runs_in_tiles: bool) -> None:
    model = llama()
    model.lm_head.__class__ = CentredHead
    model.lm_head.over = over

    def check_peak(engine: HarmonyEngine) -> None:
        assert (engine.memory_report().device_peak_bytes < LOGITS_BYTES) is runs_in_tiles

    found, _ = trained(model, check_peak, tokens=16, pack_layers=1, residency="off")

    assert relative_difference(found, plainly_trained(model)) < TOLERANCE
