"""Whatever is nested in whatever: it comes apart into its leaves and together again, and what is written comes back."""

from __future__ import annotations

import collections
import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harmony_ds.calls.trees import Contents, changed, flatten, map_tensors, tensors_in, unflatten


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
    st.integers(0, 9).map(lambda value: torch.tensor([value])),
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.text(max_size=3),
)
NAMES = st.sampled_from("abcd")


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(children, max_size=3)
    named = st.dictionaries(NAMES, children, max_size=3)
    return st.one_of(
        some,
        some.map(tuple),
        some.map(lambda items: collections.deque(items, maxlen=5)),
        named,
        named.map(collections.OrderedDict),
        named.map(lambda items: collections.defaultdict(list, items)),
        named.map(lambda items: SimpleNamespace(**items)),
        st.sets(st.integers(0, 5), max_size=3),
        st.builds(Carried, children, children),
        st.builds(Frozen, children, children),
        st.builds(Pair, children, children),
        children.map(lambda child: [child, child]),  # an alias, where it is a container
        children.map(lambda child: {"left": child, "right": (child,)}),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)
MUTABLE = (list, dict, set, collections.deque, SimpleNamespace, Carried)
OPENED_ONCE = (*MUTABLE, Frozen)  # objects are, whether they may be written or not


def parts(value: Any) -> list[Any] | None:
    """What a container holds; None for a leaf."""
    if isinstance(value, dict):
        return [item for pair in value.items() for item in pair]
    if isinstance(value, (list, tuple, collections.deque)):
        return list(value)
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, (SimpleNamespace, Carried)):
        return [item for pair in vars(value).items() for item in pair]
    return [value.memory, value.label] if isinstance(value, Frozen) else None


def same(a: Any, b: Any) -> bool:
    """The same types all through, and the same leaves, tensors by identity."""
    mine, others = parts(a), parts(b)
    if mine is None or others is None:
        return a is b if isinstance(a, Tensor) else type(a) is type(b) and a == b
    return type(a) is type(b) and len(mine) == len(others) and all(map(same, mine, others))


def aliases(value: Any) -> list[int]:
    """For all that is opened once, as it is met: the place where it was met first."""
    met: dict[int, int] = {}
    order: list[int] = []

    def visit(one: Any) -> None:
        if isinstance(one, OPENED_ONCE):
            order.append(met.setdefault(id(one), len(met)))
        for part in parts(one) or ():
            visit(part)

    visit(value)
    return order


@given(TREES)
def test_it_comes_together_as_it_was_in_fresh_containers(tree: Any) -> None:
    leaves, shape = flatten(tree)
    back = unflatten(leaves, shape)
    assert same(back, tree)
    assert aliases(back) == aliases(tree)
    assert not isinstance(tree, MUTABLE) or back is not tree


@given(TREES)
def test_leaves_are_those_that_a_walk_meets_each_container_once(tree: Any) -> None:
    met: set[int] = set()
    found: list[Any] = []

    def walk(value: Any) -> None:
        held = parts(value)
        if held is None:
            found.append(value)
        elif not isinstance(value, OPENED_ONCE) or id(value) not in met:
            met.add(id(value))
            if isinstance(value, (dict, SimpleNamespace, Carried)):
                held = held[1::2]  # keys are no leaves
            for part in held:
                walk(part)

    walk(tree)
    leaves, _ = flatten(tree)
    assert len(leaves) == len(found)
    assert [id(t) for t in tensors_in(tree)] == [id(leaf) for leaf in found if isinstance(leaf, Tensor)]


@given(TREES)
def test_mapping_twice_is_mapping_once_with_both(tree: Any) -> None:
    twice = map_tensors(lambda t: t * 3, map_tensors(lambda t: t + 1, tree))
    once = map_tensors(lambda t: (t + 1) * 3, tree)
    assert [t.tolist() for t in tensors_in(twice)] == [t.tolist() for t in tensors_in(once)]
    assert aliases(twice) == aliases(once) == aliases(tree)


@given(TREES)
def test_what_nobody_writes_has_not_changed(tree: Any) -> None:
    leaves, shape = flatten(tree)
    made: list[Contents] = []
    unflatten(leaves, shape, made)
    assert changed(made) == []


@given(st.sampled_from([dict, collections.OrderedDict, SimpleNamespace]), st.permutations("abc"))
def test_another_order_or_another_name_is_a_change(kind: Any, order: list[str]) -> None:
    """Of the same values."""
    leaves, shape = flatten(kind(a=1, b=1, c=1))
    made: list[Contents] = []
    fresh = unflatten(leaves, shape, made)
    held = fresh if isinstance(fresh, dict) else vars(fresh)
    held.clear()
    held.update(dict.fromkeys(order, 1))
    assert len(changed(made)) == (order != list("abc"))


def write(containers_met: list[Any], place: int, value: Any) -> None:
    """Puts `value` into one of them."""
    target = containers_met[place % len(containers_met)]
    if isinstance(target, (list, collections.deque)):
        target.append(value)
    elif isinstance(target, dict):
        target["written"] = value
    elif isinstance(target, set):
        target.add(99)
    else:
        target.written = value


def mutable_in(tree: Any) -> list[Any]:
    """Everything mutable, each once, in the order of a walk."""
    met: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, MUTABLE):
            if id(value) in met:
                return
            met[id(value)] = value
        for part in parts(value) or ():
            visit(part)

    visit(tree)
    return list(met.values())


@given(TREES, st.lists(st.tuples(st.integers(0, 30), LEAVES), min_size=1, max_size=4))
def test_what_is_written_into_fresh_containers_can_be_done_to_the_originals(
    tree: Any, writes: list[tuple[int, Any]]
) -> None:
    if not mutable_in(tree):
        return
    expected = copy.deepcopy(tree)
    leaves, shape = flatten(tree)
    made: list[Contents] = []
    fresh = unflatten(leaves, shape, made)
    for place, value in writes:
        write(mutable_in(expected), place, value)
        write(mutable_in(fresh), place, value)

    written = changed(made)
    originals = {id(one.value): one.branch.original for one in made}
    values, values_shape = flatten([one.children for one in written], originals)
    for into, children in zip(written, unflatten(values, values_shape), strict=True):
        into.give_back(children)
    assert aliases(tree) == aliases(expected)
    assert same(map_tensors(torch.Tensor.tolist, tree), map_tensors(torch.Tensor.tolist, expected))
