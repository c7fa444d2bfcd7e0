"""Calls inside layers in tiles of tokens: training stays what it is in plain PyTorch.

Sums over tokens are made tile by tile, so that weights agree to 1e-5 relative, not bit by bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from harmony_ds import HarmonyEngine
from harmony_ds.errors import DoesNotFitError
from harmony_ds.model.layer_tiles import LayerTiles, TiledCall
from harmony_ds.utils import safe_get_full_grad
from tests.engine.drive import (
    EVERY_FAMILY,
    config_of,
    engine_for,
    family,
    groups_of,
    loop_plainly,
    loop_with,
    means_of,
    plainly,
    sgd,
    small_sgd,
    train_groups,
)
from tests.families import Batch, Family, build_transformer

TILE = 6
"""Tokens of a tile, those of both rows together: three of a row of twelve."""
WIDTH, TOKENS = 16, 12


def in_tiles(engine: HarmonyEngine, size: int = TILE) -> LayerTiles:
    tiles = engine._state.runtime.layer_calls.layer_tiles
    tiles.size = size
    return tiles


def assert_close(actual: nn.Module, expected: nn.Module) -> None:
    pairs = zip(actual.state_dict().items(), expected.state_dict().values(), strict=True)
    for (name, own), other in pairs:
        assert (own.float() - other.float()).norm() <= 1e-5 * other.float().norm() + 1e-7, name


def test_parts_that_keep_little_take_more_tokens_at_a_time_and_no_more_memory() -> None:
    llama = family("llama")
    with engine_for(llama.build(0.0), sgd, config_of(2)) as engine:
        tiles = in_tiles(engine)
        train_groups(engine, groups_of(llama, steps=1, accumulation=2))
    larger = [one for one in tiles.cut if max(one.lengths) > TILE // 2]
    smaller = [one for one in tiles.cut if one not in larger]

    assert larger and smaller
    assert max(of_a_token(one) for one in larger) < min(of_a_token(one) for one in smaller)
    for one in larger:
        assert max(one.lengths) * of_a_token(one) <= TILE // 2 * 8 * one.proof.input_bytes / sum(one.lengths)


def of_a_token(tiled: TiledCall) -> float:
    """Return the bytes that the graph of a call keeps of each token of a row."""
    return tiled.proof.inner_bytes / sum(tiled.lengths)


NOT_CUT = {"opt", "bart", "whisper", "resnet"}
"""The layers of these multiply matrices in their own forward, beside attention; or convolve."""


@pytest.mark.parametrize("one", EVERY_FAMILY, ids=str)
def test_every_family_trains_as_in_plain_pytorch(one: Family) -> None:
    make = small_sgd if one.name == "gemma4" else sgd
    groups = groups_of(one, steps=3, accumulation=2)
    plain, losses = plainly(one, 0.0, groups, make, clip=1.0)
    model = one.build(0.0)
    with engine_for(model, make, config_of(2, clip=1.0)) as engine:
        tiles = in_tiles(engine)
        actual = train_groups(engine, groups)
        assert bool(tiles.cut) is (one.name not in NOT_CUT)
    assert_close(model, plain)
    assert actual == pytest.approx(means_of(losses), rel=1e-5)


def test_the_same_tiles_give_the_same_bits_whatever_the_packs() -> None:
    llama = family("llama")
    groups = groups_of(llama, steps=3, accumulation=2)
    trained: list[dict[str, Tensor]] = []
    for packs in ({"pack_layers": 1}, {"pack_layers": 2}, {"residency": 2}, {"pack_layers": 100}):
        model = llama.build(0.0)
        with engine_for(model, sgd, config_of(2, clip=1.0, harmony=packs)) as engine:
            in_tiles(engine)
            train_groups(engine, groups)
        trained.append(model.state_dict())
    for other in trained[1:]:
        assert all(torch.equal(trained[0][name], other[name]) for name in other)


# ---- modules whose tokens look at each other


class Layer(nn.Module):
    """A residual around `mixing`, which is told of the (B, T, WIDTH) hidden states of some layers."""

    def __init__(self, mixing: nn.Module) -> None:
        super().__init__()
        self.mixing = mixing
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = hidden + self.out(self.mixing(hidden).contiguous())
        return made


class OverTokens(nn.Module):
    def __init__(self, tokens_last: nn.Module) -> None:
        super().__init__()
        self.tokens_last = tokens_last

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.tokens_last(hidden.transpose(1, 2)).transpose(1, 2)
        return made * torch.tanh(made)


class Shift(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.pad(hidden, (0, 0, 1, 0))[:, :-1].tanh().exp().sin()


class CumulativeSum(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh().cumsum(1).sin()


class Lengths(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh().exp() / hidden.shape[1]


class Capacity(nn.Module):
    """The tokens that score best are kept, half of them."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.score(hidden)
        kept = scores.topk(hidden.shape[1] // 2, dim=1).values[:, -1:]
        return hidden.tanh() * torch.sigmoid(scores) * (scores >= kept)


class BestWindow(nn.Module):
    """What only long rows have: the mean of the last eight tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        made = hidden.tanh().exp()
        return made - made[:, -8:].mean(1, keepdim=True) if hidden.shape[1] > 8 else made


class Noise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh().exp() * torch.rand_like(hidden)


MIXING = {
    "batch norm": lambda: OverTokens(nn.BatchNorm1d(WIDTH)),
    "norm over tokens": lambda: OverTokens(nn.LayerNorm(TOKENS)),
    "convolution": lambda: OverTokens(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "shift": Shift,
    "cumulative sum": CumulativeSum,
    "lengths": Lengths,
    "capacity": Capacity,
    "a window of long rows": BestWindow,
    "random numbers": Noise,
}


class Net(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(make()) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def net(make: Any) -> Net:
    torch.manual_seed(3)
    return Net(make)


def batches(count: int) -> list[Tensor]:
    return [torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


@pytest.mark.parametrize("name", MIXING)
def test_modules_whose_tokens_look_at_each_other_are_not_cut(name: str) -> None:
    plain, model = net(MIXING[name]), net(MIXING[name])
    expected = loop_plainly(plain, batches(4), 2, loss_of, seeded=True)
    with engine_for(model, sgd, config_of(2)) as engine:
        tiles = in_tiles(engine)
        losses, _ = loop_with(engine, batches(4), loss_of)
        assert not tiles.cut
    assert losses == expected
    assert all(torch.equal(own, other) for own, other in zip(model.parameters(), plain.parameters(), strict=True))


# ---- what runs


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if type(hidden) is Tensor:  # no proof's
            RUNS.append(hidden.shape[1])
        made: Tensor = self.down(F.gelu(self.up(hidden)))
        return made


class Residual(nn.Module):
    """A mixture of tokens, and a perceptron that is added to the residual; `read`: its square, which backward reads."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.mlp, self.read = Perceptron(), read

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + hidden.roll(1, 1)
        change = self.mlp(hidden)
        return hidden + change * change if self.read else hidden + change


class ResidualNet(nn.Module):
    def __init__(self, read: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(read) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


RUNS: list[int] = []


@pytest.mark.parametrize("read", [False, True])
def test_an_output_that_no_backward_pass_reads_is_not_computed_again(read: bool) -> None:
    torch.manual_seed(4)
    model = ResidualNet(read)
    torch.manual_seed(4)
    plain = ResidualNet(read)
    expected = loop_plainly(plain, batches(4), 1, loss_of)
    # Each layer is a pack, and is recomputed, but for the last.
    with engine_for(model, sgd, config_of(1, harmony={"pack_layers": 1, "residency": "off"})) as engine:
        in_tiles(engine)
        losses, _ = loop_with(engine, batches(3), loss_of)
        RUNS.clear()
        losses += loop_with(engine, batches(4)[3:], loss_of)[0]
    tiles_of_forward, tiles_of_backward = 3 * 4, 3 * 4
    again = 2 * 4 if read else 0
    assert [3] * (tiles_of_forward + again + tiles_of_backward) == RUNS
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(model, plain)


INPUTS: list[StorageWeakRef] = []
LEFT: list[int] = []


class MayMix(nn.Module):
    """A perceptron whose tokens look at each other in some of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mixes: bool) -> Tensor:
        if not mixes and type(hidden) is Tensor:  # no proof's
            RUNS.append(hidden.shape[1])
        wide = torch.tanh(self.up(hidden))
        made: Tensor = self.down(wide.cumsum(1) / 4 if mixes else wide)
        return made


class OfTwoKinds(nn.Module):
    """Two calls of one module, of which the second cannot run in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MayMix()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mlp(hidden, mixes=False)
        return hidden + self.mlp(hidden, mixes=True)


def test_a_call_that_runs_in_tiles_does_so_after_another_call_of_its_module_could_not() -> None:
    """Else it would run whole when its layer is recomputed, and take more memory than when it was measured."""
    plain, model = net(OfTwoKinds), net(OfTwoKinds)
    RUNS.clear()
    expected = loop_plainly(plain, batches(2), 1, loss_of)
    RUNS.clear()
    with engine_for(model, sgd, config_of(1, harmony={"pack_layers": 1, "residency": "off"})) as engine:
        tiles = in_tiles(engine)
        losses, _ = loop_with(engine, batches(2), loss_of)
        assert tiles.cut
    assert {*RUNS} == {6}
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(model, plain)


class Remembering(Perceptron):
    """Counts the inputs of earlier calls that are still there."""

    def forward(self, hidden: Tensor) -> Tensor:
        if type(hidden) is Tensor:  # no proof's
            LEFT.append(sum(not one.expired() for one in INPUTS))
            INPUTS.append(StorageWeakRef(hidden.untyped_storage()))
        made: Tensor = self.down(self.up(hidden).tanh())  # whose graph saves its own result
        return made


def test_inputs_of_tiles_are_freed_tile_by_tile_in_measuring_and_in_steps() -> None:
    model = ResidualNet()
    for layer in model.layers:
        layer.mlp = Remembering()
    INPUTS.clear()
    LEFT.clear()
    with engine_for(model, sgd, config_of(1, harmony={"pack_layers": 1, "residency": "off"})) as engine:
        in_tiles(engine)
        loop_with(engine, batches(2), loss_of)
    assert len(LEFT) > 2 * 3 * 2 * 4
    assert {*LEFT} == {0}


def test_gradients_of_tiles_are_added_up_in_the_accumulation_dtype() -> None:
    """In bf16, 303 is no number."""
    torch.manual_seed(5)
    model, tokens = ResidualNet(), 303
    settings = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    config = config_of(1, harmony={"pack_layers": 1}, train_micro_batch_size_per_gpu=1, **settings)
    with engine_for(model, sgd, config) as engine:
        in_tiles(engine, 3)
        engine.backward(engine(torch.randn(1, tokens, WIDTH).bfloat16()).float().sum())
        gradient = safe_get_full_grad(dict(engine.module.named_parameters())["layers.2.mlp.down.bias"])
    assert gradient is not None
    assert torch.equal(gradient, torch.full((WIDTH,), float(tokens)))


def test_hooks_on_parameters_see_whole_gradients() -> None:
    torch.manual_seed(6)
    model = ResidualNet()
    seen: list[Tensor] = []
    model.layers[1].mlp.up.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    with engine_for(model, sgd, config_of(1)) as engine:
        in_tiles(engine)
        loop_with(engine, batches(1), loss_of)
    assert len(seen) == 1


def test_evaluation_runs_in_tiles_too() -> None:
    torch.manual_seed(7)
    model = ResidualNet()
    expected = model(batches(1)[0]).detach()
    with engine_for(model, sgd, config_of(1)) as engine, torch.no_grad():
        tiles = in_tiles(engine)
        made = engine.eval()(batches(1)[0])
        assert tiles.cut
    assert torch.allclose(made, expected, atol=1e-6)
    assert not made.requires_grad


# ---- under a budget

LONG = 256


def wide_llama(layers: int = 2) -> nn.Module:
    """A model whose MLPs take most of the memory."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONG}
    return build_transformer("LlamaForCausalLM", **sizes, **heads, tie_word_embeddings=False)


def long_groups() -> list[list[Batch]]:
    batches = []
    for index in range(4):
        words = torch.randint(0, 64, (1, LONG), generator=torch.Generator().manual_seed(index))
        batches.append({"input_ids": words, "labels": words})
    return [batches[:2], batches[2:]]


def trained_long(**harmony: Any) -> tuple[nn.Module, Any, Any]:
    """Train; return the model, the plan's policy, and the report of its memory."""
    model = wide_llama()
    config = config_of(2, clip=1.0, harmony=harmony, train_micro_batch_size_per_gpu=1)
    with engine_for(model, sgd, config) as engine:
        train_groups(engine, long_groups())
        return model, engine.plan.policy, engine.memory_report()


def test_layers_run_in_tiles_where_nothing_fits_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    whole, policy, report = trained_long(tokens="off", pack_layers=1, residency="off", stash="host")
    assert (policy.tile_tokens, policy.layer_tile_tokens) == (0, 0)
    budget = 0.7 * report.device_peak_bytes / 2**30
    with pytest.raises(DoesNotFitError):
        trained_long(tokens="off", device_memory_gib=budget)

    model, policy, tight = trained_long(device_memory_gib=budget)

    assert (policy.tile_tokens, policy.layer_tile_tokens) == (0, 64)
    assert tight.device_peak_bytes == tight.planned_peak_bytes <= budget * 2**30
    assert "parts of layers run in tiles of 64 tokens" in caplog.text
    assert_close(model, whole)


def test_tiles_of_head_and_layers_can_be_named_and_a_saved_plan_keeps_them(tmp_path: Any) -> None:
    model, policy, _ = trained_long(tokens={"head": 128, "layers": 32})
    assert (policy.tile_tokens, policy.layer_tile_tokens) == (128, 32)

    path = tmp_path / "plan.json"
    named = {"tokens": {"head": 128, "layers": 32}}
    with engine_for(wide_llama(), sgd, config_of(2, clip=1.0, harmony=named)) as engine:
        train_groups(engine, long_groups())
        path.write_text(engine.plan.to_json())
    again = wide_llama()
    with engine_for(again, sgd, config_of(2, clip=1.0, harmony={"plan": str(path)})) as engine:
        train_groups(engine, long_groups())
        assert engine.plan.policy.layer_tile_tokens == 32
    assert all(torch.equal(own, other) for own, other in zip(model.parameters(), again.parameters(), strict=True))
