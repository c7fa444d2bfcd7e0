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

from torch import Tensor, nn

from harmony_ds.model.own_settings import CONTAINERS, SCALARS

_NOT_READ_BY_FORWARD = frozenset("transformers_version architectures dtype _name_or_path _commit_hash".split())
"""Entries that transformers writes when it loads and saves a model."""
_NO_CONFIGURATIONS = frozenset((*SCALARS, *CONTAINERS, type(None), tuple, Tensor, nn.Parameter))
"""Types of most attributes, which are no configurations."""


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

    def plain_entries(self) -> dict[str, Any]:
        """Return the entries that are flags, words or numbers, and may decide what forward computes."""
        return {
            name: value
            for name, value in self.entries.items()
            if (value is None or isinstance(value, (*SCALARS, Enum))) and name not in _NOT_READ_BY_FORWARD
        }


def is_configuration(value: Any) -> bool:
    """Return whether `value` is a configuration whose entries can be compared."""
    if type(value) in _NO_CONFIGURATIONS or isinstance(value, type | nn.Module) or not hasattr(value, "__dict__"):
        return False
    is_of_transformers = hasattr(type(value), "model_type")  # where it is no dataclass, as before version 5
    return is_dataclass(value) or isinstance(value, Namespace | SimpleNamespace) or is_of_transformers
