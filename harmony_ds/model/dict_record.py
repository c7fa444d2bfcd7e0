"""Are the attributes of modules still the objects that they were? Asked at every layer call, so it has to be quick."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import getitem, is_
from typing import Any


class DictRecord:
    """Values of chosen entries of dictionaries when this was made, and how many entries each dictionary had.

    Attributes:
        values: of all chosen entries, in the order of dictionaries and names.
        containers: those of them whose contents are compared, too.
        contents: copies of what these held.
    """

    def __init__(
        self, chosen: Iterable[tuple[dict[str, Any], Sequence[str]]], has_contents: Callable[[Any], bool]
    ) -> None:
        """Record what the dictionaries hold under the names that come with each.

        Args:
            has_contents: of a value, whether it is a container whose contents are compared.
        """
        self._dictionaries: list[dict[str, Any]] = []
        self._places: list[dict[str, Any]] = []  # of each entry, its dictionary
        self._names: list[str] = []
        for dictionary, names in chosen:
            self._dictionaries.append(dictionary)
            self._places += [dictionary] * len(names)
            self._names += names
        self._counts = [*map(len, self._dictionaries)]
        self.values = [*map(getitem, self._places, self._names)]
        self.containers = [value for value in self.values if has_contents(value)]
        self.contents = [container.copy() for container in self.containers]

    def is_unchanged(self) -> bool:
        """Return whether the chosen entries are the same objects, and no dictionary has more or fewer entries.

        It may tell of changes that are none: an equal object in the place of another one.
        """
        try:
            same = all(map(is_, map(getitem, self._places, self._names), self.values))
        except KeyError:
            return False
        return same and [*map(len, self._dictionaries)] == self._counts and self.containers == self.contents
