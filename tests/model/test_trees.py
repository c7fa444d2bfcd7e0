"""Nested arguments to leaves and back, dataclasses included that torch does not know."""

from __future__ import annotations

import collections
import gc
import types
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from harmony_ds.errors import UnsupportedError
from harmony_ds.model.trees import flatten, map_tensors, tensors_in, unflatten


@dataclass
class Carried:
    hidden: Any
    rest: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    memory: Any
    label: Any = "x"


class Pair(NamedTuple):
    left: Any
    right: Any


LEAVES = st.one_of(
    st.integers(0, 9).map(lambda value: torch.tensor([value])), st.sampled_from([None, True, -3, 0.5, "text"])
)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(children, max_size=3)
    named = st.dictionaries(st.sampled_from("abcd"), children, max_size=3)
    return st.one_of(
        some,
        some.map(tuple),
        some.map(lambda items: collections.deque(items, maxlen=5)),
        named,
        named.map(collections.OrderedDict),
        named.map(types.MappingProxyType),
        named.map(lambda items: collections.defaultdict(list, items)),
        st.builds(Carried, children, children),
        st.builds(Frozen, children, children),
        st.builds(Pair, children, children),
        children.map(lambda child: {"left": child, "right": (child,)}),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)


def parts(value: Any) -> list[Any] | None:
    """Return a container's children without keys; None for a leaf."""
    if isinstance(value, (dict, types.MappingProxyType)):
        return list(value.values())
    if isinstance(value, (list, tuple, collections.deque)):
        return list(value)
    if isinstance(value, Carried):
        return [value.hidden, value.rest]
    return [value.memory, value.label] if isinstance(value, Frozen) else None


def same(a: Any, b: Any) -> bool:
    """Return whether two trees have the same types and the same leaves, tensors by identity."""
    mine, others = parts(a), parts(b)
    if mine is None or others is None:
        return a is b if isinstance(a, Tensor) else type(a) is type(b) and a == b
    keys = [list(one) if isinstance(one, (dict, types.MappingProxyType)) else None for one in (a, b)]
    return type(a) is type(b) and keys[0] == keys[1] and len(mine) == len(others) and all(map(same, mine, others))


def walked(value: Any) -> list[Any]:
    """Leaves as a walk meets them."""
    held = parts(value)
    return [value] if held is None else [leaf for part in held for leaf in walked(part)]


@given(TREES)
def test_flattening_and_unflattening_gives_equal_trees_in_fresh_containers(tree: Any) -> None:
    leaves, shape = flatten(tree)
    found = walked(tree)
    assert len(leaves) == len(found)
    assert [id(t) for t in tensors_in(tree)] == [id(leaf) for leaf in found if isinstance(leaf, Tensor)]
    back = unflatten(leaves, shape)
    assert same(back, tree)
    assert not isinstance(tree, (list, dict, collections.deque, Carried, Frozen)) or back is not tree


def test_attributes_that_are_not_fields_are_kept() -> None:
    original = Carried(torch.ones(1))
    original.extra = "kept"  # type: ignore[attr-defined]

    assert map_tensors(torch.neg, original).extra == "kept"


def test_fields_that_are_computed_are_not_asked_of_the_constructor() -> None:
    @dataclass
    class Checked:
        value: Tensor

        def __post_init__(self) -> None:
            assert isinstance(self.value, Tensor)

    leaves, shape = flatten(Checked(torch.ones(1)))
    assert unflatten([None], shape).value is None
    assert len(leaves) == 1


def test_modules_types_functions_and_a_librarys_settings_are_leaves() -> None:
    tree = [torch.nn.Linear(1, 1), Carried, len, LlamaConfig(), torch.Size([1])]
    assert flatten(tree)[0] == tree


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree = Carried([torch.ones(1)])
    tree.rest = tree
    with pytest.raises(UnsupportedError, match="contains itself"):
        flatten(tree)


def test_no_tensor_is_kept_by_a_shape() -> None:
    gc.disable()
    try:
        tensor = torch.ones(4)
        seen = weakref.ref(tensor)
        leaves, shape = flatten(((tensor,), [tensor], {"a": Carried(tensor)}, Pair(tensor, tensor)))
        unflatten(leaves, shape)
        del leaves, tensor
        assert seen() is None
    finally:
        gc.enable()
