"""Steps layer by layer equal one step of all, to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

from harmony_ds import OptimizerError
from harmony_ds.offload.native import gil_free_op, make_native
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.optimizers import Masters
from tests.offload.examples import gradients_for, odd_sizes, stored

Make = Callable[[Any], torch.optim.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, lr_decay=0.1),
}


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases, with other learning rates and weight decays."""
    named = parameters_of(model)
    return [
        {"params": [p for name, p in named.items() if "weight" in name], "lr": 3e-2, "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "bias" in name], "lr": 7e-3, "weight_decay": 0.0},
    ]


def layer_by_layer(host: HostOptimizer, parameters: dict[str, nn.Parameter], step: int) -> None:
    """One step, the last layer first."""
    gradients = gradients_for(parameters, step)
    hyper = host.hyper()
    for layer in ("2", "1", "0"):
        host.step({name: g for name, g in gradients.items() if name.startswith(layer)}, hyper)


def at_once(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], step: int) -> None:
    for name, gradient in gradients_for(parameters, step).items():
        parameters[name].grad = gradient
    optimizer.step()


def hosted(
    make: Make, groups: Callable[[nn.Module], Any] = two_groups
) -> tuple[HostOptimizer, dict[str, nn.Parameter]]:
    model = odd_sizes()
    return HostOptimizer(make(groups(model)), parameters_of(model)), parameters_of(model)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_layer_by_layer_equal_one_step_in_weights_and_state(name: str) -> None:
    plain = odd_sizes()
    optimizer = ELEMENTWISE[name](two_groups(plain))
    host, parameters = hosted(ELEMENTWISE[name])
    before = {key: p.detach().clone() for key, p in parameters.items()}
    for step in range(4):
        at_once(optimizer, parameters_of(plain), step)
        layer_by_layer(host, parameters, step)

    for key, expected in parameters_of(plain).items():
        assert torch.equal(parameters[key], expected), key
        assert not torch.equal(parameters[key], before[key]), key
    state, wanted = host.optimizer.state_dict(), optimizer.state_dict()
    assert state["param_groups"] == wanted["param_groups"]
    assert state["state"].keys() == wanted["state"].keys()
    for index, values in wanted["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][index][key]), torch.as_tensor(value))
    tensors = [value for values in optimizer.state.values() for value in values.values() if value is not None]
    assert host.state_bytes() == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_state_of_steps_before_the_engine_is_that_of_the_masters() -> None:
    model = odd_sizes()
    optimizer = torch.optim.AdamW(model.parameters())
    at_once(optimizer, parameters_of(model), 0)
    states = {name: optimizer.state[p] for name, p in parameters_of(model).items()}
    store = stored(model, torch.bfloat16).store
    Masters(store.parameters, store.masters).adopt(optimizer)
    assert optimizer.state == {store.masters[name]: state for name, state in states.items()}


def test_hyper_parameters_are_those_of_the_time_they_were_read() -> None:
    host, parameters = hosted(lambda groups: torch.optim.SGD(groups, lr=1.0))
    host.optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
    host.optimizer.param_groups[1]["betas"] = [0.9, torch.tensor(0.99)]
    before = parameters["0.weight"].detach().clone()
    hyper = host.hyper()
    host.optimizer.param_groups[0]["lr"] = 100.0
    host.optimizer.param_groups[1]["lr"].fill_(9.0)
    host.optimizer.param_groups[1]["betas"][0] = 9.0
    host.optimizer.param_groups[1]["betas"][1].fill_(9.0)
    host.step({"0.weight": torch.ones_like(before)}, hyper)

    torch.testing.assert_close(parameters["0.weight"].detach(), before - 3e-2 * (1 + 0.1 * before))
    assert host.optimizer.param_groups[0]["lr"] == 100.0
    assert hyper[1]["lr"].item() == 0.5
    assert hyper[1]["betas"] == [0.9, torch.tensor(0.99)]
    assert all(p.grad is None for p in parameters.values())
    assert [len(group["params"]) for group in host.optimizer.param_groups] == [3, 3]


def test_parameters_that_the_optimizer_does_not_have_are_not_trained() -> None:
    model = odd_sizes()
    host = HostOptimizer(torch.optim.SGD(model[0].parameters(), lr=1.0), parameters_of(model))
    before = {name: p.detach().clone() for name, p in parameters_of(model).items()}
    layer_by_layer(host, parameters_of(model), 0)

    changed = {name for name, p in parameters_of(model).items() if not torch.equal(p, before[name])}
    assert changed == {"0.weight", "0.bias"}
    assert [host.trains(name) for name in ("0.bias", "1.bias")] == [True, False]


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, type("LoraFAOptimizer", (torch.optim.SGD,), {})])
def test_those_that_need_all_parameters_are_refused_by_name(cls: Any) -> None:
    model = odd_sizes()
    with pytest.raises(
        OptimizerError, match=rf"{cls.__name__} does not treat parameters one by one.*torch.optim.AdamW"
    ):
        HostOptimizer(cls(model.parameters()), parameters_of(model))


