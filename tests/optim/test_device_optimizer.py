"""Optimizer steps on the device: their results, their memory, and state copied to and from the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds.device.live_bytes import LiveBytes
from harmony_ds.optim.device_optimizer import DeviceOptimizer, _laid_out
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.synced_state import SyncedState
from tests.offload.examples import gradients_for

CPU = torch.device("cpu")
SHAPE = torch.Size((100, 10))


def pair(make: Any) -> tuple[HostOptimizer, DeviceOptimizer, dict[str, nn.Parameter]]:
    model = nn.Linear(10, 100)
    parameters = dict(model.named_parameters())
    host = HostOptimizer(make(list(parameters.values())), parameters)
    return host, DeviceOptimizer(host, CPU), parameters


@pytest.mark.parametrize(
    ("make", "state", "working"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), 0, 0),
        (
            lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
            4096,
            12000,
        ),
        (torch.optim.AdamW, 2 * 4096 + 512, 8000),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True), 3 * 4096 + 512, 12000),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1, maximize=True), 4096 + 512, 12000),
    ],
)
def test_no_step_needs_more_memory_than_predicted(make: Any, state: int, working: int) -> None:
    host, device, _ = pair(make)
    assert device.refusal is None
    assert device.state_bytes("weight", 1000) == state
    assert device.working_bytes("weight", 1000) == working
    on_device = {"weight": nn.Parameter(torch.zeros(SHAPE))}
    gradients = {"weight": torch.ones(SHAPE)}
    device.copy_state_to_device("weight", on_device["weight"])
    probe = LiveBytes()
    for _ in range(8):
        with probe:
            probe.reset_peak()
            before = probe.allocated_bytes()
            device.step(on_device, gradients, host.hyper())
            assert probe.peak_bytes() - before <= working + (state if before == 0 else 0)
    kept = device.state[on_device["weight"]].values()
    assert sum(-(-value.nbytes // 512) * 512 for value in kept if isinstance(value, torch.Tensor)) == state


class Own(torch.optim.SGD):
    elementwise = True

    def step(self, closure: Any = None) -> None:
        super().step()


@pytest.mark.parametrize("make", [lambda p: Own(p, lr=1.0), torch.optim.RMSprop])
def test_an_optimizer_whose_memory_is_not_known_is_refused(make: Any) -> None:
    assert "takes is not known" in (pair(make)[1].refusal or "")


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad])
def test_alternating_steps_on_host_and_device_equal_those_of_one_optimizer(make: Any) -> None:
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


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), torch.optim.AdamW])
def test_fused_steps_take_parameters_whose_first_gradient_comes_later(make: Any) -> None:
    """torch's fused optimizers, as they run on CUDA, run on the CPU, too."""
    host, device, parameters = pair(make)
    device._fused, device._on_host = True, False
    plain = copy.deepcopy(parameters)
    optimizer = make(list(plain.values()))
    for step in range(3):
        gradients = gradients_for(parameters, step)
        if step == 0:
            del gradients["bias"]  # of an expert that no token has come to
        for name, parameter in plain.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        optimizer.step()
        device.step(parameters, gradients, host.hyper())
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, plain[name])


def test_fused_steps_are_given_gradients_with_the_strides_of_parameters() -> None:
    host, device, parameters = pair(lambda p: torch.optim.SGD(p, lr=1.0))
    device._fused, device._on_host = True, False
    weight, bias = parameters["weight"].detach().clone(), parameters["bias"].detach().clone()
    columns, row = torch.randn(10, 100).t(), torch.randn(100)
    device.step(parameters, {"weight": columns, "bias": row}, host.hyper())
    assert torch.equal(parameters["weight"], weight - columns) and torch.equal(parameters["bias"], bias - row)
    one_by_one = torch.randn(6, 4).as_strided((6, 4, 1, 1), (4, 1, 4, 4))
    laid_out = _laid_out(one_by_one)
    assert laid_out.stride() == (4, 1, 1, 1) and laid_out.data_ptr() == one_by_one.data_ptr()


def test_a_synced_state_is_synced_before_it_is_read() -> None:
    looked: list[object] = []
    state = SyncedState({1: "one", 2: "two"}, looked.append)
    assert state[1] == "one"
    assert 2 in state
    assert state.get(3) is None
    assert set(looked) == {1, 2, 3}
    assert list(state) == [1, 2]
    assert None in looked  # of all
    assert type(copy.deepcopy(state)) is dict
