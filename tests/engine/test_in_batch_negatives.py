"""Rows that meet only in the loss: contrastive training whose layer calls do not fit whole, and are cut by default.

The reference is plain PyTorch over whole micro-batches; sums over rows are made slice by slice.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds import DoesNotFitError, HarmonyEngine
from tests.engine.drive import LossOf, config_of, engine_for, loop_plainly, loop_with, sgd
from tests.inside import planner_of, take_from_host

pytestmark = pytest.mark.fixed_times

ROWS, TOKENS, WIDTH, STEPS = 48, 8, 16, 3
TOLERANCE = 1e-5
SMALLEST = {"residency": "off", "pack_layers": 1, "stash": "host", "keep_graphs": False}


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.mT).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(x)))


class Encoder(nn.Module):
    """A text encoder, whose forward takes one input, or two that it joins, or queries and several passages for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.head(x.mean(1)), dim=-1)

    def forward(self, tokens: Tensor, others: Tensor | None = None, passages: Tensor | None = None) -> Any:
        if passages is not None:
            return self.encode(tokens), self.encode(passages)
        return self.encode(tokens) if others is None else self.encode(torch.cat([tokens, others])).chunk(2)


def in_batch(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the cross-entropy of each query's own key among all keys; the first of several is its own."""
    own = torch.arange(len(queries)) * (len(keys) // len(queries))
    return F.cross_entropy(queries @ keys.T / 0.1, own)


def one_input(call: Any, x: list[Tensor]) -> Tensor:
    encoded = call(x[0])
    return in_batch(encoded, encoded.roll(1, 0))


def two_inputs_joined(call: Any, x: list[Tensor]) -> Tensor:
    return in_batch(*call(x[0], x[1]))


def two_passes(call: Any, x: list[Tensor]) -> Tensor:
    return in_batch(call(x[0]), call(x[1]))


def several_passages(call: Any, x: list[Tensor]) -> Tensor:
    return in_batch(*call(x[0], passages=torch.cat([x[1], x[0].flip(0), x[1].flip(1)])))


PROGRAMS: list[LossOf] = [one_input, two_inputs_joined, two_passes, several_passages]


def data(rows: int = ROWS, tokens: int = TOKENS) -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(7)
    return [[torch.randint(50, (rows, tokens), generator=source) for _ in range(2)] for _ in range(STEPS)]


def assert_close(found: nn.Module, expected: nn.Module) -> None:
    for (name, own), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (own - other).norm() <= TOLERANCE * other.norm(), name


def peak_of(engine: HarmonyEngine) -> int:
    memory = engine.memory_report()
    assert memory.device_peak_bytes <= memory.planned_peak_bytes
    return memory.planned_peak_bytes


def smallest_bytes(program: LossOf, batches: list[list[Tensor]] | None = None) -> int:
    """Return the device bytes of the smallest plan of whole micro-batches."""
    with engine_for(Encoder(), sgd, config_of(1, harmony=SMALLEST)) as engine:
        loop_with(engine, (batches or data())[:1], program)
        return peak_of(engine)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_does_not_fit_whole_is_cut_by_default(program: LossOf) -> None:
    budget = smallest_bytes(program) // 3
    plain, model = Encoder(), Encoder()
    expected = loop_plainly(plain, data(), 1, program, clip=1.0)
    config = config_of(1, clip=1.0, harmony={"device_memory_gib": budget / 2**30})
    with engine_for(model, sgd, config) as engine:
        losses, ratios = loop_with(engine, data(), program)
        assert engine.plan is not None and 0 < engine.plan.policy.backward_rows < ROWS
        assert peak_of(engine) <= budget
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert set(ratios) == {1.0}
    assert_close(model, plain)


@pytest.mark.parametrize("program", [one_input, two_inputs_joined, two_passes])
def test_an_eighth_of_a_layer_call_is_enough(program: LossOf) -> None:
    """Beside the weights of a layer, their gradients, and those of one slice. Of two passes a call has the rows of one."""
    batches, plain, model = data(ROWS, 16), Encoder(), Encoder()
    whole = smallest_bytes(one_input if program is two_passes else program, batches)
    weights = 3 * sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    budget = (whole - weights) // 8 + weights
    expected = loop_plainly(plain, batches, 1, program, clip=1.0)
    config = config_of(1, clip=1.0, harmony={"device_memory_gib": budget / 2**30})
    with engine_for(model, sgd, config) as engine:
        losses, ratios = loop_with(engine, batches, program)
        assert engine.plan is not None and engine.plan.policy.slices_from_host
        assert engine.memory_report().device_peak_bytes == engine.plan.peak_bytes <= budget
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert set(ratios) == {1.0}
    assert_close(model, plain)


class SummedEmbeddings(nn.Module):
    """Three kinds of embeddings, of which its forward holds all rows at once, as a BERT's does; a BERT has a norm, too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.words, self.kinds, self.places = (nn.Embedding(50, WIDTH) for _ in range(3))
        self.norm = norm

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        kinds = self.kinds(tokens % 2)
        summed: Tensor = self.norm(words + kinds + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
        return summed


@pytest.mark.parametrize(
    ("norm", "layers"),
    [(nn.LayerNorm(WIDTH), {}), (nn.Identity(), {"layers": ["embedding", "blocks.?"]})],
    ids=["by default", "by name"],
)
def test_embeddings_that_are_one_layer_are_cut_down_to_single_rows(norm: nn.Module, layers: dict[str, Any]) -> None:
    """Which takes less than the sum of several kinds does by itself."""
    model, batches = Encoder(), data(ROWS, 16)
    model.embedding = SummedEmbeddings(norm)
    plain = copy.deepcopy(model)
    config = config_of(1, harmony={**SMALLEST, **layers, "micro_batch": 1})
    with engine_for(copy.deepcopy(model), sgd, config) as engine:
        take_from_host(engine)
        loop_with(engine, batches[:1], one_input)
        budget = {"device_memory_gib": peak_of(engine) / 2**30}
    parts = {"layers": ["embedding.*", "blocks.?"]} if not layers else {}
    way_out = r'name a module in harmony.layers .* such as "\*.embeddings"'
    refused = pytest.raises(DoesNotFitError, match=way_out)
    with engine_for(copy.deepcopy(model), sgd, config_of(1, harmony={**budget, **parts})) as engine, refused:
        loop_with(engine, batches, one_input)
    expected = loop_plainly(plain, batches, 1, one_input)
    with engine_for(model, sgd, config_of(1, harmony={**budget, **layers})) as engine:
        losses, ratios = loop_with(engine, batches, one_input)
        assert engine.plan is not None and engine.plan.policy.backward_rows == 1
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert set(ratios) == {1.0}
    assert_close(model, plain)


def test_the_outputs_of_other_passes_are_not_held_by_each() -> None:
    """Zeros stand for them, and get gradients, while the model is measured with one pass."""
    held = []
    for program in (one_input, two_passes):
        with engine_for(Encoder(), sgd, config_of(1, harmony={**SMALLEST, "micro_batch": 1})) as engine:
            loop_with(engine, data()[:1], program)
            held.append(planner_of(engine).costs[1].held_bytes)
    assert 0 <= held[1] - held[0] < ROWS * WIDTH * 4


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_fits_whole_keeps_every_bit(program: LossOf) -> None:
    budget = smallest_bytes(program) + 2**16
    plain, model = Encoder(), Encoder()
    expected = loop_plainly(plain, data(), 1, program, clip=1.0)
    config = config_of(1, clip=1.0, harmony={"device_memory_gib": budget / 2**30})
    with engine_for(model, sgd, config) as engine:
        assert loop_with(engine, data(), program)[0] == expected
        assert engine.plan is not None and not engine.plan.policy.backward_rows
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_run_that_goes_on_repeats_the_slices(tmp_path: Path) -> None:
    budget = smallest_bytes(one_input) // 3
    small, large = (config_of(1, harmony={"device_memory_gib": nbytes / 2**30}) for nbytes in (budget, 8 * budget))
    first, second = Encoder(), Encoder()
    with engine_for(first, sgd, small) as engine:
        loop_with(engine, data(), one_input)
        assert engine.plan is not None
        rows = engine.plan.policy.backward_rows
        engine.save_checkpoint(str(tmp_path), "half")
        loop_with(engine, data(), one_input)
    with engine_for(second, sgd, large) as engine:
        engine.load_checkpoint(str(tmp_path), "half")
        loop_with(engine, data(), one_input)
        assert engine.plan is not None and engine.plan.policy.backward_rows == rows > 0
    assert all(map(torch.equal, first.parameters(), second.parameters()))
