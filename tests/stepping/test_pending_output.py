"""Outputs that wait are an instance of what the model returns, whatever is done to them."""

# ruff: noqa: C416, PLC3002, PLW0108

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from harmony_ds.errors import ModelError
from harmony_ds.stepping.pending import PendingLoss
from harmony_ds.stepping.pending_output import OutputForm
from tests.stepping.test_pending import Outputs, pending


@dataclasses.dataclass
class Plain:
    loss: Tensor
    logits: Tensor

    @property
    def twice(self) -> Tensor:
        return 2 * self.logits


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    loss: Tensor
    logits: Tensor


class Object:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


@dataclasses.dataclass
class Model(ModelOutput):  # type: ignore[misc]
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None


CLASSES: list[Any] = [dict, Outputs, collections.OrderedDict, Model, Plain, Slotted, Object]
MAPPINGS = [dict, collections.OrderedDict, Model]


def waiting(cls: Any) -> tuple[Any, Any, list[str]]:
    """Outputs that wait, the real ones, and what was looked at."""
    looked: list[str] = []
    loss, _ = pending()
    real = cls(loss=torch.tensor(6.0), logits=torch.ones(2))
    form = OutputForm.of(real, real["loss"] if isinstance(real, dict) else real.loss)
    assert form is not None
    return form.pending(loss, lambda: looked.append("outputs") or real), real, looked


def logits_of(outputs: Any) -> Any:
    return outputs["logits"] if isinstance(outputs, dict) else outputs.logits


@pytest.mark.parametrize("cls", CLASSES)
def test_outputs_are_of_the_models_own_class(cls: Any) -> None:
    output, real, looked = waiting(cls)

    assert isinstance(output, cls)
    assert output.__class__ is cls
    assert isinstance(output, dict) is isinstance(real, dict)
    assert isinstance(output, collections.abc.Mapping) is isinstance(real, collections.abc.Mapping)
    assert dataclasses.is_dataclass(output) is dataclasses.is_dataclass(real)
    assert not looked
    assert logits_of(output) is logits_of(real)
    assert looked == ["outputs"]
    assert isinstance(output, cls)
    assert type(output) is cls or cls in (dict, collections.OrderedDict, Slotted)


@pytest.mark.parametrize("cls", MAPPINGS)
@pytest.mark.parametrize(
    "look",
    [
        lambda o: list(o.keys()),
        lambda o: list(o.items()),
        lambda o: list(o.values()),
        lambda o: dict(o),
        lambda o: {**o},
        lambda o: (lambda **named: named)(**o),
        lambda o: [*o],
        lambda o: {}.__class__(o, more=1),
        lambda o: "logits" in o,
        lambda o: len(o),
        lambda o: bool(o),
        lambda o: o.get("logits"),
        lambda o: o.get("nothing", 3),
        lambda o: o == o,
        lambda o: {} | dict(o),
        lambda o: [leaf for leaf in torch.utils._pytree.tree_leaves(o)],
        lambda o: torch.utils._pytree.tree_map(lambda leaf: leaf + 1, o),
        lambda o: type(o)({key: value for key, value in o.items()}),
        lambda o: copy.copy(o),
        lambda o: copy.deepcopy(o),
        lambda o: pickle.loads(pickle.dumps(o)),
        lambda o: repr(list(o)),
        lambda o: o.pop("logits") if not isinstance(o, Model) else None,
        lambda o: o.update(logits=1) if not isinstance(o, Model) else None,
    ],
)
def test_whatever_is_done_to_a_mapping_gives_what_the_real_one_gives(cls: Any, look: Callable[[Any], Any]) -> None:
    output, real, _ = waiting(cls)
    found, expected = look(output), look(copy.copy(real))

    assert repr(found) == repr(expected)
    assert repr(dict(output.items())) == repr(dict(output))


@pytest.mark.parametrize("cls", [Model, Plain, Slotted])
def test_dataclasses_are_taken_apart_as_the_real_ones_are(cls: Any) -> None:
    for look in (
        lambda o: [field.name for field in dataclasses.fields(o)],
        lambda o: dataclasses.replace(o, logits=None),
        lambda o: type(o)(loss=None, logits=o.logits),
        lambda o: copy.copy(o),
        lambda o: o.to_tuple() if cls is Model else None,
        lambda o: o[:2] if cls is Model else None,
        lambda o: o.twice if cls is Plain else None,
    ):
        output, real, _ = waiting(cls)
        assert repr(look(output)) == repr(look(real))


def test_the_loss_is_found_without_a_look() -> None:
    for cls, ways in {
        dict: [lambda o: o["loss"], lambda o: o.get("loss")],
        Model: [lambda o: o["loss"], lambda o: o[0], lambda o: o.loss, lambda o: o.get("loss")],
        Plain: [lambda o: o.loss],
    }.items():
        for way in ways:
            output, _, looked = waiting(cls)
            assert isinstance(way(output), PendingLoss)
            assert not looked


@pytest.mark.parametrize("cls", [Model, Plain, Object])
def test_what_is_put_on_outputs_stays(cls: Any) -> None:
    output, real, _ = waiting(cls)
    output.logits = 3
    output.more = 4

    assert (output.logits, output.more, output.loss) == (3, 4, real.loss)


def test_what_wraps_a_forward_keeps_the_class() -> None:
    output, _, _ = waiting(Model)

    assert type(accelerate.utils.convert_to_fp32(output)) is Model


def test_a_model_that_returns_something_else_later_says_so() -> None:
    loss, _ = pending()
    real = Plain(torch.tensor(6.0), torch.ones(2))
    form = OutputForm.of(real, real.loss)
    assert form is not None
    output = form.pending(loss, lambda: Object(torch.tensor(6.0), torch.ones(2)))
    with pytest.raises(ModelError, match="returned a Object where it returned a Plain"):
        _ = output.logits
