"""Several optimizers over different parameters train as they do in plain PyTorch, together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds import HarmonyEngine
from harmony_ds.errors import ConfigError, OptimizerError, UsageError
from harmony_ds.utils import safe_get_full_fp32_param
from tests.engine.drive import (
    assert_same,
    config_of,
    engine_for,
    loop_plainly,
    loop_with,
    random_rows,
    seed_of,
    squares,
)
from tests.oracle import train_plainly_half

pytestmark = pytest.mark.fixed_times

Optimizer = torch.optim.Optimizer
ACCUMULATION, STEPS = 2, 3


class Combined(Optimizer):
    """As programs write it: an optimizer that shows the groups of others, and steps them."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)


class WithGroups(Optimizer):
    """As `Combined`, with groups of its own."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for one in self.optimizers for group in one.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


class Beside:
    """As `Combined`, and no torch optimizer."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.by_name = dict(zip(("matrices", "rest"), optimizers, strict=True))

    def step(self) -> None:
        for one in self.by_name.values():
            one.step()


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def both(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    known = list(parameters)
    matrices = [p for p in known if p.ndim == 2]
    rest = [p for p in known if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    return [muon, torch.optim.AdamW([{"params": rest[:2], "lr": 0.05}, {"params": rest[2:]}], lr=0.01)]


GIVEN: dict[str, Callable[[list[Optimizer]], Any]] = {
    "a list": list,
    "an optimizer around them": Combined,
    "an optimizer with groups of its own": WithGroups,
    "an object around them": Beside,
}


def engine_with(
    model: nn.Module, given: Any, clip: float | None = None, harmony: Any = None, more: Any = None, **arguments: Any
) -> AbstractContextManager[HarmonyEngine]:
    config = config_of(ACCUMULATION, clip, {"pack_layers": 1, **(harmony or {})}, **(more or {}))
    return engine_for(model, lambda _: given, config, **arguments)


def batches(steps: Iterable[int] = range(STEPS)) -> list[Tensor]:
    return [random_rows(step * ACCUMULATION + place, 2, 8) for step in steps for place in range(ACCUMULATION)]


def train_plainly(model: nn.Module, optimizers: list[Optimizer], schedulers: Iterable[Any] = ()) -> None:
    for step in range(STEPS):
        loop_plainly(model, batches([step]), ACCUMULATION, squares, lambda _: Combined(optimizers))
        for scheduler in schedulers:
            scheduler.step()


def train(engine: HarmonyEngine, these: list[Tensor]) -> None:
    loop_with(engine, these, squares)


@pytest.mark.parametrize("residency", ["auto", "off"])
@pytest.mark.parametrize("given", GIVEN)
def test_training_is_that_of_plain_pytorch(given: str, residency: str) -> None:
    model, plain = net(), net()
    train_plainly(plain, both(plain.parameters()))
    optimizers = both(model.parameters())
    with engine_with(model, GIVEN[given](optimizers), harmony={"residency": residency}) as engine:
        train(engine, batches())
        assert engine.swap_report().ratio == 1.0
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.02, 0.05, 0.01]
        for one in optimizers:
            own = [p for group in one.param_groups for p in group["params"]]
            assert set(one.state_dict()["state"]) == set(range(len(own)))
    assert_same(model, plain, bitwise=True)


def test_a_step_of_an_object_around_them_is_called_once_a_step() -> None:
    model = net()
    combined = Combined(both(model.parameters()))
    with engine_with(model, combined) as engine:
        train(engine, batches())
        with pytest.raises(UsageError, match="steps together"):
            combined.step()
        assert combined.steps == STEPS + 1


def test_a_plain_loop_steps_them_together() -> None:
    model, plain = net(), net()
    train_plainly(plain, both(plain.parameters()))
    with engine_with(model, both(model.parameters())) as engine:
        for number, x in enumerate(batches(), start=1):
            squares(engine, x).backward()
            if number % ACCUMULATION == 0:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("given", ["a list", "an optimizer with groups of its own"])
def test_a_checkpoint_goes_on(given: str, dtype: str, tmp_path: Path) -> None:
    more = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    these = [x.bfloat16() if more else x for x in batches()]
    through, first, second = net(), net(), net()

    def engine_over(model: nn.Module) -> AbstractContextManager[HarmonyEngine]:
        return engine_with(model, GIVEN[given](both(model.parameters())), 0.5, more=more)

    with engine_over(through) as engine:
        train(engine, these)
    with engine_over(first) as engine:
        train(engine, these[:ACCUMULATION])
        engine.save_checkpoint(tmp_path)
    with engine_over(second) as engine:
        engine.load_checkpoint(tmp_path)
        train(engine, these[ACCUMULATION:])
    assert_same(second, through, bitwise=True)


@pytest.mark.parametrize("given", GIVEN)
def test_masters_are_stepped_as_in_plain_mixed_precision(given: str) -> None:
    model, plain = net(), net()
    groups = [[{"input": x.bfloat16()} for x in batches([step])] for step in range(STEPS)]

    def make(masters: list[nn.Parameter]) -> Combined:
        return Combined(both(masters))

    run = train_plainly_half(
        plain, groups, make, clip=None, seed_of=seed_of, loss_of=lambda output: output.square().mean()
    )
    with engine_with(model, GIVEN[given](both(model.parameters())), more={"bf16": {"enabled": True}}) as engine:
        train(engine, [batch["input"] for group in groups for batch in group])
        masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    assert_same(masters, run.masters, bitwise=True)


def test_state_dicts_go_on() -> None:
    through, halves = net(), [net(), net()]
    with engine_with(through, both(through.parameters())) as engine:
        train(engine, batches())
    with engine_with(halves[0], both(halves[0].parameters())) as engine:
        train(engine, batches([0]))
        saved, weights = engine.optimizer.state_dict(), engine.module.state_dict()
        assert len(saved["param_groups"]) == 3
    halves[1].load_state_dict(weights)
    with engine_with(halves[1], both(halves[1].parameters())) as engine:
        engine.optimizer.load_state_dict(saved)
        train(engine, batches([1, 2]))
    assert_same(halves[1], through, bitwise=True)


def test_each_has_a_schedule_of_its_own() -> None:
    def schedules(optimizers: list[Optimizer]) -> list[Any]:
        return [torch.optim.lr_scheduler.StepLR(one, 1, rate) for one, rate in zip(optimizers, (0.5, 0.9), strict=True)]

    model, plain = net(), net()
    optimizers = both(plain.parameters())
    train_plainly(plain, optimizers, schedules(optimizers))
    optimizers = both(model.parameters())
    with engine_with(model, optimizers, lr_scheduler=schedules(optimizers)) as engine:
        train(engine, batches())
        assert engine.get_lr() == pytest.approx([0.02 * 0.5**3, 0.05 * 0.9**3, 0.01 * 0.9**3])
        assert engine.lr_scheduler.get_last_lr() == pytest.approx(engine.get_lr())
    assert_same(model, plain, bitwise=True)


def test_after_destroy_they_are_plain_again() -> None:
    model, plain = net(), net()
    train_plainly(plain, both(plain.parameters()))
    optimizers = both(model.parameters())
    with engine_with(model, optimizers) as engine:
        train(engine, batches([0, 1]))
    loop_plainly(model, batches([2]), ACCUMULATION, squares, lambda _: Combined(optimizers))
    assert_same(model, plain, bitwise=True)


def test_what_is_not_disjoint_or_no_optimizer_is_refused_by_name() -> None:
    model = net()
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW([model[0].weight])]
    with pytest.raises(ConfigError, match=r"0\.weight occurs multiple times"):
        harmony_ds.initialize(model=model, optimizer=twice, config=config_of(1))
    with pytest.raises(OptimizerError, match="with Linear in it"):
        harmony_ds.initialize(model=model, optimizer=[twice[0], model[0]], config=config_of(1))  # type: ignore[list-item]
    with pytest.raises(OptimizerError, match="a sequence of 0"):
        harmony_ds.initialize(model=model, optimizer=[], config=config_of(1))
