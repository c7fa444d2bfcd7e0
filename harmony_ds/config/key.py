"""What the table of keys is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import eq, ge, ne
from typing import Any

from harmony_ds.config.forms import ANYTHING, Form
from harmony_ds.config.paths import value_at, with_values


class Effect(Enum):
    """What becomes of a key's value."""

    OURS = "ours"
    SAME = "same"
    DIFFERENT = "differently"
    NONE = "no meaning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Option:
    """The option of the command line that is put in the place of a key: a number of at least `least`."""

    name: str
    help: str
    least: float = 1


@dataclass(frozen=True, slots=True)
class Ablation:
    """A mechanism that is switched off, or done in another way, to see what it is worth.

    Attributes:
        name: for tables and command lines.
        changes: values of keys, by their paths.
        description: what is done instead.
        requires: what must stand in the ds_config for this to differ from it, by path.
        device: the kind of device on which it can make a difference ("": any).
        rounds_on: kinds of device on which results are not the same bits.
        is_choice: nothing is switched off; the same is done in another way.
    """

    name: str
    changes: Mapping[str, object]
    description: str
    requires: Mapping[str, object] = field(default_factory=dict)
    device: str = ""
    rounds_on: tuple[str, ...] = ()
    is_choice: bool = False

    @property
    def harmony(self) -> dict[str, object]:
        """What it changes in our own block."""
        return {path.removeprefix("harmony."): v for path, v in self.changes.items() if path.startswith("harmony.")}

    def exact_on(self, device: str) -> bool:
        """Whether results on a device of kind `device` are the same bits as without the change."""
        return device not in self.rounds_on

    def applies_to(self, config: Mapping[str, Any], device: str) -> bool:
        """Whether a run of the ds_config `config` on a device of kind `device` ("cpu", "cuda") could differ."""
        holds = all(value_at(config, path) == value for path, value in self.requires.items())
        return holds and self.device in ("", device)

    def applied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the ds_config `config` with the mechanism switched off; other keys stay as they are."""
        return with_values(config, self.changes)


_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {"==": eq, "!=": ne, ">=": ge}


@dataclass(frozen=True, slots=True)
class Getter:
    """A method of DeepSpeed's engine that answers from the value of one key.

    Attributes:
        relation: what is asked of the value, with `operand` on its other side ("": the value itself).
    """

    name: str
    relation: str = ""
    operand: object = None

    def answer(self, value: Any) -> Any:
        """What the method returns where the key has `value`."""
        return _RELATIONS[self.relation](value, self.operand) if self.relation else value


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        path: its names from the top, joined by dots.
        default: DeepSpeed's.
        note: how it is honoured; for REFUSED, the reason and what to do instead.
        open: a block whose inside is not listed here.
        switch: for an open block that is refused: the key in it that turns it on, and what leaving it out means.
        older: a name of older versions, which DeepSpeed 0.19.8 does not read or refuses.
        getters: the methods of DeepSpeed's engine that answer from the value.
        refuses: values that it takes in DeepSpeed and not here, for a reason.
        shown: the default in the documentation, where it is no value ("": the value).
    """

    path: str
    effect: Effect
    form: Form = ANYTHING
    default: object = None
    note: str = ""
    open: bool = False
    switch: tuple[str, object] = ("enabled", True)
    older: bool = False
    refuses: tuple[object, ...] = ()
    reason: str = ""
    getters: tuple[Getter, ...] = ()
    shown: str = ""
    option: Option | None = None
    ablations: tuple[Ablation, ...] = ()
