"""What values a key takes, by the rules of DeepSpeed's pydantic models: "5" and 5.0 are integers, "true" is a flag.

Messages are pydantic's, so that a search for one finds the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_TRUE = frozenset(("1", "true", "on", "t", "y", "yes"))
_FALSE = frozenset(("0", "false", "off", "f", "n", "no"))


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of values.

    Attributes:
        name: for the table of keys.
        read: from JSON to the value; raises ValueError with what it should have been.
    """

    name: str
    read: Callable[[object], object]


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower() if isinstance(value, (str, int, float)) else ""
    if text in _TRUE or value == 1:
        return True
    if text in _FALSE or value == 0:
        return False
    raise ValueError("Input should be a valid boolean, unable to interpret input")


def _integer(value: object) -> int:
    number = _parsed(value)
    if number is None or not math.isfinite(number) or number != int(number):
        raise ValueError("Input should be a valid integer")
    return int(number)


def _number(value: object) -> float:
    number = _parsed(value)
    if number is None:
        raise ValueError("Input should be a valid number")
    return number


def _parsed(value: object) -> float | None:
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("Input should be a valid string")
    return value


def _block(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("Input should be an object")
    return value


def _finite(name: str, value: object, wanted: str) -> float:
    """DeepSpeed's own checks of the loss scale's numbers, in its words."""
    if isinstance(value, bool):
        raise ValueError(f"{name} must be {wanted}, not bool")
    number = _parsed(value)
    if number is None:
        raise ValueError(f"{name} must be {wanted}")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number (not inf/-inf/nan)")
    return number


def _loss_scale(value: object) -> float:
    number = _finite("fp16.loss_scale", value, "a number")
    if number < 0:
        raise ValueError("fp16.loss_scale must be >= 0 (0 enables dynamic loss scaling)")
    return float(number)


def scale_integer(name: str) -> Kind:
    """An integer of fp16's dynamic loss scale; `name` is its path."""

    def read(value: object) -> int:
        _finite(name, value, "an integer")
        return _integer(value)

    return Kind("integer", read)


LOSS_SCALE = Kind("number >= 0", _loss_scale)
FLAG = Kind("flag", _flag)
INTEGER = Kind("integer", _integer)
NUMBER = Kind("number", _number)
TEXT = Kind("text", _text)
BLOCK = Kind("object", _block)
ANYTHING = Kind("any", lambda value: value)


def within(kind: Kind, least: float | None = None, most: float | None = None, above: float | None = None) -> Kind:
    """`kind` with bounds: at least, at most, greater than."""

    def read(value: object) -> object:
        number = kind.read(value)
        assert isinstance(number, (int, float))
        if least is not None and not number >= least:
            raise ValueError(f"Input should be greater than or equal to {least:g}")
        if above is not None and not number > above:
            raise ValueError(f"Input should be greater than {above:g}")
        if most is not None and not number <= most:
            raise ValueError(f"Input should be less than or equal to {most:g}")
        return number

    bounds = [(">=", least), (">", above), ("<=", most)]
    return Kind(kind.name + "".join(f" {sign} {bound:g}" for sign, bound in bounds if bound is not None), read)


def optional(kind: Kind) -> Kind:
    """`kind`, or null."""
    return Kind(f"{kind.name} or null", lambda value: None if value is None else kind.read(value))


def choice(*known: object, upper: bool = False) -> Kind:
    """One of `known`; in any case of letters if `upper` (they are written in capitals)."""
    quoted = [repr(value) for value in known]
    listed = ", ".join(quoted[:-1]) + " or " + quoted[-1]

    def read(value: object) -> object:
        wanted = value.upper() if upper and isinstance(value, str) else value
        for one in known:
            if wanted == one and isinstance(wanted, bool) == isinstance(one, bool):
                return one
        raise ValueError(f"Input should be {listed}")

    return Kind(listed, read)
