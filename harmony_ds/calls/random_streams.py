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
import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harmony_ds.calls.module_places import all_places
from harmony_ds.calls.places import SCALARS, Noted, Place, Places, Setting, kept, read_all, write_all
from harmony_ds.calls.trees import flatten
from harmony_ds.device.base import Device
from harmony_ds.errors import ModelError


@dataclass(slots=True, eq=False)
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


class OutOfOrderError(ModelError):
    """A forward pass has changed what later ones had begun with; nothing is changed, and they can be run one by one."""


class RandomStreams:
    """Switches generators and attributes between micro-batches. They are the process's and the model's: one runs at a
    time.

    Attributes:
        apart: attributes that forward passes write anew, each for itself.
        touched: all that they write to, what goes on from one to the next included.
        filled: attributes that the first of several writes, and the others only now and then (caches that grow). Each
            micro-batch goes on with those that it has left, and begins with what those before it have left so far.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._others: Places = ()  # that the model was seen to draw from
        self._available: Places = _GLOBAL
        self._left: tuple[Any, ...] | None = None  # where forward passes left them, while a layer is recomputed
        self._states: dict[object, tuple[tuple[Tensor, ...], Noted]] = {}
        self._current: object | None = None
        self._newest: object | None = None
        self._ambient: tuple[Tensor, ...] | None = None
        self._before: tuple[tuple[Any, ...], Noted, Noted] | None = None
        self._entered: Noted | None = None  # what the current stream found, where there are caches
        self.apart: Places = ()
        self.touched: Places = ()
        self.filled: Places = ()

    @property
    def draws_from_others(self) -> bool:
        """Whether forward passes draw from generators that the program may draw from or seed between their calls."""
        return bool(self._others)

    def look_for_generators(self, modules: Iterable[nn.Module]) -> None:
        """What `modules` hold may be drawn from, too."""
        self._available = *_GLOBAL, *_generators_of(modules)

    def open(self) -> None:
        """Remembers the user's generators."""
        self._ambient = self._device.random_state()
        self._before = tuple(read_all(self._others)), Noted(self.touched, copies=True), Noted(self.filled)

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
        others, attributes, caches = self._before
        write_all(self._others, others)
        caches.restore()
        attributes.restore()

    def start(self, stream: object, seed: int) -> None:
        """A fresh stream, current from now on."""
        self._leave()
        self._device.seed(seed)
        self._current = self._newest = stream
        self._entered = Noted(self.filled) if self.filled else None

    def switch(self, stream: object) -> None:
        """Goes on where `stream` was left."""
        if self._current is stream:
            return
        self._leave()
        state, attributes = self._states[stream]
        self._device.set_random_state(state)
        attributes.restore()
        self._current = stream
        self._entered = attributes if self.filled else None

    def check_order(self) -> None:
        """After a piece of the current stream's forward pass.

        Raises:
            OutOfOrderError: it has changed a cache, and streams have begun with that as it was.
            ModelError: it has written into a tensor of a cache that others go on with.
        """
        if self._current is None or self._entered is None:
            return
        changed = [place for place in self.filled if place in self._entered.changed()]
        if not changed:
            return
        written = [place for place in changed if self._entered.has_written(place)]
        if written and self._states:
            raise ModelError(
                f"forward writes in place into what {written[0].name} holds from one forward pass to the next (a cache "
                "that grows), while other micro-batches of the step are on their way and read it. Make a new tensor "
                "(self.cache = torch.cat(...)), or fill it to its full size before training."
            )
        if self._current is not self._newest:
            raise OutOfOrderError(f"a forward pass changes {changed[0].name} after the next one has begun.")

    def snapshot(self) -> State:
        """Where the generators stand, for `replay`."""
        return State(self._device.random_state(), tuple(read_all(self._others)) if self._others else ())

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
        self._others = self._available
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
        with kept(self._available):
            yield

    def _leave(self) -> None:
        if self._current is not None:
            self._states[self._current] = self._device.random_state(), Noted((*self.apart, *self.filled))
        self._current = self._entered = None
        if self._left is not None:
            write_all(self._others, self._left)
            self._left = None


# ---- generators beside torch's global ones, as places: what they hold is where they stand


class _Generators(Place):
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


def _generators_of(modules: Iterable[nn.Module]) -> Places:
    """Those that `modules` hold, and the variables that their code names."""
    holding = (place for place in dict.fromkeys(all_places(modules)) if _generators_in(place.read()))
    return tuple(_Generators(place, place.key, f"the generator {place.key}") for place in holding)


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from `value`."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return isinstance(value, (np.random.Generator, np.random.RandomState))


def _generators_in(value: Any) -> list[Any]:
    if isinstance(value, (*SCALARS, torch.Tensor, nn.Module)):
        return []
    return list({id(leaf): leaf for leaf in flatten(value)[0] if is_generator(leaf)}.values())


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(
        generator.__getstate__() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state
    )


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.__setstate__(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


_GLOBAL = (
    Setting((random.getstate, random.setstate), "random", "Python's global random numbers"),
    Setting(
        (lambda: pickle.dumps(np.random.get_state()), lambda state: np.random.set_state(pickle.loads(state))),
        "numpy.random",
        "NumPy's global random numbers",
    ),
)
