"""A loss that the program scales counts as scaled wherever its backward pass comes to, and no other loss does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import UsageError
from tests.engine.drive import config_of, engine_for, random_rows, sgd

SCALE = 8.0
FP16 = {"fp16": {"enabled": True, "loss_scale": SCALE}}


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden), hidden


def batch(number: int) -> Tensor:
    return random_rows(number, 2, 4).half()


def loss_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].float().square().mean() + outputs[1].float().abs().mean()


def of_two_outputs_of_which_one_was_read(model: Any) -> Tensor:
    outputs = model(batch(0))
    outputs[0].sum().item()
    return loss_of(outputs)


def product_of_two_calls(model: Any) -> Tensor:
    return loss_of(model(batch(0))) * loss_of(model(batch(1)))


def sum_of_two_calls(model: Any) -> Tensor:
    return loss_of(model(batch(0))) + loss_of(model(batch(1)))


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("make", [of_two_outputs_of_which_one_was_read, product_of_two_calls, sum_of_two_calls])
def test_a_scaled_loss_is_one_backward_pass_however_many_outputs_it_comes_to(make: Callable[[Any], Tensor]) -> None:
    plain = TwoOutputs().half()
    (make(plain) * SCALE).backward()
    model = TwoOutputs()
    with engine_for(model, sgd, config_of(1, **FP16)) as engine:
        engine.scale(make(engine)).backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert expected is not None and parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected.float() / SCALE, rtol=2e-3, atol=1e-4)
        loss = loss_of(engine(batch(2)))
        with pytest.raises(UsageError, match="Loss scaling is required"):
            loss.backward()  # the scaled one has had its backward pass


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_a_loss_of_two_calls_that_was_propagated_back_from_can_be_read() -> None:
    plain = TwoOutputs().half()
    expected = product_of_two_calls(plain).item()
    with engine_for(TwoOutputs(), sgd, config_of(1, **FP16)) as engine:
        loss = product_of_two_calls(engine)
        engine.backward(loss)
        assert loss.item() == pytest.approx(expected, rel=1e-3)
        engine.step()
        assert engine.was_step_applied()
