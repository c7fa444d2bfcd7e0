"""Values of a checkpoint: whatever is written as JSON is read back as it was, and every tensor is its own."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from harmony_ds import CheckpointError
from harmony_ds.checkpoint.tree import decode, encode

TEXT = st.one_of(st.text(max_size=4), st.sampled_from(["$tensor", "$", "$tuple", "a.b", "keys", "0"]))
HASHABLE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT, st.binary(max_size=4)),
    lambda children: st.one_of(st.lists(children, max_size=2).map(tuple), st.frozensets(children, max_size=2)),
    max_leaves=4,
)
PLAIN = st.one_of(
    HASHABLE,
    st.floats(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.integers(0, 99).map(lambda value: torch.tensor([value])),
)
VALUES = st.recursive(
    PLAIN,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.sets(HASHABLE, max_size=3),
        st.dictionaries(TEXT, children, max_size=3),
        st.dictionaries(HASHABLE, children, max_size=3),
    ),
    max_leaves=10,
)


def through_json(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "state", tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


def same(a: Any, b: Any) -> bool:
    """The same types all through and equal values; numbers that are none are equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a) and all(map(same, a, b))
    return bool(a == b)


@given(VALUES)
@example({"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}})  # two places of one name
@example({1: torch.tensor(1), "1": torch.tensor(2)})
@example({frozenset({1}): "a key"})
def test_what_is_written_is_read(value: Any) -> None:
    assert same(through_json(value), value)


@given(st.dictionaries(TEXT, st.just(object()), min_size=1, max_size=2))
def test_what_cannot_be_written_is_refused_by_its_place(value: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"state\.(.|\n)* is object, which a checkpoint cannot hold"):
        encode(value, "state", {})


def test_a_mark_and_a_tensor_that_nobody_knows_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"marked '\$later'"):
        decode({"$later": 1}, {})
    with pytest.raises(CheckpointError, match=r"the tensor state\.x is missing"):
        decode({"$tensor": "state.x"}, {})


def test_a_tensor_that_is_read_is_a_copy() -> None:
    kept = {"x": torch.ones(2)}
    decode({"$tensor": "x"}, kept).add_(1)
    assert kept["x"].tolist() == [1.0, 1.0]
