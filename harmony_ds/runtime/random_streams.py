"""What each micro-batch has for itself: random numbers, and attributes of modules that its forward pass changes.

Random numbers depend on seed, step and micro-batch, and on nothing else: each micro-batch draws from a stream of its
own, whichever order the plan runs layers in. To get the same numbers in plain PyTorch, call
`torch.manual_seed(micro_batch_seed(seed, step, index))` before the micro-batch's forward pass. A model that was seen to
draw from Python's or NumPy's global generator as well gets a stream of theirs for each micro-batch:
`random.seed(seed)` and `numpy.random.seed(seed % 2**32)` with the same seed. What the user's generators stood at is
given back after every step.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.runtime.attributes import Places, Snapshot


@dataclass(frozen=True, slots=True)
class State:
    """Where the generators stand: the device's, and those outside torch that are drawn from."""

    device: tuple[Tensor, ...] = ()
    others: tuple[Any, ...] = ()


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of micro-batch `index` (from 0) of optimizer step `step` (from 0): 63 bits, independent of the plan."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class _Generator:
    """A global generator outside torch. States compare as equal if they are."""

    seed: Callable[[int], None]
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _read_numpy() -> Any:
    kind, keys, *rest = _numpy().get_state()
    return kind, keys.tobytes(), *rest


def _write_numpy(state: Any) -> None:
    import numpy

    kind, keys, *rest = state
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _numpy() -> Any:
    import numpy

    return numpy.random


_PYTHON = _Generator(random.seed, random.getstate, random.setstate)
_NUMPY = _Generator(lambda seed: _numpy().seed(seed % 2**32), _read_numpy, _write_numpy)


class RandomStreams:
    """Switches generators and attributes between micro-batches. They are the process's and the model's: one runs at a
    time.

    Attributes:
        apart: attributes that forward passes write anew, each for itself.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._others: tuple[_Generator, ...] = ()  # that belong to the streams beside the device's
        self._drawn: tuple[_Generator, ...] = ()  # that the model was seen to draw from
        self._states: dict[object, tuple[State, Snapshot]] = {}
        self._current: object | None = None
        self._newest: object | None = None
        self._ambient: tuple[State, tuple[_Generator, ...]] | None = None
        self.apart: Places = ()

    def open(self) -> None:
        """Remembers the user's generators."""
        self._ambient = self.snapshot(), self._others

    def close(self) -> None:
        """Gives the user's generators back as they were, and forgets all streams. Attributes are the newest stream's."""
        self._leave()
        if self._newest in self._states:
            self._states[self._newest][1].restore()
        if self._ambient is not None:
            state, self._others = self._ambient
            self.rewind(state)
            self._others = self._drawn
        self._ambient = None
        self._newest = None
        self._states.clear()

    def start(self, stream: object, seed: int) -> None:
        """A fresh stream, current from now on."""
        self._leave()
        self._device.seed(seed)
        for generator in self._others:
            generator.seed(seed)
        self._current = self._newest = stream

    def switch(self, stream: object) -> None:
        """Goes on where `stream` was left."""
        if self._current is stream:
            return
        self._leave()
        state, attributes = self._states[stream]
        self.rewind(state)
        attributes.restore()
        self._current = stream

    def snapshot(self) -> State:
        """Where the generators stand, for `replay`."""
        return State(self._device.random_state(), tuple(generator.read() for generator in self._others))

    def replay(self, state: State) -> None:
        """Draws once more what was drawn from `state` on; no stream is current afterwards."""
        self._leave()
        self.rewind(state)

    def rewind(self, state: State) -> None:
        """Goes back to `state` in whatever stream is current."""
        self._device.set_random_state(state.device)
        for generator, other in zip(self._others, state.others, strict=True):
            generator.write(other)

    def watch_others(self) -> None:
        """Python's and NumPy's generators belong to the streams that are opened next."""
        self._others = (_PYTHON, _NUMPY) if "numpy" in sys.modules else (_PYTHON,)

    def keep_drawn(self, before: State) -> None:
        """Those that have moved on since `before` belong to all streams that are opened from now on."""
        drawn = [g for g, state in zip(self._others, before.others, strict=True) if g.read() != state]
        self._drawn = tuple(dict.fromkeys((*self._drawn, *drawn)))

    def _leave(self) -> None:
        if self._current is not None:
            self._states[self._current] = self.snapshot(), Snapshot(self.apart)
        self._current = None
