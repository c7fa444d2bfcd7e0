"""Generators of random numbers beside torch's global ones, which forward passes may draw from: where they stand is read
and put back.

The global ones of Python and NumPy, and whatever modules, their code, hooks and functions hold.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harmony_ds.calls.attributes import Place, all_places
from harmony_ds.calls.trees import flatten


@dataclass(frozen=True, slots=True)
class Generator:
    """One generator, or those in one place. States compare as equal if they are."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


def global_generators() -> tuple[Generator, ...]:
    """Those of Python, and of NumPy if the program uses it."""
    return (_PYTHON, _NUMPY) if "numpy" in sys.modules else (_PYTHON,)


def generators_of(modules: Iterable[nn.Module]) -> tuple[Generator, ...]:
    """Those that `modules` hold, and the variables that their code names."""
    return tuple(_held_in(place) for place in dict.fromkeys(all_places(modules)) if _generators_in(place.read()))


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from `value`."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return "numpy" in sys.modules and isinstance(value, (_numpy().Generator, _numpy().RandomState))


def _held_in(place: Place) -> Generator:
    # The state names the generator: the place may hold another one by the time that it is put back.
    def read() -> tuple[tuple[Any, Any], ...]:
        return tuple((generator, _state(generator)) for generator in _generators_in(place.read()))

    def write(states: tuple[tuple[Any, Any], ...]) -> None:
        for generator, state in states:
            _set_state(generator, state)

    return Generator(f"the generator {place.key}", read, write)


def _generators_in(value: Any) -> list[Any]:
    if isinstance(value, (bool, int, float, str, torch.Tensor, nn.Module, type(None))):
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


def _read_numpy() -> Any:
    kind, keys, *rest = _numpy().get_state()
    return kind, keys.tobytes(), *rest


def _write_numpy(state: Any) -> None:
    import numpy

    kind, keys, *rest = state
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


_PYTHON = Generator("Python's global random numbers", random.getstate, random.setstate)
_NUMPY = Generator("NumPy's global random numbers", _read_numpy, _write_numpy)
