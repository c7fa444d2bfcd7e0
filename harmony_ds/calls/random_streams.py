"""What each micro-batch has for itself: random numbers, and attributes of modules that its forward pass changes.

Random numbers depend on seed, step and micro-batch, and on nothing else: each micro-batch draws from a stream of its
own, whichever order the plan runs layers in. To get the same numbers in plain PyTorch, call
`torch.manual_seed(micro_batch_seed(seed, step, index))` before the micro-batch's forward pass.

Other generators (Python's and NumPy's global ones, a `torch.Generator` of the model's) are the program's: nobody seeds
them, and forward passes draw from them at their calls, as in plain PyTorch. A model that was seen to draw from them has
them replayed where a layer is recomputed, and put back to where its forward passes left them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from harmony_ds.calls.generators import generators_of, global_generators
from harmony_ds.calls.places import Noted, Places, kept, read_all, write_all
from harmony_ds.device.base import Device


@dataclass(frozen=True, slots=True)
class State:
    """Where the generators stand: the device's, and those outside torch that are drawn from."""

    device: tuple[Tensor, ...] = ()
    others: tuple[Any, ...] = ()


def differ(a: State, b: State) -> bool:
    """Whether random numbers were drawn between two states."""
    return a.others != b.others or any(not x.equal(y) for x, y in zip(a.device, b.device, strict=True))


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of micro-batch `index` (from 0) of optimizer step `step` (from 0): 63 bits, independent of the plan."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RandomStreams:
    """Switches generators and attributes between micro-batches. They are the process's and the model's: one runs at a
    time.

    Attributes:
        apart: attributes that forward passes write anew, each for itself.
        touched: all that they write to, what goes on from one to the next included.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._others: Places = ()  # that the model was seen to draw from
        self._held: Places = ()
        self._left: tuple[Any, ...] | None = None  # where forward passes left them, while a layer is recomputed
        self._states: dict[object, tuple[tuple[Tensor, ...], Noted]] = {}
        self._current: object | None = None
        self._newest: object | None = None
        self._ambient: tuple[Tensor, ...] | None = None
        self._before: tuple[tuple[Any, ...], Noted] | None = None
        self.apart: Places = ()
        self.touched: Places = ()

    @property
    def draws_from_others(self) -> bool:
        """Whether forward passes draw from generators that the program may draw from or seed between their calls."""
        return bool(self._others)

    def look_for_generators(self, modules: Iterable[nn.Module]) -> None:
        """What `modules` hold may be drawn from, too."""
        self._held = generators_of(modules)

    def _available(self) -> Places:
        return *global_generators(), *self._held

    def open(self) -> None:
        """Remembers the user's generators."""
        self._ambient = self._device.random_state()
        self._before = tuple(read_all(self._others)), Noted(self.touched, copies=True)

    def close(self) -> None:
        """Gives torch's generators back as they were, and forgets all streams. Attributes are the newest stream's."""
        self._leave()
        if self._newest in self._states:
            self._states[self._newest][1].restore()
        if self._ambient is not None:
            self._device.set_random_state(self._ambient)
        self._ambient = self._before = None
        self._newest = None
        self._states.clear()

    def undo(self) -> None:
        """Before `close`, after a failure: forward passes have drawn and changed nothing, and may be run again."""
        assert self._before is not None
        self._current = self._newest = self._left = None
        others, attributes = self._before
        write_all(self._others, others)
        attributes.restore()

    def start(self, stream: object, seed: int) -> None:
        """A fresh stream, current from now on."""
        self._leave()
        self._device.seed(seed)
        self._current = self._newest = stream

    def switch(self, stream: object) -> None:
        """Goes on where `stream` was left."""
        if self._current is stream:
            return
        self._leave()
        state, attributes = self._states[stream]
        self._device.set_random_state(state)
        attributes.restore()
        self._current = stream

    def snapshot(self) -> State:
        """Where the generators stand, for `replay`."""
        return State(self._device.random_state(), tuple(read_all(self._others)))

    def replay(self, state: State) -> None:
        """Draws once more what was drawn from `state` on; no stream is current afterwards."""
        self._leave()
        self._left = tuple(read_all(self._others))
        self.rewind(state)

    def rewind(self, state: State) -> None:
        """Goes back to `state` in whatever stream is current."""
        self._device.set_random_state(state.device)
        write_all(self._others, state.others)

    @contextmanager
    def watching_others(self) -> Iterator[list[str]]:
        """While open, all generators are replayed that can be. The list names those that were drawn from in the end, which
        are replayed from then on; they are where they were.
        """
        known = self._others
        self._others = self._available()
        before = tuple(read_all(self._others))
        drawn: list[str] = []
        try:
            yield drawn
        finally:
            moved = [g for g, state in zip(self._others, before, strict=True) if g.read() != state]
            write_all(self._others, before)
            self._others = tuple(dict.fromkeys((*known, *moved)))
            drawn += [generator.name for generator in self._others]

    @contextmanager
    def others_kept(self) -> Iterator[None]:
        """Whatever is drawn from other generators while the context is open is undone in the end."""
        with kept(self._available()):
            yield

    def _leave(self) -> None:
        if self._current is not None:
            self._states[self._current] = self._device.random_state(), Noted(self.apart)
        self._current = None
        if self._left is not None:
            write_all(self._others, self._left)
            self._left = None
