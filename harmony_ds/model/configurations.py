"""Configurations that modules hold: `self.config` of transformers, a dataclass, a namespace of arguments.

Their plain entries decide what forward computes as attributes of modules do, and are written in place:
`model.config.use_cache = False`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from torch import nn

from harmony_ds.model.own_settings import SCALARS

_NOT_READ_BY_FORWARD = frozenset(("transformers_version", "_name_or_path", "_commit_hash"))


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """A configuration that a module holds.

    Attributes:
        number: negative, beside those of the modules.
        name: of the attribute that it was found under.
        value: the object, which is kept so that no other gets its id.
    """

    number: int
    name: str
    value: Any

    @property
    def entries(self) -> dict[str, Any]:
        """Its entries, plain or not."""
        entries: dict[str, Any] = vars(self.value)
        return entries

    def plain_names(self) -> list[str]:
        """Return the names of entries that are flags, words or numbers, and may decide what forward computes."""
        return [
            name
            for name, value in self.entries.items()
            if (value is None or isinstance(value, (*SCALARS, Enum))) and name not in _NOT_READ_BY_FORWARD
        ]


def is_configuration(value: Any) -> bool:
    """Return whether `value` is a configuration whose entries can be compared."""
    if isinstance(value, type | nn.Module) or not hasattr(value, "__dict__"):
        return False
    is_of_transformers = hasattr(type(value), "model_type")  # where it is no dataclass, as before version 5
    return is_dataclass(value) or isinstance(value, Namespace | SimpleNamespace) or is_of_transformers
