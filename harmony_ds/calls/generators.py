"""Generators of random numbers beside torch's global ones, which forward passes may draw from: where they stand is read
and put back.

The global ones of Python and NumPy, and whatever modules, their code, hooks and functions hold.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from harmony_ds.calls.module_places import all_places
from harmony_ds.calls.places import SCALARS, Place, Places
from harmony_ds.calls.trees import flatten


class Generators(Place):
    """Where generators stand that `held`, another place, holds. States compare as equal if they are."""

    __slots__ = ()

    def _identity(self) -> tuple[int, Any]:
        return id(type(self)), self.held

    def read(self) -> Any:
        # The state names the generator: the place may hold another one by the time that it is put back.
        return tuple((generator, _state(generator)) for generator in _generators_in(self.held.read()))

    def write(self, value: Any) -> None:
        for generator, state in value:
            _set_state(generator, state)


class _Global(Place):
    """Where the global ones of a module of Python's stand: `held` are the functions that read and write that."""

    __slots__ = ()

    def read(self) -> Any:
        return self.held[0]()

    def write(self, value: Any) -> None:
        self.held[1](value)


def global_generators() -> Places:
    """Those of Python, and of NumPy if the program uses it."""
    return (_PYTHON, _NUMPY) if "numpy" in sys.modules else (_PYTHON,)


def generators_of(modules: Iterable[nn.Module]) -> Places:
    """Those that `modules` hold, and the variables that their code names."""
    holding = (place for place in dict.fromkeys(all_places(modules)) if _generators_in(place.read()))
    return tuple(Generators(place, place.key, f"the generator {place.key}") for place in holding)


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from `value`."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return "numpy" in sys.modules and isinstance(value, (_numpy().Generator, _numpy().RandomState))


def _generators_in(value: Any) -> list[Any]:
    if isinstance(value, (*SCALARS, torch.Tensor, nn.Module)):
        return []
    return list({id(leaf): leaf for leaf in flatten(value)[0] if is_generator(leaf)}.values())


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(generator.__getstate__() if _is_old(generator) else generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif _is_old(generator):
        generator.__setstate__(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


def _is_old(generator: Any) -> bool:
    return isinstance(generator, _numpy().RandomState)


def _numpy() -> Any:
    import numpy

    return numpy.random


_PYTHON = _Global((random.getstate, random.setstate), "random", "Python's global random numbers")
_NUMPY = _Global(
    (lambda: pickle.dumps(_numpy().get_state()), lambda state: _numpy().set_state(pickle.loads(state))),
    "numpy.random",
    "NumPy's global random numbers",
)
