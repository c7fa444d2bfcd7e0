"""A case: a program that a user would write, in the settings that it is tried in.

    @case(*ALL)
    def reused_buffer(side: Side) -> Found:
        \"\"\"The loop copies every micro-batch into one buffer.\"\"\"

The docstring is what the table says of it. A program gives the tensors that its user would look at, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.exactness.sides import Setting, Side, Stay

Found = Mapping[str, Any]
Program = Callable[[Side], Found]
FOUR = (Setting(4, 0.0), Setting(4, 1.0), Setting(4, 0.0, Stay.RESIDENT), Setting(4, 1.0, Stay.GRAPHS))
ONE = (Setting(1, 0.0), Setting(1, 1.0, Stay.RESIDENT))
ALL = ONE + FOUR
PAIRS = (Setting(1, 0.0, Stay.RESIDENT), Setting(4, 1.0, Stay.GRAPHS))
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be off, as a fraction of each tensor's largest value, and why it has to be."""

    relative: float
    because: str


REGROUPED = Tolerance(1e-6, "sums are regrouped")


@dataclass(frozen=True)
class Case:
    """A program under its name, with every setting that it is tried in."""

    name: str
    cause: str
    program: Program
    settings: tuple[Setting, ...]
    tolerance: Tolerance | None

    @property
    def what(self) -> str:
        """The program's sentence in the table: the user's own doing."""
        return " ".join((self.program.__doc__ or "").split())


def case(*settings: Setting, tolerance: Tolerance | None = None, **harmony: Any) -> Callable[[Program], Program]:
    """Registers a program.

    Args:
        settings: what it is tried in (`FOUR`).
        tolerance: None where the bits have to agree.
        harmony: settings of the ds_config's "harmony" section.
    """

    def register(program: Program) -> Program:
        name, cause = program.__name__, program.__module__.rsplit("cases_", 1)[-1]
        assert name not in CASES, f"there are two cases named {name}"
        assert program.__doc__, f"{name} does not say what the user does"
        tried = tuple(replace(setting, harmony=harmony) for setting in settings or FOUR)
        CASES[name] = Case(name, cause, program, tried, tolerance)
        return program

    return register
