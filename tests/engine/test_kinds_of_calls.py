"""What is found out about one call of a layer is not taken for known of calls of another kind.

The kinds differ by a flag, or by modes. The reference is plain PyTorch, whose weights slices and joined calls have to
rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.profiling.sample import Sample
from harmony_ds.step.planner import Planner
from tests.engine.drive import config_of, engine_for

pytestmark = pytest.mark.fixed_times

GROUP, ROWS, WIDTH = 4, 4, 16
Batch = dict[str, Any]


@dataclass
class Settings:
    centres: bool = False


class Centring(nn.Linear):
    """Its rows look at each other if it is told so, by an argument, an attribute or a setting, or in evaluation mode."""

    centres = False

    def __init__(self, config: Settings) -> None:
        super().__init__(WIDTH, WIDTH)
        self.config = config
        self.switches = {"centres": False}

    def forward(self, x: Tensor, centre: bool) -> Tensor:
        hidden = torch.tanh(super().forward(x))
        centre = centre or self.centres or self.config.centres or self.switches["centres"]
        return hidden - hidden.mean(0) if centre or not self.training else hidden

    def set_centres(self, where: str, centre: bool) -> None:
        if where == "an attribute":
            self.centres = centre
        elif where == "its configuration":
            self.config.centres = centre
        elif where == "a dictionary":
            self.switches["centres"] = centre


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Settings()
        self.layers = nn.ModuleList(Centring(config) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, centre: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, centre)
        return (x - y).square().mean()


class Counting(Net):
    """Is told the number of the step, and whether to log, and does the same in any case."""

    def forward(self, x: Tensor, y: Tensor, centre: bool = False, step: int = 0, logs: bool = False) -> Tensor:
        return super().forward(x, y, centre)


def batches(**flags: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [{**{key: torch.randn(ROWS, WIDTH, generator=generator) for key in "xy"}, **flags} for _ in range(GROUP)]


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def assert_steps_as_plain(engine: Any, plain: nn.Module, optimizer: torch.optim.Optimizer, group: list[Batch]) -> None:
    """Take a step of both, and compare losses and weights to rounding."""
    optimizer.zero_grad()
    loss = torch.stack([plain(**batch) for batch in group]).mean()
    loss.backward()
    optimizer.step()
    assert engine.train_batch(iter(group)).item() == pytest.approx(loss.item(), rel=1e-6)
    for found, expected in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("flag", ["an argument", "an attribute", "its configuration", "a dictionary"])
@pytest.mark.parametrize("rows", [1, GROUP * ROWS], ids=["in slices", "joined"])
def test_rows_that_a_flag_lets_look_at_each_other_run_together(rows: int, flag: str) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = make_sgd(plain.parameters())
    with engine_for(model, make_sgd, config_of(GROUP, harmony={"micro_batch": rows})) as engine:
        for centre in (False, True, False):
            group = batches(centre=centre and flag == "an argument")
            for layer in (*model.layers, *plain.layers):
                layer.set_centres(flag, centre)
            assert_steps_as_plain(engine, plain, optimizer, group)


class Mixing(nn.Module):
    """A part of a layer whose rows look at each other, by as much as a number says."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength * x.flip(0) if self.strength else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mixing = nn.Linear(WIDTH, WIDTH), Mixing(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing(torch.tanh(self.linear(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def mix_rows(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
    return output + output.flip(0)


