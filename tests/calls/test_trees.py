"""Nested arguments come apart and together again, dataclasses that torch does not know included."""

from __future__ import annotations

import collections
import gc
import threading
import weakref
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from harmony_ds.calls.trees import Contents, changed, flatten, map_tensors, tensors_in, unflatten


@dataclass
class Carried:
    hidden: Tensor
    rest: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    memory: Tensor
    label: str = "x"


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)
TREES = [
    A,
    None,
    3,
    (A, [B, {"c": C}]),
    {"a": A, "n": None, "s": "text", "i": 3},
    Pair(A, B),
    collections.OrderedDict(z=A, a=B),
    Carried(A),
    Carried(A, {"b": [B, Frozen(C)]}),
    (Carried(A, Carried(B)), Frozen(C)),
    [],
    {},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_flattening_comes_back(tree: Any) -> None:
    leaves, shape = flatten(tree)
    back = unflatten(leaves, shape)

    assert type(back) is type(tree)
    again, _ = flatten(back)
    assert len(again) == len(leaves)
    assert all(a is b for a, b in zip(again, leaves, strict=True))


def test_tensors_are_found_in_order_wherever_they_are() -> None:
    tree = (A, {"x": Carried(B, [Frozen(C)])})

    assert [tensor.numel() for tensor in tensors_in(tree)] == [1, 2, 3]
    assert tensors_in({"n": None, "s": "text"}) == []


def test_mapping_leaves_the_original_alone() -> None:
    original = Carried(A, (B, Frozen(C, label="kept"), "text"))
    doubled = map_tensors(lambda t: t * 2, original)

    assert doubled.hidden.tolist() == [2.0]
    assert doubled.rest[0].tolist() == [2.0, 2.0]
    assert doubled.rest[1].memory.tolist() == [2.0, 2.0, 2.0]
    assert doubled.rest[1].label == "kept"
    assert doubled.rest[2] == "text"
    assert original.hidden is A
    assert original.rest[1].memory is C


def test_attributes_that_are_no_fields_are_kept() -> None:
    original = Carried(A)
    original.extra = "kept"  # type: ignore[attr-defined]

    assert map_tensors(torch.neg, original).extra == "kept"


def test_a_dataclass_type_is_a_leaf() -> None:
    leaves, shape = flatten([Carried, A])

    assert leaves == [Carried, A]
    assert unflatten(leaves, shape) == [Carried, A]


def test_fields_that_are_computed_are_not_asked_of_the_constructor() -> None:
    @dataclass
    class Checked:
        value: Tensor

        def __post_init__(self) -> None:
            assert isinstance(self.value, Tensor)

    leaves, shape = flatten(Checked(A))
    assert unflatten([None], shape).value is None
    assert leaves == [A]


class Plain:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def test_objects_of_any_class_are_opened() -> None:
    original = Plain(a=A, rest=SimpleNamespace(b=[B]), words=UserDict(c=C))
    doubled = map_tensors(lambda t: t * 2, original)

    assert [t.numel() for t in tensors_in(original)] == [1, 2, 3]
    assert type(doubled) is Plain
    assert doubled.rest.b[0].tolist() == [2.0, 2.0]
    assert doubled.words["c"].tolist() == [2.0] * 3
    assert original.rest.b[0] is B


def test_modules_types_functions_and_a_librarys_settings_are_leaves() -> None:
    tree = [torch.nn.Linear(1, 1), Plain, len, LlamaConfig(), threading.Lock(), torch.Size([1])]
    assert flatten(tree)[0] == tree


def test_aliases_stay_aliases_and_cycles_end() -> None:
    shared = [A]
    tree = Plain(left=shared, right={"same": shared})
    tree.itself = tree
    leaves, shape = flatten(tree)
    back = unflatten(leaves, shape)

    assert leaves == [A]
    assert back.itself is back
    assert back.left is back.right["same"]
    assert back.left is not shared


def test_what_is_written_into_fresh_containers_is_given_back_to_the_originals() -> None:
    original = Plain(notes=[A], words={"a": 1}, seen={2}, still=[B])
    leaves, shape = flatten((original, A))
    made: list[Contents] = []
    fresh, _ = unflatten(leaves, shape, made)
    fresh.notes.append(B)
    fresh.words["b"] = fresh.notes
    fresh.seen.add(3)
    fresh.more = C

    written = changed(made)
    assert original.notes == [A]
    values, values_shape = flatten([one.children for one in written], {id(m.value): m.branch.original for m in made})
    for into, children in zip(written, unflatten(values, values_shape), strict=True):
        into.give_back(children)
    assert original.notes == [A, B]
    assert original.words["b"] is original.notes
    assert original.seen == {2, 3}
    assert original.more is C
    assert len(written) == 4


def test_a_container_that_comes_back_as_it_is_is_not_opened() -> None:
    inner, other = [A], [B]
    leaves, shape = flatten([inner, C], {id(inner): other})

    assert leaves == [C]
    assert unflatten(leaves, shape)[0] is other


def test_too_few_leaves_are_an_error() -> None:
    _, shape = flatten((A, B))
    with pytest.raises(IndexError):
        unflatten([A], shape)


def test_nothing_is_kept_by_a_cycle() -> None:
    gc.disable()
    try:
        tensor = torch.ones(4)
        seen = weakref.ref(tensor)
        leaves, shape = flatten({"a": [tensor]})
        del tensor
        unflatten(leaves, shape)
        del leaves, shape
        assert seen() is None
    finally:
        gc.enable()


def test_a_shape_that_has_forgotten_its_originals_keeps_no_tensor() -> None:
    tensor = torch.ones(4)
    seen = weakref.ref(tensor)
    shape = flatten(((tensor,), [tensor], {"a": Carried(tensor)}, Pair(tensor, tensor)))[1]
    shape.forget_originals()
    del tensor
    assert seen() is None
