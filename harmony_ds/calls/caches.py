"""Key and value caches that transformers' models hand to their layers while they train, though nobody reads them then.

A layer gets its cache, because what a cache does to keys and values (it copies them) chooses the kernels that run after it,
and so the last bits. Afterwards the cache is as it was: a recomputation finds it empty too, and it keeps no tensor.
One that is not empty (a trained prefix) is an argument like any other; those of other kinds are left out, as
transformers' own gradient checkpointing does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from harmony_ds.calls.intercept import Request

CacheSnapshot = list[tuple[Any, dict[str, Any]]]
"""The objects that caches are made of, and what each of them held."""


def extract_caches(request: Request) -> tuple[list[Any], dict[int, Any]]:
    """The values of a call's arguments, without caches of unknown kinds; and the empty caches among them, by place."""
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
    """What `caches` hold, for `restore`."""
    objects = [one for cache in caches for part in _parts(cache) for one in (cache, part, *part.layers)]
    return [(one, {key: _own(value) for key, value in vars(one).items()}) for one in objects]


def restore_caches(held: CacheSnapshot) -> None:
    """Makes caches hold again what they held."""
    for one, values in held:
        one.__dict__.clear()
        one.__dict__.update(values)


def _own(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


@functools.cache
def _places_of_caches(types: tuple[type, ...]) -> tuple[int, ...]:
    return tuple(place for place, cls in enumerate(types) if _is_cache(cls))


def _is_cache(cls: type) -> bool:
    """Whether it is one of transformers', or of code that transformers loads; others are data like any other."""
    return any(
        base.__name__.endswith("Cache")
        and base.__module__.partition(".")[0] in ("transformers", "transformers_modules")
        for base in cls.__mro__
    )


def _parts(cache: Any) -> list[Any]:
    """Itself, or those of an encoder-decoder's: what has slots, one for each layer."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    return [part for part in parts if part is not None] or [cache]


def _has_slots(part: Any) -> bool:
    """Whether it is made of slots that say whether anything is in them."""
    slots = getattr(part, "layers", None)
    return isinstance(slots, list) and all(hasattr(slot, "is_initialized") for slot in slots)
