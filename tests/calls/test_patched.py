"""Attributes that are replaced for a while, by several who do not know of each other."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import pytest

from harmony_ds.calls.places import patched


class Base:
    def say(self) -> str:
        return "base"


class Child(Base):
    pass


def saying(word: str) -> Any:
    return lambda say: lambda self: f"{word} {say(self)}"


@pytest.mark.parametrize("owner", [Base, Child])
@pytest.mark.parametrize("closing", list(itertools.permutations(range(3))))
def test_patches_may_be_closed_in_any_order(owner: type[Base], closing: tuple[int, ...]) -> None:
    before = dict(vars(owner))
    stacks = [ExitStack() for _ in range(3)]
    for number, stack in enumerate(stacks):
        stack.enter_context(patched(owner, "say", saying(str(number))))
    assert owner().say() == "2 1 0 base"
    open_ones = [2, 1, 0]
    for number in closing:
        stacks[number].close()
        open_ones.remove(number)
        assert owner().say() == " ".join([*map(str, open_ones), "base"])
    assert dict(vars(owner)) == before
