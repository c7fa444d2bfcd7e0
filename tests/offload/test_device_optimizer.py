"""What a step on the device takes and does, and how optimizer state goes to and fro."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds.errors import OptimizerError
from harmony_ds.offload.device_optimizer import DeviceOptimizer, Footprint, Lion
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.watched_state import WatchedState
from tests.offload.examples import gradients_for

CPU = torch.device("cpu")
SHAPE = torch.Size((100, 10))


def pair(make: Any) -> tuple[HostOptimizer, DeviceOptimizer, dict[str, nn.Parameter]]:
    model = nn.Linear(10, 100)
    parameters = dict(model.named_parameters())
    host = HostOptimizer(make(list(parameters.values())), parameters)
    return host, DeviceOptimizer(host, CPU), parameters


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), Footprint(4096, 0)),
        (torch.optim.AdamW, Footprint(2 * 4096 + 512, 8000)),
        (torch.optim.Adagrad, Footprint(4096 + 512, 4000)),
    ],
)
def test_the_footprint_is_found_without_memory(make: Any, expected: Footprint) -> None:
    _, device, _ = pair(make)
    assert device.footprint("weight", SHAPE) == expected


class Refusing(torch.optim.SGD):
    elementwise = True

    def step(self, closure: Any = None) -> None:
        raise ValueError("not now")


def test_an_optimizer_that_cannot_be_asked_is_refused() -> None:
    _, device, _ = pair(lambda p: Refusing(p, lr=1.0))
    with pytest.raises(OptimizerError, match=r"takes on the device cannot be found out: ValueError\('not now'\)"):
        device.footprint("weight", SHAPE)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad])
def test_steps_on_host_and_device_in_turn_are_those_of_one_optimizer(make: Any) -> None:
    host, device, parameters = pair(make)
    plain = copy.deepcopy(parameters)
    optimizer = make(list(plain.values()))
    on_device = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    for step in range(4):
        gradients = gradients_for(parameters, step)
        for name, parameter in plain.items():
            parameter.grad = gradients[name].clone()
        optimizer.step()
        if step % 2:
            host.step(gradients, host.hyper())
            for name, parameter in parameters.items():
                on_device[name].data.copy_(parameter)
        else:
            for name, parameter in on_device.items():
                device.copy_state_to_device(name, parameter)
            device.step(on_device, gradients, host.hyper())
            for name, parameter in on_device.items():
                parameters[name].data.copy_(parameter)
                device.copy_state_to_host(name, parameter)
    assert all(torch.equal(parameters[name], plain[name]) for name in plain)


def test_lion_is_that_of_the_paper_and_moves_where_there_is_no_direction() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = Lion([parameter])
    optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.25), weight_decay=0.5)
    parameter.grad = torch.tensor([4.0, -4.0, 0.0])
    optimizer.step()
    assert parameter.tolist() == [0.75 - 0.5, 1.5 + 0.5, 2.25 - 0.5]
    assert optimizer.state[parameter]["exp_avg"].tolist() == [3.0, -3.0, 0.0]


def test_a_watched_state_asks_before_it_answers() -> None:
    looked: list[Any] = []
    state = WatchedState({1: "one", 2: "two"}, looked.append)
    assert state[1] == "one"
    assert list(state) == [1, 2]
    assert 2 in state
    assert [key for key in looked if key is not None] == [1, 2]
    assert type(copy.deepcopy(state)) is dict
