"""Key and value caches that transformers' models pass to their layers in training, where they are never read.

A layer gets its cache, because the copies that a cache makes of keys and values decide which kernels run next, and so the
last bits. Afterwards the cache is emptied again, for the recomputation, and keeps no tensor. One that is not empty (a
trained prefix) is an argument like any other; caches of other kinds are left out, as transformers' own gradient
checkpointing does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from harmony_ds.model.intercept import Request

CacheSnapshot = list[tuple[Any, dict[str, Any]]]
"""The objects that caches consist of, and the attributes of each."""


def extract_caches(request: Request) -> tuple[list[Any], dict[int, Any]]:
    """Return the values of a call's arguments, without caches of unknown kinds, and the empty caches, by index."""
    values = [*request.args, *request.kwargs.values()]
    if request.kwargs.get("use_cache"):
        values[len(request.args) + list(request.kwargs).index("use_cache")] = False
    empty = {}
    for place in _places_of_caches(tuple(map(type, values))):
        parts = _parts(values[place])
        if not all(map(_has_slots, parts)):
            values[place] = None
        elif not any(slot.is_initialized for part in parts for slot in part.layers):
            empty[place] = values[place]
    return values, empty


def snapshot_caches(caches: Iterable[Any]) -> CacheSnapshot:
    """Return the attributes of `caches`, for `restore_caches`."""
    objects = [one for cache in caches for part in _parts(cache) for one in (cache, part, *part.layers)]
    return [(one, {key: _own(value) for key, value in vars(one).items()}) for one in objects]


def restore_caches(held: CacheSnapshot) -> None:
    for one, values in held:
        one.__dict__.clear()
        one.__dict__.update(values)


def _own(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


@functools.cache
def _places_of_caches(types: tuple[type, ...]) -> tuple[int, ...]:
    return tuple(place for place, cls in enumerate(types) if _is_cache(cls))


def _is_cache(cls: type) -> bool:
    """Return whether it is a cache of transformers, or of code that transformers loads."""
    return any(
        base.__name__.endswith("Cache")
        and base.__module__.partition(".")[0] in ("transformers", "transformers_modules")
        for base in cls.__mro__
    )


def _parts(cache: Any) -> list[Any]:
    """Return the parts that have a slot for each layer: the cache itself, or both of an encoder-decoder's."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    return [part for part in parts if part is not None] or [cache]


def _has_slots(part: Any) -> bool:
    slots = getattr(part, "layers", None)
    return isinstance(slots, list) and all(hasattr(slot, "is_initialized") for slot in slots)
