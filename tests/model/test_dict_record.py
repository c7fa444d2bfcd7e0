"""A record tells of every change of the entries that it was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harmony_ds.model.dict_record import DictRecord

Change = Callable[[dict[str, Any], dict[str, Any]], object]
SEEN: dict[str, Change] = {
    "another value": lambda one, _: one.update(rate=2.0),
    "an equal value of another type": lambda one, _: one.update(rate=1),
    "an equal value that is another object": lambda _, other: other.update(names=["a"]),
    "a value of the last dictionary": lambda _, other: other.update(flag=True),
    "an entry that is gone": lambda one, _: one.pop("rate"),
    "an entry that has come": lambda one, _: one.update(new=0),
    "an entry that has come to a dictionary of which nothing was chosen": lambda one, _: one["empty"].update(new=0),
    "an entry in the place of another": lambda one, _: (one.pop("rate"), one.update(new=1.0)),
}
UNSEEN: dict[str, Change] = {
    "the same value again": lambda one, _: one.update(rate=one["rate"]),
    "an entry that was not chosen": lambda one, _: one.update(other=5),
}
CONTENTS: dict[str, Change] = {
    "more in a list": lambda _, other: other["names"].append("b"),
    "another element": lambda _, other: other["names"].__setitem__(0, "b"),
}


def recorded(
    has_contents: Callable[[Any], bool] = lambda _: False,
) -> tuple[dict[str, Any], dict[str, Any], DictRecord]:
    one: dict[str, Any] = {"rate": 1.0, "other": 4, "empty": {}}
    other: dict[str, Any] = {"names": ["a"], "flag": False}
    chosen = [(one, ["rate", "empty"]), (other, ["names", "flag"]), (one["empty"], [])]
    return one, other, DictRecord(chosen, has_contents)


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_a_change_of_what_was_chosen_is_seen(change: Change) -> None:
    one, other, record = recorded()
    assert record.is_unchanged()
    change(one, other)
    assert not record.is_unchanged()


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_other_changes_are_not(change: Change) -> None:
    one, other, record = recorded()
    change(one, other)
    assert record.is_unchanged()


@pytest.mark.parametrize("change", CONTENTS.values(), ids=CONTENTS)
def test_contents_are_compared_where_that_is_asked_for(change: Change) -> None:
    one, other, without = recorded()
    change(one, other)
    assert without.is_unchanged()
    one, other, record = recorded(lambda value: isinstance(value, list))
    assert record.is_unchanged()
    change(one, other)
    assert not record.is_unchanged()
