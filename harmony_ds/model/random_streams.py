"""Random streams of micro-batches: their numbers depend on seed, step and micro-batch alone; joined calls draw as one.

Each micro-batch draws from streams of its own: torch's (the host's and the device's), Python's and NumPy's. To get the
same numbers in plain PyTorch, seed all of them before the micro-batch's forward pass, with `s = micro_batch_seed(...)`:
`torch.manual_seed(s)`, `random.seed(s)`, `numpy.random.seed(s % 2**32)`. The program's own numbers, drawn between the
engine's calls, stay the same.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.model.contract import UnseenError

_PythonState = tuple[Any, ...]
"""States of Python's and NumPy's generators."""


@dataclass(slots=True, eq=False)
class RandomState:
    """States of torch's generators, and of Python's and NumPy's if forward draws from them."""

    device: tuple[Tensor, ...] = ()
    python: _PythonState = ()


def states_differ(a: RandomState, b: RandomState) -> bool:
    """Return whether random numbers were drawn between two states."""
    return a.python != b.python or any(not x.equal(y) for x, y in zip(a.device, b.device, strict=True))


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Return the seed of micro-batch `index` (from 0) of optimizer step `step` (from 0): 63 bits."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RandomStreams:
    """Switches the process's generators between micro-batches, one of which runs at a time.

    Attributes:
        current: the stream that the generators are in; None: none that can be gone on with.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._states: dict[object, RandomState] = {}
        self.current: object | None = None
        self._of_program: tuple[list[tuple[Tensor, ...]], _PythonState] | None = None  # of all devices, and of Python
        # Whether forward was seen to draw from Python's or NumPy's generators: until then they stay as the program left
        # them, since to read them takes 80 us.
        self.draws_in_python = False

    def open(self) -> None:
        """Save the states of the program's generators."""
        self._of_program = self._device.random_states_of_all(), read_python_state()

    def close(self) -> None:
        """Restore the program's generators, and drop all streams."""
        assert self._of_program is not None
        of_devices, of_python = self._of_program
        self._device.set_random_states_of_all(of_devices)
        set_python_state(of_python)
        self._of_program = self.current = None
        self._states.clear()

    def start(self, stream: object, seed: int) -> None:
        """Begin a stream and make it current."""
        self._suspend()
        self._device.seed(seed)
        if self.draws_in_python:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self.current = stream

    def has(self, stream: object) -> bool:
        """Return whether `stream` has been begun since `open`."""
        return stream is self.current or stream in self._states

    def switch(self, stream: object) -> None:
        if self.current is not stream:
            self._suspend()
            self._restore(self._states[stream])
            self.current = stream

    def check_drawn(self) -> None:
        """Raise UnseenError if forward has drawn from Python's or NumPy's generators for the first time."""
        assert self._of_program is not None
        _, of_python = self._of_program
        if not self.draws_in_python and of_python != read_python_state():
            self.draws_in_python = True
            raise UnseenError("forward draws from random or numpy.random, which was not seen when it was measured.")

    def snapshot(self) -> RandomState:
        return RandomState(self._device.random_state(), read_python_state() if self.draws_in_python else ())

    def replay(self, state: RandomState) -> None:
        """Set the generators to `state`; no stream is current afterwards."""
        self._suspend()
        self._restore(state)

    def _restore(self, state: RandomState) -> None:
        self._device.set_random_state(state.device)
        if state.python:
            set_python_state(state.python)

    def _suspend(self) -> None:
        if self.current is not None:
            self._states[self.current] = self.snapshot()
        self.current = None


def read_python_state() -> _PythonState:
    """Return the states of Python's and NumPy's global generators."""
    numpy_state: Any = np.random.get_state()
    kind, key, *rest = numpy_state
    return random.getstate(), (kind, key.tobytes(), *rest)


def set_python_state(state: _PythonState) -> None:
    """Set Python's and NumPy's global generators to what `read_python_state` returned."""
    python_state, (kind, key, *rest) = state
    random.setstate(python_state)
    np.random.set_state((kind, np.frombuffer(key, np.uint32), *rest))
