"""Outputs that wait are an instance of what the model returns, whatever is done to them."""

# ruff: noqa: PLW0108

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from harmony_ds.stepping.output_kinds import OutputKind
from harmony_ds.stepping.pending import PendingLoss
from tests.stepping.test_pending import pending


class Outputs(dict[str, Any]):
    """As transformers' ModelOutput: attributes, keys, and a tuple's places."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


@dataclasses.dataclass
class Plain:
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


CLASSES: list[Any] = [dict, Outputs, Model, Plain, Object]


def waiting(cls: Any) -> tuple[Any, Any, list[str]]:
    """Outputs that wait, the real ones, and what was looked at."""
    looked: list[str] = []
    loss, _ = pending()
    real = cls(loss=torch.tensor(6.0), logits=torch.ones(2))
    return OutputKind.of(real).outputs(loss, lambda: looked.append("outputs") or real), real, looked


def logits_of(outputs: Any) -> Any:
    return outputs["logits"] if isinstance(outputs, dict) else outputs.logits


@pytest.mark.parametrize("cls", CLASSES)
def test_outputs_are_of_the_models_own_class(cls: Any) -> None:
    output, real, looked = waiting(cls)

    assert isinstance(output, cls)
    assert dataclasses.is_dataclass(output) is dataclasses.is_dataclass(real)
    assert not looked
    assert logits_of(output) is logits_of(real)
    assert looked == ["outputs"]
    assert isinstance(output, cls)


WAYS: list[tuple[Any, list[Callable[[Any], Any]]]] = [
    (dict, [lambda o: o["loss"], lambda o: o.get("loss")]),
    (Outputs, [lambda o: o.loss, lambda o: o["loss"], lambda o: o[0]]),
    (Model, [lambda o: o.loss, lambda o: o["loss"], lambda o: o[0], lambda o: o.get("loss")]),
    (Plain, [lambda o: o.loss]),
]


@pytest.mark.parametrize(("cls", "way"), [(cls, way) for cls, ways in WAYS for way in ways])
def test_the_loss_is_found_without_a_look(cls: Any, way: Callable[[Any], Any]) -> None:
    output, _, looked = waiting(cls)

    assert isinstance(way(output), PendingLoss)
    assert isinstance(output, Plain) or "loss" in output
    assert not looked


@pytest.mark.parametrize("cls", [dict, Model])
@pytest.mark.parametrize(
    "look",
    [
        lambda o: list(o),
        lambda o: list(o.items()),
        lambda o: {**o},
        lambda o: "logits" in o,
        lambda o: "hidden" in o,
        lambda o: len(o),
        lambda o: o.get("nothing", 3),
        lambda o: torch.utils._pytree.tree_map(lambda leaf: leaf + 1, o),
        lambda o: copy.copy(o),
        lambda o: copy.deepcopy(o),
        lambda o: pickle.loads(pickle.dumps(o)),
    ],
)
def test_whatever_is_done_to_a_mapping_gives_what_the_real_one_gives(cls: Any, look: Callable[[Any], Any]) -> None:
    output, real, _ = waiting(cls)

    assert repr(look(output)) == repr(look(copy.copy(real)))


@pytest.mark.parametrize("cls", [Model, Plain, Object])
def test_what_is_put_on_outputs_stays(cls: Any) -> None:
    output, real, _ = waiting(cls)
    output.logits = 3
    output.more = 4

    assert (output.logits, output.more, output.loss) == (3, 4, real.loss)


def test_what_the_outputs_do_not_have_is_their_error() -> None:
    output, _, looked = waiting(Outputs)
    assert not hasattr(output, "__array__")
    assert not looked
    with pytest.raises(KeyError, match="hidden"):
        _ = output.hidden


def test_a_loss_that_is_not_first_is_not_found_by_its_place() -> None:
    real = Outputs(logits=torch.ones(2), loss=torch.tensor(6.0))
    output = OutputKind.of(real).outputs(pending()[0], lambda: real)

    assert isinstance(output["loss"], PendingLoss)
    assert output[0] is real["logits"]
