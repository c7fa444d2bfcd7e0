"""Random numbers that depend on seed, step and micro-batch, and on nothing else, whichever order the plan runs layers in.

Each micro-batch draws from streams of its own: torch's (the host's and the device's), Python's and NumPy's. To get the
same numbers in plain PyTorch, seed all of them before the micro-batch's forward pass, with `s = micro_batch_seed(...)`:
`torch.manual_seed(s)`, `random.seed(s)`, `numpy.random.seed(s % 2**32)`. What the program itself draws between the
engine's calls is untouched.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from harmony_ds.calls.contract import UnseenError
from harmony_ds.device.base import Device

_Standing = tuple[Any, ...]
"""Where Python's and NumPy's generators stand."""


@dataclass(slots=True, eq=False)
class State:
    """Where the generators stand: torch's, and the others if forward draws from them."""

    device: tuple[Tensor, ...] = ()
    others: _Standing = ()


def states_differ(a: State, b: State) -> bool:
    """Whether random numbers were drawn between two states."""
    return a.others != b.others or any(not x.equal(y) for x, y in zip(a.device, b.device, strict=True))


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of micro-batch `index` (from 0) of optimizer step `step` (from 0): 63 bits, independent of the plan."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RandomStreams:
    """Switches generators between micro-batches. They are the process's: one stream runs at a time.

    Attributes:
        draws_on_host: forward was seen to draw from Python's or NumPy's generators, whose standing is kept and
            replayed from then on. (It takes 20 us to read.)
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._states: dict[object, State] = {}
        self._current: object | None = None
        self._ambient: State | None = None
        self._seeded: _Standing | None = None  # as the last stream began, as long as nobody is known to draw
        self.draws_on_host = False

    def open(self) -> None:
        """Remembers the program's generators."""
        self._ambient = State(self._device.random_state(), _read_others())

    def close(self) -> None:
        """Gives the program its generators back as they were, and forgets all streams."""
        assert self._ambient is not None
        self._go_to(self._ambient)
        self._ambient = self._current = self._seeded = None
        self._states.clear()

    def start(self, stream: object, seed: int) -> None:
        """A fresh stream, current from now on.

        Raises:
            UnseenError: as `check_drawn`.
        """
        self.check_drawn()
        self._leave()
        self._device.seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._seeded = None if self.draws_on_host else _read_others()
        self._current = stream

    def switch(self, stream: object) -> None:
        """Goes on where `stream` was left."""
        if self._current is not stream:
            self._leave()
            self._go_to(self._states[stream])
            self._current = stream

    def check_drawn(self) -> None:
        """Raises UnseenError if forward has drawn from Python's or NumPy's generators, for the first time."""
        if self._seeded is not None and self._seeded != _read_others():
            self.draws_on_host = True
            raise UnseenError("forward draws from random or numpy.random, which was not seen when it was measured.")

    def snapshot(self) -> State:
        """Where the generators stand, for `replay`."""
        return State(self._device.random_state(), _read_others() if self.draws_on_host else ())

    def replay(self, state: State) -> None:
        """Draws once more what was drawn from `state` on; no stream is current afterwards."""
        self._leave()
        self._go_to(state)

    def _go_to(self, state: State) -> None:
        self._device.set_random_state(state.device)
        if state.others:
            _write_others(state.others)

    def _leave(self) -> None:
        if self._current is not None:
            self._states[self._current] = self.snapshot()
        self._current = None


def _read_others() -> _Standing:
    numpys: Any = np.random.get_state()
    kind, key, *rest = numpys
    return random.getstate(), (kind, key.tobytes(), *rest)


def _write_others(standing: _Standing) -> None:
    pythons, (kind, key, *rest) = standing
    random.setstate(pythons)
    np.random.set_state((kind, np.frombuffer(key, np.uint32), *rest))
