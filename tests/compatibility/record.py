"""A row's outcome, to be saved and compared: values, tensors by their numbers, errors by what catches them."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

_TOLERANCE = 1e-5
_TOLERANCE_OF_HALF = 1e-2
_BUILTIN_ERRORS = {
    name
    for name, one in vars(builtins).items()
    if isinstance(one, type) and issubclass(one, Exception) and one is not Exception
}


@dataclass
class Script:
    """What one engine is asked, row by row."""

    engine: str
    rows: dict[str, Any] = field(default_factory=dict)

    def row(self, name: str, ask: Callable[[], Any], says: str = "") -> Any:
        """Runs `ask` and notes its outcome under `name`; an error counts as one, and whether its text has `says`."""
        assert name not in self.rows, name
        value = None
        try:
            value = ask()
            self.rows[name] = plain(value)
        except Exception as error:  # noqa: BLE001 - that is what is compared
            self.rows[name] = {
                "error": type(error).__name__,
                "caught_as": sorted({base.__name__ for base in type(error).__mro__} & _BUILTIN_ERRORS),
                "says": says in str(error).replace("\n", " "),
                "text": str(error).splitlines()[0][:200] if str(error) else "",
            }
        return value


def plain(value: Any) -> Any:
    """`value` as JSON."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value + 0 if math.isfinite(value) else str(value)
    if isinstance(value, torch.Tensor):
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "values": [plain(number) for number in value.detach().float().flatten()[:8].tolist()],
        }
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    return type(value).__name__


def about(values: list[float]) -> dict[str, list[float]]:
    """Numbers that went through half precision: compared to a hundredth."""
    return {"about": values}


def same(theirs: Any, ours: Any) -> bool:
    """Whether two outcomes are the same: numbers to 1e-5, errors if ours is caught by what catches theirs."""
    if isinstance(theirs, dict) and "caught_as" in theirs:
        return (
            isinstance(ours, dict)
            and "caught_as" in ours
            and set(theirs["caught_as"]) <= set(ours["caught_as"])
            and theirs["says"]
            and ours["says"]
        )
    if isinstance(theirs, bool) or isinstance(ours, bool):
        return theirs is ours
    if isinstance(theirs, (int, float)) and isinstance(ours, (int, float)):
        return math.isclose(theirs, ours, rel_tol=_TOLERANCE, abs_tol=1e-7)
    if isinstance(theirs, dict) and "about" in theirs and isinstance(ours, dict) and "about" in ours:
        pairs = zip(theirs["about"], ours["about"], strict=True)
        return all(math.isclose(one, other, rel_tol=_TOLERANCE_OF_HALF) for one, other in pairs)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(same(theirs[key], ours[key]) for key in theirs)
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(theirs) == len(ours) and all(same(one, other) for one, other in zip(theirs, ours, strict=True))
    return bool(theirs == ours)


def brief(outcome: Any) -> str:
    """An outcome in a table's cell."""
    if isinstance(outcome, dict) and "caught_as" in outcome:
        return f"{outcome['error']}: {outcome['text']}"[:110]
    if isinstance(outcome, dict) and "values" in outcome:
        return f"{outcome['dtype']} {outcome['shape']}"
    if isinstance(outcome, float):
        return f"{outcome:.6g}"
    if isinstance(outcome, list):
        return ("[" + ", ".join(brief(one) for one in outcome) + "]")[:90]
    return str(outcome)[:90]
