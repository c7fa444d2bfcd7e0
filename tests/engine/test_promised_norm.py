"""A step returns before the norm of its gradients is known, and an overflow that is found later leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from harmony_ds.device import CpuDevice
from harmony_ds.device.base import Event, Stream
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, means_of, random_rows, seed_of, sgd
from tests.oracle import assert_same, train_plainly_half

BF16 = {"bf16": {"enabled": True}}  # steps with inf or NaN in their gradients are skipped, as DeepSpeed does by default
LLAMA = family("llama")
PATIENCE_S = 20
"""How long copies wait to be let go, before they say that nobody does."""


class HeldCopies(CpuDevice):
    """A device whose copies to the host arrive when `arrive`, as it was when they were issued, is set."""

    def __init__(self) -> None:
        super().__init__()
        self.arrive = threading.Event()
        self.arrive.set()

    def record(self, stream: Stream) -> Event:
        return _HeldCopy(self.arrive) if stream is Stream.SWAP_OUT else super().record(stream)


class _HeldCopy:
    def __init__(self, arrive: threading.Event) -> None:
        self._arrive = arrive

    def synchronize(self) -> None:
        assert self._arrive.wait(PATIENCE_S), "the step waits for its gradients to be on the host"

    def query(self) -> bool:
        return self._arrive.is_set()


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_step_returns_while_its_gradients_are_on_their_way_to_the_host(scheduled: bool) -> None:
    groups, device, plain, model = groups_of(LLAMA, 3, 2), HeldCopies(), LLAMA.build(0.1), LLAMA.build(0.1)
    constant = (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)) if scheduled else None
    expected = train_plainly_half(plain, groups, adamw, clip=0.5, seed_of=seed_of)
    losses = []
    config = config_of(2, 0.5, {"pack_layers": 1, "stash": "device"}, **BF16)
    with engine_for(model, adamw, config, device=device, lr_scheduler=constant) as engine:
        for step, group in enumerate(groups):
            if step:  # the first one measures
                device.arrive = threading.Event()
            losses.append(engine.train_batch(iter(group)))
            device.arrive.set()
    assert [loss.item() for loss in losses] == means_of(expected.losses)
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()), bitwise=True)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


class Stateless:
    """A scheduler whose steps cannot be undone."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] /= 2


def _halving(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def _in_two_parts(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)


WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 5}}}
SCHEDULES = {
    "none": (None, {}),
    "halving": (_halving, {}),
    "in two parts": (_in_two_parts, {}),
    "one cycle, of momentum too": (_one_cycle, {}),
    "without state": (Stateless, {}),
    "DeepSpeed's": (None, WARMUP),
}


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _values(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _batch(number: int, bad: bool = False) -> Tensor:
    x = random_rows(number, 2, 5).bfloat16()
    return x * float("nan") if bad else x


def _train(
    schedule: str, residency: Any, bad: tuple[int, ...], clip: float = 0.5
) -> tuple[dict[str, Tensor], list[list[dict[str, Any]]], list[Any]]:
    """Train for four good steps, with a bad one before each of the numbers in `bad`, and read nothing in between.

    Returns:
        The weights, the values in the parameter groups before each good step, and the scheduler's state.
    """
    made, block = SCHEDULES[schedule]
    model = Small()
    config = config_of(1, clip, {"pack_layers": 1, "residency": residency}, **BF16, **block)
    with engine_for(model, _momentum, config, lr_scheduler=made) as engine:
        optimizer, values = engine.basic_optimizer, []
        for number in range(4):
            if number in bad:
                engine.backward(engine(_batch(number, bad=True)))
                engine.step()
            engine.backward(engine(_batch(number)))
            engine.step()
            values.append(_values(optimizer))
        assert engine.skipped_steps == len(bad)
        scheduler = engine.lr_scheduler
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
        rates = scheduler.get_last_lr() if hasattr(scheduler, "get_last_lr") else None
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, values, [state, rates]


@pytest.mark.parametrize("residency", ["off", 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_a_step_that_was_skipped_training_goes_on_as_without_it(schedule: str, residency: Any) -> None:
    weights, values, state = _train(schedule, residency, bad=(1, 3))
    expected, expected_values, expected_state = _train(schedule, residency, bad=())
    assert_same(weights, expected, bitwise=True)
    assert values == expected_values
    assert state == expected_state


READS: dict[str, Callable[[Any], Any]] = {
    "get_lr": lambda engine: engine.get_lr() == [0.1],
    "lr_scheduler": lambda engine: engine.lr_scheduler.get_last_lr() == [0.1],
    "skipped_steps": lambda engine: engine.skipped_steps == 1,
    "was_step_applied": lambda engine: not engine.was_step_applied(),
    "overflow": lambda engine: engine.optimizer.overflow,
    "norm": lambda engine: engine.get_global_grad_norm() != engine.get_global_grad_norm() and engine.get_lr() == [0.1],
}


@pytest.mark.parametrize("read", READS)
def test_whoever_asks_is_told_of_the_overflow(read: str) -> None:
    with engine_for(Small(), _momentum, config_of(1, 0.5, **BF16), lr_scheduler=_halving) as engine:
        engine.train_batch([_batch(0, bad=True)])
        assert READS[read](engine)
        engine.train_batch([_batch(1)])
        assert not engine.optimizer.overflow
        assert (engine.get_lr(), engine.skipped_steps) == ([0.05], 1)


def test_a_learning_rate_that_the_program_sets_after_a_skipped_step_stays() -> None:
    with engine_for(Small(), _momentum, config_of(1, 0.5, **BF16), lr_scheduler=_halving) as engine:
        engine.train_batch([_batch(0, bad=True)])
        engine.basic_optimizer.param_groups[0]["lr"] = 0.3
        assert engine.get_lr() == [0.3]


def test_a_skipped_step_is_not_undone_after_a_checkpoint_was_loaded(tmp_path: Any) -> None:
    with engine_for(Small(), _momentum, config_of(1, 0.5, **BF16), lr_scheduler=_halving) as engine:
        engine.train_batch([_batch(0)])
        engine.save_checkpoint(tmp_path)
        engine.train_batch([_batch(1, bad=True)])
        engine.load_checkpoint(tmp_path)
        assert (engine.get_lr(), engine.skipped_steps, engine.global_steps) == ([0.05], 0, 1)
        engine.train_batch([_batch(1, bad=True)])
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        assert (engine.get_lr(), engine.skipped_steps, engine.global_steps) == ([0.05], 1, 2)


@pytest.mark.filterwarnings("ignore:a step updates weights from gradients that the program's own")
def test_gradients_of_the_programs_own_that_are_not_finite_are_skipped_too() -> None:
    model = Small()
    with engine_for(model, sgd, config_of(1, 0.5, **BF16)) as engine:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        weight = model.layers[0].weight
        weight.grad = torch.full_like(weight, float("inf"))
        engine.step()
        assert engine.skipped_steps == 1
        assert_same(dict(model.named_parameters()), before, bitwise=True)