def test_a_foreign_parameter_is_refused_with_its_group_and_shape() -> None:
    model = odd_sizes()
    groups = [{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(2, 7))]}]
    with pytest.raises(OptimizerError, match=r"parameter group 1 holds a parameter of shape \(2, 7\) that is not one"):
        HostOptimizer(torch.optim.SGD(groups, lr=1.0), parameters_of(model))


def test_an_optimizer_around_another_that_shows_its_groups_is_refused_by_name() -> None:
    model = odd_sizes()
    around = type("Lookahead", (torch.optim.SGD,), {"param_groups": property(lambda self: [], lambda self, _: None)})
    with pytest.raises(OptimizerError, match="Lookahead shows the parameter groups of another"):
        HostOptimizer(around(model.parameters()), parameters_of(model))


def test_a_step_that_fails_leaves_no_gradients() -> None:
    class Failing(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no luck")

    host, parameters = hosted(lambda groups: Failing(groups, lr=1.0))
    with pytest.raises(RuntimeError, match="no luck"):
        layer_by_layer(host, parameters, 0)

    assert all(p.grad is None for p in parameters.values())


COMPILED = pytest.mark.skipif(shutil.which(cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler")


def native(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    return make_native("DeepSpeedCPUAdam", list(parameters), options)


@COMPILED
def test_deepspeeds_adam_layer_by_layer_equals_one_step() -> None:
    plain = odd_sizes()
    optimizer = native(two_groups(plain))
    setattr(optimizer, *gil_free_op(optimizer))
    host, parameters = hosted(native)
    for step in range(3):
        at_once(optimizer, parameters_of(plain), step)
        layer_by_layer(host, parameters, step)

    assert all(torch.equal(parameters[name], p) for name, p in parameters_of(plain).items())
    assert set(host.optimizer.state) == set(parameters.values())


@COMPILED
@pytest.mark.parametrize("saved", [2, 8, 18])
def test_deepspeeds_adam_continues_in_a_new_process_to_the_bit(saved: int) -> None:
    host, parameters = hosted(native)
    for step in range(saved):
        layer_by_layer(host, parameters, step)
    later, copies = hosted(native)
    for name, parameter in parameters.items():
        copies[name].data.copy_(parameter.data)
        later.put_state(name, deepcopy(host.state_of(name)))
    for step in range(saved, saved + 3):
        layer_by_layer(host, parameters, step)
        layer_by_layer(later, copies, step)

    assert all(torch.equal(parameters[name], p) for name, p in copies.items())


@COMPILED
def test_gradients_that_deepspeeds_adam_would_misread_are_caught() -> None:
    host, _ = hosted(native)
    with pytest.raises(RuntimeError, match="dtype"):
        host.step({"0.weight": torch.ones(5, 5, dtype=torch.bfloat16)}, host.hyper())
    with pytest.raises(AssertionError):
        host.step({"0.weight": torch.ones(5, 10)[:, ::2]}, host.hyper())


@pytest.mark.parametrize(
    ("make", "numbers"),
    [(torch.optim.AdamW, 2), (torch.optim.SGD, 0), (lambda groups: torch.optim.SGD(groups, momentum=0.9), 1)],
)
def test_unallocated_state_is_allocated_by_the_first_updates(make: Make, numbers: int) -> None:
    model = odd_sizes()
    parameters = parameters_of(model)
    trained = {name: p for name, p in parameters.items() if not name.startswith("1")}
    host = HostOptimizer(make(list(trained.values())), parameters)
    assert host.unallocated_bytes() == 4 * numbers * sum(p.numel() for p in trained.values())
    layer_by_layer(host, parameters, 0)
    assert host.unallocated_bytes() == 0
