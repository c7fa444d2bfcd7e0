"""Nested values to JSON and back. Tensors in them are laid aside, for a file that is made for tensors.

JSON knows no tuples, no keys but strings, no infinities and no bytes; they are written as an object with one key that
begins with "$". What cannot be written is refused by the place where it lies; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from harmony_ds.errors import CheckpointError

_MARK = "$"
_SEQUENCES = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON has it; its tensors are added to `tensors` under the place where they lie.

    Raises:
        CheckpointError: something in it is neither plain data nor a tensor.
    """
    if isinstance(value, Tensor):
        name = where
        while name in tensors:  # two places may have one name: {"a.b": x, "a": {"b": y}}
            name += "'"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _encode_sequence(value, where, tensors)
    return _encode_plain(value, where)


def _encode_plain(value: Any, where: str) -> Any:
    """Subclasses of numbers and text (NumPy has some) become what they are."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if value is None:
        return None
    raise CheckpointError(
        f"{where} is {_called(type(value))}, which a checkpoint cannot hold: it takes None, booleans, numbers, text, "
        "bytes, tensors, and lists, tuples, sets and dictionaries of them. Convert it (.item(), .tolist(), "
        "torch.from_numpy(), state_dict()) before saving, and back after loading."
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor]) -> Any:
    if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
        return {key: encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
    return {
        "$pairs": [
            [encode(key, f"{where}.keys", tensors), encode(item, f"{where}.{key}", tensors)]
            for key, item in value.items()
        ]
    }


def _encode_sequence(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    items = [encode(item, f"{where}.{place}", tensors) for place, item in enumerate(ordered)]
    if isinstance(value, list):
        return items
    mark = next(mark for kind, mark in _SEQUENCES.items() if isinstance(value, kind))
    return {mark: items}


def _called(cls: type) -> str:
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given. Its tensors are those of `tensors`.

    Raises:
        CheckpointError: a mark or a tensor is not known.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith(_MARK):
        return {key: decode(item, tensors) for key, item in value.items()}
    if mark not in _DECODERS:
        raise CheckpointError(f"a value is marked {mark!r}, which this version of harmony_ds does not know.")
    return _DECODERS[mark](value[mark], tensors)


def _tensor(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"the tensor {name} is missing.")
    return tensors[name].clone()


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$float": lambda value, _: float(value),
    "$bytes": lambda value, _: base64.b64decode(value),
    "$dtype": lambda value, _: getattr(torch, value),
    "$tensor": _tensor,
    "$tuple": lambda value, tensors: tuple(decode(item, tensors) for item in value),
    "$set": lambda value, tensors: {decode(item, tensors) for item in value},
    "$frozenset": lambda value, tensors: frozenset(decode(item, tensors) for item in value),
    "$pairs": lambda value, tensors: {decode(key, tensors): decode(item, tensors) for key, item in value},
}
