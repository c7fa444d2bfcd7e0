"""Reports are right for every kind of loop of docs/loops.md: bytes, peak and time, against those of `train_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harmony_ds
from harmony_ds import HarmonyEngine
from harmony_ds.step import step_record
from tests.engine.drive import config_of, engine_for, sgd
from tests.optim.test_optimizer_chain import Combined

pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning"),
]

LAYERS, ACCUMULATION, STEPS = 5, 4, 3
ONE_PACK_EACH = {"pack_layers": 1}
CALLS = ACCUMULATION * (2 * LAYERS - 1)  # of layers in a step: forward, and again in backward but for the last pack


class Clock:
    """A clock that layers advance, by a millisecond a call."""

    now_ms = 0.0
    fails = False

    def perf_counter(self) -> float:
        return self.now_ms / 1e3


class Layer(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.clock.fails:
            raise ValueError("the clock is broken")
        self.clock.now_ms += 1
        y: Tensor = self.linear(x).tanh()
        return y


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_record, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def model_of(clock: Clock) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(clock) for _ in range(LAYERS)))


def batches(count: int = STEPS * ACCUMULATION) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(2, 8, generator=generator)


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


Drive = Callable[[HarmonyEngine], None]


def train_batch(engine: HarmonyEngine) -> None:
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data, loss_of)


def familiar(engine: HarmonyEngine) -> None:
    for x in batches():
        engine.backward(loss_of(engine(x)))
        engine.step()


def familiar_and_reads_losses_after_the_step(engine: HarmonyEngine) -> None:
    total: Any = 0.0
    for number, x in enumerate(batches(), start=1):
        loss = loss_of(engine(x))
        total = total + loss.detach()
        engine.backward(loss)
        engine.step()
        if number % ACCUMULATION == 0:
            total.item()


def familiar_with_evaluations(engine: HarmonyEngine) -> None:
    for number, x in enumerate(batches(), start=1):
        with torch.no_grad():
            engine(x)  # a reference model's, for example
        engine.backward(loss_of(engine(x)))
        engine.step()
        if number % ACCUMULATION == 0:
            engine.eval_batch(iter(batches(ACCUMULATION)), loss_of)


def boundary_by_hand(engine: HarmonyEngine) -> None:
    for number, x in enumerate(batches(), start=1):
        engine.set_gradient_accumulation_boundary(number % ACCUMULATION == 0)
        engine.backward(loss_of(engine(x)))
        engine.step()


def unmanaged(engine: HarmonyEngine) -> None:
    for number, x in enumerate(batches(), start=1):
        engine.backward(loss_of(engine(x)))
        if number % ACCUMULATION == 0:
            engine.step()


def by_hand(engine: HarmonyEngine) -> None:
    """The plain PyTorch loop, with a step for every so many micro-batches."""
    for number, x in enumerate(batches(), start=1):
        loss_of(engine(x)).backward()
        if number % ACCUMULATION == 0:
            engine.optimizer.step()
            engine.optimizer.zero_grad()


def by_hand_and_clips(engine: HarmonyEngine) -> None:
    for number, x in enumerate(batches(), start=1):
        loss_of(engine(x)).backward()
        if number % ACCUMULATION == 0:
            nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
            engine.optimizer.step()
            engine.optimizer.zero_grad()


def group_that_ends_before_its_step(engine: HarmonyEngine) -> None:
    """What a Trainer does where a callback changes gradients."""
    data = batches()
    for _ in range(STEPS):
        group = [next(data) for _ in range(ACCUMULATION)]
        engine.train_group(group, lambda x: loss_of(engine.module(x)), boundary=False)
        engine.end_group()


def group(engine: HarmonyEngine) -> None:
    data = batches()
    for _ in range(STEPS):
        engine.train_group([next(data) for _ in range(ACCUMULATION)], lambda x: loss_of(engine.module(x)))


def function_that_calls_the_engine(engine: HarmonyEngine) -> None:
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data, compute_loss=lambda engine, x: loss_of(engine(x)))


AS_PLANNED: dict[str, tuple[Drive, int]] = {
    "train_batch": (train_batch, ACCUMULATION),
    "familiar": (familiar, ACCUMULATION),
    "reads losses after the step": (familiar_and_reads_losses_after_the_step, ACCUMULATION),
    "with evaluations": (familiar_with_evaluations, ACCUMULATION),
    "boundary by hand": (boundary_by_hand, ACCUMULATION),
    "boundary by hand, accumulation 1": (boundary_by_hand, 1),
    "optimizer.step() by hand": (by_hand, ACCUMULATION),
    "optimizer.step() by hand, accumulation 1": (by_hand, 1),
    "clips by hand": (by_hand_and_clips, ACCUMULATION),
    "clips by hand, accumulation 1": (by_hand_and_clips, 1),
    "train_group": (group, ACCUMULATION),
    "train_group and end_group": (group_that_ends_before_its_step, ACCUMULATION),
    "compute_loss": (function_that_calls_the_engine, ACCUMULATION),
}


@pytest.mark.parametrize("name", AS_PLANNED)
def test_a_group_that_runs_at_once_is_reported_as_in_train_batch(name: str, clock: Clock) -> None:
    drive, accumulation = AS_PLANNED[name]
    with engine_for(model_of(clock), sgd, config_of(accumulation, None, ONE_PACK_EACH)) as engine:
        drive(engine)
        assert_as_planned(engine)


def test_a_boundary_that_the_program_owns_is_reported_alike(clock: Clock) -> None:
    config = config_of(1, None, ONE_PACK_EACH, managed_gradient_accumulation=False)
    with engine_for(model_of(clock), sgd, config) as engine:
        unmanaged(engine)
        assert_as_planned(engine)


@pytest.mark.parametrize("combines", [False, True])
def test_several_optimizers_are_reported_alike(combines: bool, clock: Clock) -> None:
    model = model_of(clock)
    halves = [sgd(model[:2].parameters()), sgd(model[2:].parameters())]
    optimizer: Any = Combined(halves) if combines else halves
    config = config_of(ACCUMULATION, None, ONE_PACK_EACH)
    engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config)
    familiar(engine)
    assert_as_planned(engine)
    engine.destroy()


def assert_as_planned(engine: HarmonyEngine) -> None:
    plan, memory, swaps = engine.plan_report(), engine.memory_report(), engine.swap_report()
    assert plan.deviation == ""
    assert swaps.micro_batches == ACCUMULATION
    assert swaps.ratio == 1.0
    assert plan.swapped_bytes == plan.planned.total
    assert memory.device_peak_bytes == plan.device_peak_bytes == memory.planned_peak_bytes
    assert plan.measured_step_ms == (pytest.approx(CALLS),) * (STEPS - 1)
    assert plan.last_step_ms == pytest.approx(CALLS)
    assert f"{CALLS:.1f} ms measured" in str(plan)


# ---- steps that the plan's time is not for


def reads_every_loss(engine: HarmonyEngine) -> None:
    for x in batches():
        loss = loss_of(engine(x))
        loss.item()
        engine.backward(loss)
        engine.step()


def reads_a_gradient_in_mid_group(engine: HarmonyEngine) -> None:
    for number, x in enumerate(batches(), start=1):
        engine.backward(loss_of(engine(x)))
        if number % ACCUMULATION == 2:
            assert next(engine.module.parameters()).grad is not None
        engine.step()


def gradients_of_inputs(engine: HarmonyEngine) -> None:
    for x in batches():
        engine.backward(loss_of(engine(x.requires_grad_())))
        assert x.grad is not None
        engine.step()


def ends_early(engine: HarmonyEngine) -> None:
    train_batch(engine)
    engine.train_batch(batches(2), loss_of)


def gradients_of_its_own(engine: HarmonyEngine) -> None:
    train_batch(engine)
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.optimizer.step()


DEVIATIONS: dict[str, tuple[Drive, str, float]] = {
    # How layer calls of the last step differ in number: forward passes that run alone keep nothing of the last pack.
    "reads every loss": (
        reads_every_loss,
        "losses or outputs were read before the step, and 4 forward passes ran alone",
        CALLS + ACCUMULATION,
    ),
    "reads a gradient in mid-group": (
        reads_a_gradient_in_mid_group,
        "gradients were read before the step, and its micro-batches ran in 3 groups",
        CALLS,
    ),
    "gradients of inputs": (
        gradients_of_inputs,
        "gradients were read before the step, and its micro-batches ran in 4 groups",
        CALLS,
    ),
    "ends early": (ends_early, "it had 2 micro-batches, and the plan is for 4", CALLS / 2),
    "gradients of its own": (gradients_of_its_own, "the program made its gradients, not the plan", 0),
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_step_that_is_not_the_plans_says_why_and_is_measured_whole(name: str, clock: Clock) -> None:
    drive, deviation, calls = DEVIATIONS[name]
    with engine_for(model_of(clock), sgd, config_of(ACCUMULATION, None, ONE_PACK_EACH)) as engine:
        drive(engine)
        report = engine.plan_report()
        assert report.deviation == deviation
        assert report.last_step_ms == pytest.approx(calls)
        assert f"last step     {calls:,.1f} ms, not as planned: {deviation}" in str(report)
        if "early" in name or "own" in name:  # steps before it ran as planned
            assert report.measured_step_ms == (pytest.approx(CALLS),) * (STEPS - 1)
        else:
            assert report.measured_step_ms == ()
            assert "ms predicted, not measured;" in str(report)
            memory = engine.memory_report()
            assert memory.planned_peak_bytes / 2 < memory.device_peak_bytes <= memory.planned_peak_bytes


def test_several_forward_passes_in_one_loss(clock: Clock) -> None:
    with engine_for(model_of(clock), sgd, config_of(2, None, ONE_PACK_EACH)) as engine:
        data = batches()
        for x, y in zip(data, data, strict=True):
            engine.backward(F.mse_loss(engine(x), engine(y)))
            engine.step()
        report, memory = engine.plan_report(), engine.memory_report()
    assert report.deviation == ""  # four passes: the plan is for as many
    assert report.swapped_bytes == report.planned.total
    assert memory.device_peak_bytes == memory.planned_peak_bytes


# ---- before, between and after steps


def test_memory_is_reported_while_passes_run_early(clock: Clock) -> None:
    with engine_for(model_of(clock), sgd, config_of(ACCUMULATION, None, ONE_PACK_EACH)) as engine:
        assert engine.memory_report().device_peak_bytes == 0
        loss = loss_of(engine(next(batches())))
        loss.item()
        forward_alone = engine.memory_report().device_peak_bytes
        engine.backward(loss)
        assert next(engine.module.parameters()).grad is not None
        memory = engine.memory_report()
        assert 0 < forward_alone < memory.device_peak_bytes <= memory.planned_peak_bytes
        with pytest.raises(RuntimeError, match="no optimizer step has trained"):
            engine.plan_report()


def test_a_step_that_fails_leaves_the_next_one_nothing(clock: Clock) -> None:
    model = model_of(clock)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, ONE_PACK_EACH)) as engine:
        engine.train_batch(batches(), loss_of)
        loss = loss_of(engine(next(batches())))
        loss.item()
        engine.backward(loss)
        clock.fails = True
        with pytest.raises(ValueError, match="the clock is broken"):
            _ = next(model.parameters()).grad
        clock.fails = False
        engine.train_batch(batches(), loss_of)
        report = engine.plan_report()
        assert report.deviation == ""
        assert report.swapped_bytes == report.planned.total
        assert report.measured_step_ms == (pytest.approx(CALLS),)


def test_passes_through_a_frozen_model_are_reported_as_steps(clock: Clock) -> None:
    model = model_of(clock).requires_grad_(False)
    with engine_for(model, None, config_of(1, None, ONE_PACK_EACH)) as engine:
        for x in batches(STEPS):
            loss_of(engine(x.requires_grad_())).backward()
            assert x.grad is not None
        plan, memory, swaps = engine.plan_report(), engine.memory_report(), engine.swap_report()
    assert plan.deviation == ""
    assert swaps.ratio == 1.0
    assert plan.swapped_bytes == plan.planned.total
    assert memory.device_peak_bytes == memory.planned_peak_bytes
    assert plan.measured_step_ms == (pytest.approx(CALLS / ACCUMULATION),) * (STEPS - 1)
