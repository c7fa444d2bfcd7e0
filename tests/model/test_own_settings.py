"""What a pass sets on modules is found, and told apart: its own, or shared by all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds.decomposer import find_layers
from harmony_ds.model.own_settings import ModuleSettings


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self.name, self.factor, self.count, self.mean = "a", 0.7, 0, torch.zeros(2)
        self.scaling, self.tags, self.kept = {"a": 0.7}, ["a"], {"a": torch.zeros(2)}


Act = Callable[[Model], object]
SETTERS: dict[str, tuple[Act, Act, bool]] = {
    "a name": (lambda m: setattr(m, "name", "b"), lambda m: setattr(m, "name", "a"), True),
    "a name that stays": (lambda m: setattr(m, "name", "b"), lambda m: None, True),
    "a mode": (lambda m: m.eval(), lambda m: m.train(), True),
    "a new attribute": (lambda m: setattr(m, "new", []), lambda m: delattr(m, "new"), True),
    "a number": (lambda m: setattr(m, "factor", 0.3 * m.factor), lambda m: setattr(m, "factor", m.factor / 0.3), True),
    "a counter": (lambda m: setattr(m, "count", m.count + 1), lambda m: None, False),
    "an average": (lambda m: setattr(m, "mean", m.mean + 1), lambda m: None, False),
    "a tensor for a while": (lambda m: setattr(m, "name", m.mean + 1), lambda m: setattr(m, "name", "a"), True),
    "contents": (lambda m: m.scaling.update(a=0.21), lambda m: m.scaling.update(a=0.21 / 0.3), True),
    "another list": (lambda m: setattr(m, "tags", ["b"]), lambda m: setattr(m, "tags", ["a"]), True),
    "a list that grows": (lambda m: m.tags.append("b"), lambda m: None, False),
    "a dictionary of tensors": (lambda m: m.kept.update(a=None), lambda m: m.kept.update(a=m.mean), False),
}


def watched() -> tuple[Model, ModuleSettings]:
    model = Model()
    return model, ModuleSettings(list(model.modules()), find_layers(model).layers)


@pytest.mark.parametrize(("set_it", "end", "is_own"), SETTERS.values(), ids=SETTERS)
def test_what_a_pass_sets_is_its_own_or_shared(set_it: Act, end: Act, is_own: bool) -> None:
    model, settings = watched()
    settings.begin()
    set_it(model)
    settings.note_arrival(0)
    end(model)
    settings.end_pass()
    assert settings.no_lane_sets_any is not is_own
    settings.begin()
    set_it(model)
    assert settings.find_unseen(0) == set()  # it is known, or not looked at


PLACES: dict[str, Act] = {
    "outside layers": lambda m: setattr(m, "name", "b"),
    "outside layers, in a container": lambda m: m.scaling.update(a=0.1),
    "on the layer": lambda m: m[1].eval(),
    "on the layer, new": lambda m: setattr(m[1], "tag", "new"),
}


@pytest.mark.parametrize("set_it", PLACES.values(), ids=PLACES)
def test_what_a_lane_sets_is_found_when_it_arrives_at_the_layer(set_it: Act) -> None:
    model, settings = watched()
    settings.begin()
    set_it(model)
    assert settings.find_unseen(1)
    assert not settings.find_unseen(1)


def test_what_a_lane_sets_on_another_layer_is_found_when_it_arrives_there() -> None:
    model, settings = watched()
    settings.begin()
    model[1].eval()
    assert not settings.find_unseen(0)
    assert settings.find_unseen(1)


def test_what_a_layer_sets_in_a_step_is_not_taken_for_its_callers_doing() -> None:
    model, settings = watched()
    settings.begin()
    model[0].seen = "before"
    settings.note_return(0)
    assert not settings.find_unseen(0)
    model[0].seen = "after"
    assert not settings.find_unseen(0)
    assert settings.no_lane_sets_any


def test_what_a_layer_sets_is_shared() -> None:
    model, settings = watched()
    settings.begin()
    settings.note_arrival(0)
    model[0].seen = "before"
    settings.note_return(0)
    settings.note_arrival(1)
    settings.end_pass()
    assert settings.no_lane_sets_any


def test_a_lane_takes_along_what_it_has_set_and_leaves_the_rest_as_it_was() -> None:
    model, settings = watched()
    own: list[Any] = [None, None]
    settings.begin()
    model.name, model.scaling["a"] = "b", 2.0
    settings.note_arrival(0)
    model.name, model.scaling["a"] = "a", 0.7
    settings.end_pass()
    for lane, name in enumerate("xy"):
        engines = settings.enter_lane(None)
        model.name, model.scaling["a"] = name, float(lane)
        own[lane] = settings.read_lane(engines, None)
        settings.leave_lane(engines)
        assert (model.name, model.scaling) == ("a", {"a": 0.7})
    for lane, name in enumerate("xy"):
        engines = settings.enter_lane(own[lane])
        assert (model.name, model.scaling) == (name, {"a": float(lane)})
        assert settings.read_lane(engines, own[lane]) is own[lane]
        settings.leave_lane(engines)
    with own[0].in_force():
        assert (model.name, model.scaling) == ("x", {"a": 0.0})
    settings.left = own[1]
    settings.apply_left()
    assert (model.name, model.scaling) == ("y", {"a": 1.0})


def test_what_a_failed_step_has_set_is_undone() -> None:
    model, settings = watched()
    settings.begin()
    model.name, model[1].tag = "b", "new"
    assert {name for _, name in settings.find_unseen(0)} == {"name"}
    settings.undo()
    assert model.name == "a"
    assert not hasattr(model[1], "tag")
    model.name = "b"  # once more: it is exchanged from now on
    assert settings.find_unseen(0)
    assert not settings.no_lane_sets_any
