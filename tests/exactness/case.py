"""A case: a program that a user would write, in the settings that it is tried in.

    @case(accumulation=(1, 4))
    def reused_buffer(side: Side) -> Found:
        \"\"\"The loop copies every micro-batch into one buffer.\"\"\"

The docstring is what the table says of it. A program gives the tensors that its user would look at, by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.exactness.sides import Setting, Side

Found = Mapping[str, Any]
Program = Callable[[Side], Found]
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
        """What the user does, in one sentence."""
        return " ".join((self.program.__doc__ or "").split())


def case(
    accumulation: tuple[int, ...] = (4,),
    clipping: tuple[float, ...] = (0.0, 1.0),
    tolerance: Tolerance | None = None,
    **harmony: Any,
) -> Callable[[Program], Program]:
    """Registers a program, tried in every combination of `accumulation` and `clipping`.

    Args:
        tolerance: None where the bits have to agree.
        harmony: settings of the ds_config's "harmony" section.
    """

    def register(program: Program) -> Program:
        cause = program.__module__.rsplit("cases_", 1)[-1]
        settings = tuple(Setting(a, c, harmony) for a, c in itertools.product(accumulation, clipping))
        assert program.__name__ not in CASES, f"there are two cases named {program.__name__}"
        assert program.__doc__, f"{program.__name__} does not say what the user does"
        CASES[program.__name__] = Case(program.__name__, cause, program, settings, tolerance)
        return program

    return register
