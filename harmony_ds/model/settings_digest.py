"""A digest of what decides how forward computes, among all that modules hold: flags, words, submodules, hooks and code.

Under one of them rows of a layer may look at each other, or a layer may take more memory: the model is measured for each
digest. Numbers are data, but for whether they are zero: a coefficient that is not zero any more brings something in.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from harmony_ds.model.intercept import InterceptedForward
from harmony_ds.model.own_settings import MOST_WORDS, Key, is_small_container, is_switch

HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class SettingsDigest:
    """Maker of the digests of one model's settings."""

    def __init__(self) -> None:
        self._words: defaultdict[object, set[str]] = defaultdict(set)  # that an attribute or an element has been
        self._codes: dict[int, object] = {}  # by id, so that no other gets it

    def of(self, attributes: Iterable[tuple[Key, Any]], modules: Sequence[nn.Module], inner: set[int]) -> bytes:
        """Return the digest of settings, which is of use within one process: code is known by where it lies.

        Args:
            attributes: those that count, with their values.
            modules: all of them; the place of each is its number.
            inner: numbers of those inside layers, whose hooks run within layer calls.
        """
        settings: list[object] = []
        for key, value in attributes:
            if is_small_container(value):
                for place, element in _elements(value):
                    settings += self._settings_of((*key, place), element)
            else:
                settings += self._settings_of(key, value)
        numbers = {id(module): number for number, module in enumerate(modules)}
        for number, module in enumerate(modules):
            held = vars(module)
            children = [(name, numbers.get(id(child))) for name, child in held["_modules"].items()]
            settings.append((number, children, list(held["_buffers"])))
            if "forward" in held:
                settings.append((number, self._code(held["forward"])))
            if number in inner:
                hooks = [hook for kind in HOOKS for hook in held[kind].values()]
                settings.append((number, list(map(self._code, hooks))))
        return hashlib.sha256(repr(settings).encode()).digest()

    def _settings_of(self, key: object, value: Any) -> Iterator[object]:
        """Yield what counts of a value, under its key, if anything does.

        Words that are never the same (the name of a run) are data.
        """
        if isinstance(value, str):
            words = self._words[key]
            words.add(value)
            if len(words) <= MOST_WORDS:
                yield key, value
        elif value is None or is_switch(value):
            yield key, value
        elif isinstance(value, FunctionType | partial):
            yield key, self._code(value)

    def _code(self, function: Any) -> int:
        """Return what is the same for functions of the same code, such as one that is made in each step."""
        if isinstance(function, InterceptedForward):
            function = function.own
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", type(function))
        self._codes[id(code)] = code
        return id(code)


def _elements(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the elements of a container, each with its key or place, in the same order for equal containers."""
    if isinstance(container, dict):
        return container.items()
    return enumerate(sorted(container, key=repr) if isinstance(container, set) else container)
