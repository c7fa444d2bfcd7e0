"""What the program changes of a model between two calls is found: the state of the second is another one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds import ModelError
from harmony_ds.model.contract import Contract


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.scale, self.mask = 1.0, torch.ones(2)
        self.config = SimpleNamespace(scale=1.0)
        self.scaling, self.results = {"default": 1.0}, [0.5]


CHANGES: dict[str, Callable[[Model], object]] = {
    "an attribute": lambda m: setattr(m, "scale", 2.0),
    "an attribute of a submodule": lambda m: setattr(m.layer, "tag", "new"),
    "an attribute that is gone": lambda m: delattr(m, "scale"),
    "one attribute in the place of another": lambda m: (delattr(m, "scale"), setattr(m, "factor", 1.0)),
    "a tensor that is written to": lambda m: m.mask.zero_(),
    "a buffer that is written to": lambda m: m.norm.running_mean.add_(1.0),
    "another buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(2)),
    "a buffer of a module that had none": lambda m: m.layer.register_buffer("shift", torch.ones(2)),
    "another submodule": lambda m: setattr(m, "layer", nn.Linear(2, 2)),
    "one submodule more": lambda m: setattr(m, "more", nn.Linear(2, 2)),
    "a wrapper around forward": lambda m: setattr(m, "_old_forward", m.forward),
    "an entry of a configuration": lambda m: setattr(m.config, "scale", 2.0),
    "another configuration": lambda m: setattr(m, "config", SimpleNamespace(scale=2.0)),
    "an element of a dictionary": lambda m: m.scaling.update(default=2.0),
    "an element of a list": lambda m: m.results.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_found(change: Callable[[Model], object]) -> None:
    model: Any = Model()
    contract = Contract(model)
    before = contract.read_state()
    assert contract.read_state().attributes is before.attributes
    change(model)
    with pytest.raises(ModelError, match="was changed between the calls of a step"):
        contract.check([before])
    now = contract.read_state()
    assert now.attributes is not before.attributes
    assert contract.read_state().attributes is now.attributes
    contract.check([now])


@pytest.mark.parametrize("collect", [lambda m: m.results.append(1.0), lambda m: m.results.append(torch.ones(2))])
def test_a_list_may_collect_results_between_two_calls(collect: Callable[[Model], object]) -> None:
    model = Model()
    contract = Contract(model)
    before = contract.read_state()
    collect(model)
    contract.check([before])


def test_measuring_leaves_configurations_as_they_were() -> None:
    model = Model()
    contract = Contract(model)
    with contract.reverting():
        model.config.scale, model.config.problem_type = 2.0, "regression"
    assert vars(model.config) == {"scale": 1.0}


@pytest.mark.parametrize("change", [lambda m: m.eval(), lambda m: m.layer.weight.requires_grad_(False)])
def test_modes_are_found_apart_from_attributes(change: Callable[[Model], object]) -> None:
    model = Model()
    contract = Contract(model)
    before = contract.read_state()
    change(model)
    now = contract.read_state()
    assert now.attributes is before.attributes
    assert now.modes != before.modes


def test_measurements_depend_on_flags_and_words_and_not_on_numbers() -> None:
    model: Any = Model()
    model.uses_mask, model.mode = False, "first"
    contract = Contract(model)
    flags = contract.read_state().modes.flags
    model.scale = 2.0
    assert contract.read_state().modes.flags == flags
    model.uses_mask = True
    other = contract.read_state().modes.flags
    model.mode = "second"
    assert len({flags, other, contract.read_state().modes.flags}) == 3
    model.uses_mask, model.mode = False, "first"
    assert contract.read_state().modes.flags == flags


def test_a_flag_that_forward_sets_is_no_mode() -> None:
    model: Any = Model()
    model.has_run = False
    contract = Contract(model)
    contract.read_state()
    with contract.running():
        model.has_run = True
    modes = contract.read_state().modes
    model.has_run = False
    assert contract.read_state().modes.flags == modes.flags
