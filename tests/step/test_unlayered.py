"""Parameters that no layer call covers, through steps with looks and evaluations between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.runtime.micro_batch import OffPlanError
from harmony_ds.scheduler.plan import Task, TaskKind
from tests.engine.drive import adamw, config_of, engine_for, random_rows, sgd, weights_of
from tests.families import build_seeded
from tests.oracle import assert_same
from tests.runtime import test_timeline as timeline

pytestmark = pytest.mark.fixed_times


class Net(timeline.Net):
    """Has a parameter that the model does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


BATCHES = [random_rows(seed, 4, 16) for seed in range(6)]


def plainly(clip: float) -> dict[str, Tensor]:
    model = build_seeded(Net)
    optimizer = adamw(model.parameters())
    for step in (BATCHES[:3], BATCHES[3:]):
        for inputs in step:
            (model(inputs) / 3).backward()
        (model.unused.sum() / 10).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize(
    ("clip", "looks", "evaluates"), [(0.0, False, True), (0.0, True, False), (0.05, False, False), (0.05, True, True)]
)
def test_their_gradients_are_those_of_plain_accumulation(clip: float, looks: bool, evaluates: bool) -> None:
    model = build_seeded(Net)
    with engine_for(model, adamw, config_of(3, clip, {"pack_layers": 1})) as engine:
        for step in (BATCHES[:3], BATCHES[3:]):
            for place, inputs in enumerate(step):
                loss = engine(inputs)
                if place == 1:
                    loss.item()
                if evaluates:  # between a forward pass and its backward pass
                    engine.eval_batch(iter([BATCHES[0]]))
                engine.backward(loss)
                if looks and place == 2:
                    assert model.scale.grad is not None
                if place == 2:
                    (model.unused.sum() / 10).backward()
                engine.step()
        found = weights_of(model)

    assert_same(found, plainly(clip), bitwise=True)


class Scaled(nn.Module):
    """Three layers, and a parameter that the code between them uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(inputs)) * self.scale
        hidden = torch.tanh(self.b(hidden)) * self.scale
        return self.c(hidden).square().mean()


ERRORS: list[Callable[[], BaseException]] = [OffPlanError, lambda: torch.OutOfMemoryError("out of memory")]


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("error", ERRORS, ids=["off plan", "out of memory"])
@pytest.mark.parametrize("dtype", [None, "fp32"], ids=["in place", "beside"])
def test_a_loss_that_was_read_trains_them_though_another_micro_batch_ran_again(
    error: Callable[[], BaseException], dtype: str | None
) -> None:
    model, plain = build_seeded(Scaled), build_seeded(Scaled)
    inputs = [random_rows(seed, 2, 4) for seed in range(2)]
    masters: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}} if dtype else {}
    errors = [error()]

    def fail_once_in_backward(done: int, total: int, task: Task) -> None:
        if errors and task.kind is TaskKind.FUSED:
            raise errors.pop()

    harmony = {"layers": ["a", "b", "c"], "device_memory_gib": 1.0, "pack_layers": 3}
    if dtype:
        plain.bfloat16()
        inputs = [one.bfloat16() for one in inputs]
    with engine_for(model, sgd, config_of(2, None, harmony, **masters)) as engine:
        read = engine(inputs[0])
        read.item()
        engine.backward(engine(inputs[1]))
        engine.on_progress(fail_once_in_backward)
        assert model.scale.grad is not None and not errors
        engine.on_progress(None)
        engine.backward(read)
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
    sums: dict[str, Tensor] = {}
    for one in (inputs[1], inputs[0]):
        (plain(one) / 2).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            if dtype:
                sums[name] = sums.get(name, torch.zeros(())) + parameter.grad.float()
                parameter.grad = None
            else:
                sums[name] = parameter.grad
    # On the leaf, both uses of `scale` in a micro-batch are added to the sum of those before, one by one.
    assert_same(found, sums, bitwise=dtype is not None)
