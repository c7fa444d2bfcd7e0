"""What `threading.local` objects hold for the thread, and whether a forward pass changes it while layers are called.

Micro-batches take turns on one thread, so that each would find what another one has put there.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from harmony_ds.calls.places import Absent
from harmony_ds.calls.trees import flatten
from harmony_ds.errors import RecomputeError

ATOMS = (bool, int, float, str, bytes, type(None), Absent)
_OWN_AFFAIR = frozenset({"torch", "numpy", "harmony_ds", "greenlet", *sys.stdlib_module_names})
"""Packages whose thread-local variables no micro-batch finds another's in, or are exchanged by name."""

_Local = tuple[str, threading.local]


class ThreadLocals:
    """Watches one forward pass."""

    def __init__(self, of_program: Iterable[_Local]) -> None:
        """`of_program`: those that the model's code names. Those of libraries are found by themselves."""
        self._program = [(one, _held(one[1])) for one in of_program]
        self._library = [(one, _held(one[1])) for one in _of_libraries(len(sys.modules))]
        self._set: set[str] = set()  # of libraries, by name: set otherwise while a layer was called

    def check_call(self) -> None:
        """At a layer call.

        Raises:
            RecomputeError: forward has changed what one of the program's holds.
        """
        self._check_program()
        self._set.update(name for (name, local), before in self._library if _differ(before, _held(local)))

    def check_end(self) -> None:
        """Behind the last call.

        Raises:
            RecomputeError: as `check_call`; or a library's was set around layers and put back, as no counter or cache is.
        """
        self._check_program()
        for (name, local), before in self._library:
            if name in self._set and not _differ(before, _held(local)):
                _refuse(name)

    def _check_program(self) -> None:
        for (name, local), before in self._program:
            if _differ(before, _held(local)):
                _refuse(name)


@functools.lru_cache(maxsize=1)
def _of_libraries(_modules: int) -> tuple[_Local, ...]:
    """Global variables of imported modules, looked for again when there are more `_modules`."""
    return tuple(
        (f"{module.__name__}.{name}", value)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "torch").partition(".")[0] not in _OWN_AFFAIR
        for name, value in list(vars(module).items())
        if issubclass(type(value), threading.local)
    )


def _held(local: threading.local) -> list[Any]:
    """Numbers, texts and tensors."""
    return [leaf for leaf in flatten(vars(local))[0] if isinstance(leaf, (Tensor, *ATOMS))]


def _differ(before: list[Any], now: list[Any]) -> bool:
    return len(before) != len(now) or not all(
        a is b or (type(a) in ATOMS and a == b) for a, b in zip(before, now, strict=True)
    )


def _refuse(name: str) -> None:
    raise RecomputeError(
        f"forward changes what {name}, a threading.local, holds for its thread. Micro-batches take turns on one thread, "
        "layer by layer, and layers run again in the backward pass, where they would find something else there. Keep it in "
        "a contextvars.ContextVar that the code between the layers sets, in an attribute of the model, or pass it as an "
        "argument."
    )