def replace_forward(layer: Any) -> None:
    own = layer.forward
    layer.forward = lambda x: own(x) + x.flip(0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number that was zero": lambda layer: setattr(layer.mixing, "strength", 0.5),
    "another submodule": lambda layer: setattr(layer, "mixing", Mixing(0.5)),
    "a hook inside a layer": lambda layer: layer.linear.register_forward_hook(mix_rows),
    "another forward": replace_forward,
    "another forward inside a layer": lambda layer: replace_forward(layer.linear),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("rows", [1, GROUP * ROWS], ids=["in slices", "joined"])
def test_rows_that_look_at_each_other_after_a_change_of_the_model_run_together(
    rows: int, change: Callable[[Any], object]
) -> None:
    torch.manual_seed(0)
    model, group = Blocks(), batches()
    plain = copy.deepcopy(model)
    optimizer = make_sgd(plain.parameters())
    with engine_for(model, make_sgd, config_of(GROUP, harmony={"micro_batch": rows})) as engine:
        for step in range(3):
            if step == 1:
                for one in (model, plain):
                    change(one.layers[1])
            assert_steps_as_plain(engine, plain, optimizer, group)


def test_what_a_flag_needs_is_measured_in_every_size(measured: list[Sample]) -> None:
    model, flags = Counting(), {"logs": True}
    long, short = batches(), [{key: value[:2] for key, value in batch.items()} for batch in batches()]
    with engine_for(model, make_sgd, config_of(GROUP)) as engine:
        for group in (long, [batch | flags for batch in short], [batch | flags for batch in long], long):
            engine.train_batch(iter(group))
    assert [(len(one.inputs[1]["x"]), "logs" in one.inputs[1]) for one in measured] == [
        (4, False),
        (2, True),
        (4, True),
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """The micro-batches that the model is measured with."""
    samples: list[Sample] = []
    own = Planner.measure

    def measure(self: Planner, sample: Sample) -> tuple[int, ...]:
        samples.append(sample)
        return own(self, sample)

    monkeypatch.setattr(Planner, "measure", measure)
    return samples


def test_rows_that_look_at_each_other_in_evaluation_mode_run_together(measured: list[Sample]) -> None:
    model, group = Net(), batches()
    with engine_for(model, make_sgd, config_of(GROUP, harmony={"micro_batch": 1})) as engine:
        for step in range(3):
            engine.train_batch(iter(group))
            engine.finish_updates()
            plain = copy.deepcopy(model).eval()
            expected = torch.stack([plain(**batch) for batch in group]).mean().item()
            assert engine.eval_batch(iter(group)).item() == pytest.approx(expected, rel=1e-6)
            assert len(measured) == 2, step  # in the modes of training, and of evaluation


@pytest.mark.parametrize("rows", ["config", 1, GROUP * ROWS], ids=["whole", "in slices", "joined"])
def test_flags_and_numbers_that_change_from_call_to_call_are_measured_once_each(
    rows: int | str, measured: list[Sample]
) -> None:
    """A flag may change what a model does, and zero, a number (of the step, say) hardly does."""
    model = Counting()
    with engine_for(model, make_sgd, config_of(GROUP, harmony={"micro_batch": rows})) as engine:
        for step in range(6):
            group = [{**batch, "step": step, "logs": step % 2 == 0} for batch in batches()]
            engine.train_batch(iter(group))
        assert len(measured) == 3  # step 0, and with and without a log afterwards
        assert engine.plan is not None
        assert engine.plan.policy.joined_count == (GROUP if rows == GROUP * ROWS else 1)


def test_flags_among_attributes_are_measured_once_each_and_numbers_and_names_are_not(measured: list[Sample]) -> None:
    model: Any = Net()
    with engine_for(model, make_sgd, config_of(GROUP, harmony={"micro_batch": "config"})) as engine:
        for step in range(40):
            model.step, model.name, model.logs = step, f"step {step}", step % 2 == 0
            engine.train_batch(iter(batches()))
            if step == 20:
                measured.clear()  # of words that an attribute is in turn, the first ones may be modes
        assert not measured


class Head(nn.Linear):
    """Its tokens look at each other if it is told so."""

    def forward(self, hidden: Tensor, centre: bool = False) -> Tensor:
        logits = super().forward(hidden)
        return logits - logits.mean(1, keepdim=True) if centre else logits


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH), Head(WIDTH, 64)

    def forward(self, words: Tensor, centre: bool = False) -> Tensor:
        logits = self.head(torch.tanh(self.middle(self.embed(words))), centre=centre)
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def test_a_head_whose_tokens_a_flag_lets_look_at_each_other_is_computed_whole() -> None:
    model, words = Words(), torch.randint(0, 64, (GROUP, 2, 16), generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(model)
    with engine_for(model, make_sgd, config_of(GROUP, harmony={"tokens": 8})) as engine:
        for centre in (False, True):
            plain.load_state_dict(model.state_dict())
            expected = torch.stack([plain(one, centre) for one in words]).mean().item()
            loss = engine.train_batch([{"words": one, "centre": centre} for one in words])
            assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert engine.plan is not None and engine.plan.policy.tile_tokens == 8
