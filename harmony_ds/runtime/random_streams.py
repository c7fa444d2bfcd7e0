"""Random numbers that depend on seed, step and micro-batch, and on nothing else.

Each micro-batch draws from a stream of its own, whichever order the plan runs layers in. To get the same numbers in
plain PyTorch, call `torch.manual_seed(micro_batch_seed(seed, step, index))` before the micro-batch's forward pass.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

from harmony_ds.device.base import Device

State = tuple[Tensor, ...]


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of micro-batch `index` (from 0) of optimizer step `step` (from 0): 63 bits, independent of the plan."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RandomStreams:
    """Switches the device's generators between micro-batches. The generators are the process's: one runs at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._states: dict[object, State] = {}
        self._current: object | None = None
        self._ambient: State | None = None

    def open(self) -> None:
        """Remembers the user's generators."""
        self._ambient = self._device.random_state()

    def close(self) -> None:
        """Gives the user's generators back as they were, and forgets all streams."""
        if self._ambient is not None:
            self._device.set_random_state(self._ambient)
        self._ambient = None
        self._current = None
        self._states.clear()

    def start(self, stream: object, seed: int) -> None:
        """A fresh stream, current from now on."""
        self._leave()
        self._device.seed(seed)
        self._current = stream

    def switch(self, stream: object) -> None:
        """Goes on where `stream` was left."""
        if self._current is stream:
            return
        self._leave()
        self._device.set_random_state(self._states[stream])
        self._current = stream

    def snapshot(self) -> State:
        """The state of the current stream, for `replay`."""
        return self._device.random_state()

    def replay(self, state: State) -> None:
        """Draws once more what was drawn from `state` on; no stream is current afterwards."""
        self._leave()
        self._device.set_random_state(state)

    def _leave(self) -> None:
        if self._current is not None:
            self._states[self._current] = self._device.random_state()
        self._current = None
