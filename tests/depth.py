"""Which tests `make test` leaves out: they are marked `deep`, by the folder or file that they are in.

`make test` is to say within minutes whether anything is broken; `make test-all` runs everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

Rule = Callable[[Sequence[pytest.Item]], Iterable[pytest.Item]]
"""Chooses, among the instances of one parametrized test, those that `make test` runs."""


def every(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return items


def none(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return ()


def one(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return items[:1]


def each_value(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    """Every value of every parameter at least once, not every combination."""
    seen: set[tuple[str, int]] = set()
    for item in items:
        indices = set(item.callspec.indices.items()) if hasattr(item, "callspec") else {("", 0)}
        if not indices <= seen:
            seen |= indices
            yield item


def few(count: int) -> Rule:
    """So many instances, spread over all of them."""
    return lambda items: [items[i * len(items) // count] for i in range(count)] if len(items) > count else items


RULES: dict[str, Rule] = {
    "tests": each_value,
}
"""By path, from the repository's root; the longest one that an item is under decides."""


def mark_deep(items: Sequence[pytest.Item], root: Path) -> None:
    """Mark every item that its rule leaves out."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.path, getattr(item, "originalname", item.name)].append(item)
    for (path, _), instances in tests.items():
        kept = set(map(id, rule_of(path.relative_to(root))(instances)))
        for item in instances:
            if id(item) not in kept:
                item.add_marker(pytest.mark.deep)


def rule_of(path: Path) -> Rule:
    places = (str(path), *map(str, path.parents))
    return next(RULES[place] for place in places if place in RULES)
