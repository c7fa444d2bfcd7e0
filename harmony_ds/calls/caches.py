"""Key and value caches that transformers' models hand to their layers while they train, though nobody reads them then.

A layer gets its cache, because what a cache does to keys and values (it copies them) chooses the kernels that come behind,
and so the last bits. Afterwards the cache is as it was: a recomputation finds it empty too, and no tensor is kept by it.
One that is not empty (a trained prefix) is an argument like any other; those of other kinds are left out, as
transformers' own gradient checkpointing does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from harmony_ds.calls.intercept import Request


def without_unknown(request: Request) -> Request:
    """The request without caches of other kinds than those that can be emptied again; itself if it has none at all."""
    if not (request.kwargs.get("use_cache") or _caches(request)):
        return request
    kwargs = {key: None if _is_unknown(value) else value for key, value in request.kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    args = tuple(None if _is_unknown(value) else value for value in request.args)
    return replace(request, args=args, kwargs=kwargs)


def _is_unknown(value: Any) -> bool:
    return _is_cache(type(value)) and not _slots(value)


def empty_caches(request: Request) -> list[Any]:
    """The caches among the arguments that hold nothing."""
    return [
        cache
        for cache in _caches(request)
        if not any(slot.is_initialized for part in _parts(cache) for slot in part.layers)
    ]


def emptied(caches: Sequence[Any]) -> AbstractContextManager[None]:
    """In the end, `caches` are as they were."""
    return _emptied(caches) if caches else _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _emptied(caches: Iterable[Any]) -> Iterator[None]:
    held = [one for cache in caches for part in _parts(cache) for one in (cache, part, *part.layers)]
    before = [(one, {key: _own(value) for key, value in vars(one).items()}) for one in held]
    try:
        yield
    finally:
        for one, values in before:
            vars(one).clear()
            vars(one).update(values)


def _own(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _caches(request: Request) -> list[Any]:
    values = (*request.args, *request.kwargs.values())
    return [values[place] for place in _places_of_caches(tuple(map(type, values)))]


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


def _slots(cache: Any) -> bool:
    """Whether it is made of slots that say whether anything is in them."""
    layers = [getattr(part, "layers", None) for part in _parts(cache)]
    return all(isinstance(one, list) and all(hasattr(s, "is_initialized") for s in one) for one in layers)
