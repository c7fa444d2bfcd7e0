"""Finds out what a model's forward pass changes beside its results, and whether its layers can be run again.

The forward pass is run twice in a row, layer by layer. Each layer call is tried from the same state until it shows
nothing new, and must then give the same bits. What is found is told to those who need it: attributes that belong to a
layer's calls (`LayerCalls`), attributes and generators that each micro-batch has for itself (`RandomStreams`), and why
forward passes must run one after another, if they must.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.buffers import Buffers, buffers_apart, changes_buffers_unseen, copied_buffers
from harmony_ds.calls.inter_layer import targets_behind
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.module_places import assignments, modules_in, places_of, undone
from harmony_ds.calls.own_backward import guarded_forward
from harmony_ds.calls.places import Noted, Place
from harmony_ds.calls.random_streams import RandomStreams
from harmony_ds.calls.recorded_call import InputChangedError, Writes
from harmony_ds.calls.targets import DeadEnd, GradientTarget, OutputGradient
from harmony_ds.calls.trees import flatten, tensors_in
from harmony_ds.errors import ModelError, RecomputeError
from harmony_ds.measuring.passes import Passes, Setup
from harmony_ds.measuring.row_probe import close
from harmony_ds.measuring.sample import Sample
from harmony_ds.measuring.thread_locals import ATOMS, ThreadLocals
from harmony_ds.offload.residency import DeviceCopy

_Buffer = tuple[nn.Module, str]
_ATTEMPTS = 8
_BETWEEN = -1
_UNSEEN = "an iterator, a generator that is out of sight or that forward makes itself, a parameter that it writes to"


class Rehearsal(Passes):
    """Runs one micro-batch through the model twice, layer by layer. Used once."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._all = setup.parts.installation.modules
        self._modules = {layer.index: tuple(layer.module.modules()) for layer in setup.layers}
        inner = {module for modules in self._modules.values() for module in modules}
        self._modules[_BETWEEN] = tuple(module for module in self._all if module not in inner)
        # A layer may also know modules of others in a way of its own (`self.first = [first_block]`).
        self._known = {layer: modules_in(self._modules[layer], set(self._all)) for layer in self._modules}
        self._known[_BETWEEN] = self._modules[_BETWEEN]
        self._near = {
            layer: {other for other, own in self._modules.items() if not set(known).isdisjoint(own)} | {_BETWEEN}
            for layer, known in self._known.items()
        }
        self._own: dict[int, set[Place]] = {}
        self._start: dict[int, Noted] = {}
        self._touched: set[Place] = set()
        self._assigned: set[Place] = set()
        self._calls: list[int] = []
        self._first = True
        self._inside = False  # a layer
        self._outputs: list[Tensor] = []
        self._of_threads = ThreadLocals(())
        self._given: list[tuple[int, Writes]] = []  # to the layers' calls

    def rehearse(self, sample: Sample) -> str | None:
        """What forbids that forward passes of several micro-batches run side by side; None: nothing.

        Raises:
            RecomputeError: a layer gives something else when it is run again on what it was given.
            ModelError: a layer writes into its own parameters.
            InputChangedError: what layers were given is written to behind them; copies are kept from now on.
            BaseException: whatever the model raised.
        """
        watching = self._parts.random.watching_others()
        with self._opened() as copy, watching as drawn, undone(self._all), self._lent(copy):
            reason = self._run_twice(sample)
            self._check_written("the code between the layers", copy)
        if drawn:
            return f"the model draws from {drawn[0]}, from one forward pass to the next"
        return reason

    def _run_twice(self, sample: Sample) -> str | None:
        unwritten = _BufferPrints([(m, m._buffers) for m in self._all])
        self._pass(sample)
        self._note_unseen(unwritten)
        filled, found = self._touched, _Prints(self._all, self._touched)
        written = unwritten.written()
        for layer in self._modules:
            if layer != _BETWEEN:
                self._watch_touched(layer)
        self._first = False
        outputs = self._outputs
        start = _Start(self._all, self._parts.random)
        self._pass(sample)
        same = len(outputs) == len(self._outputs) and all(map(_alike, outputs, self._outputs))
        if not same and self._parts.device.has_values:
            self._check_again(sample, start)
        reason = self._compare(found, written, same or not self._parts.device.has_values)
        self._note_filled(filled)
        return reason

    def _note_filled(self, places: set[Place]) -> None:
        """Of `places`, which the first pass has touched, those that the second one has not are caches. One that a single
        call has for itself comes to each micro-batch in turn.
        """
        caches = {place for place in places - self._touched if self._is_cache(place)}
        self._parts.random.filled = tuple(caches.union(self._parts.random.filled))

    def _is_cache(self, place: Place) -> bool:
        known = place.module is None or place.module in self._all
        owners = [layer for layer in self._modules if self._owns(layer, place)]
        return known and not self._is_one_call(owners) and _Print.of(place.read()).has_tensors

    def _check_again(self, sample: Sample, start: _Start) -> None:
        """Whether the last pass gives the same once more."""
        outputs, touched = self._outputs, self._touched
        with undone(self._all), start.again():
            self._pass(sample)
        if not self._same(outputs, self._outputs):
            raise RecomputeError(
                f"the forward pass of {type(self._all[0]).__name__} was run twice on the same arguments, attributes, "
                "buffers and random numbers, and gave different outputs: the code between its layers goes on from "
                f"something that is not seen ({_UNSEEN}). Forward passes run more often than they are called. Keep such "
                "state in attributes or buffers of the model's modules, from the first call on."
            )
        self._touched = touched

    def _watch_touched(self, layer: int) -> None:
        """What somebody has touched and `layer` knows is part of what its calls take and give."""
        places = [place for place in self._touched if self._owns(layer, place)]
        self._parts.layer_calls.watch(layer, places)

    def _pass(self, sample: Sample) -> None:
        """One forward pass; what it touches is in `_touched`."""
        self._start = {key: Noted(places_of(modules)) for key, modules in self._modules.items()}
        self._own = {layer: set(places_of(modules)) for layer, modules in self._known.items()}
        self._touched = set()
        self._calls.clear()
        self._given.clear()
        self._of_threads = ThreadLocals(self._parts.calls.of_threads)
        with guarded_forward(lambda: self._inside), assignments() as self._assigned:
            outputs = self._forward(sample)
        self._of_threads.check_end()
        self._check_given()
        self._outputs = [tensor.detach().clone() for tensor in tensors_in(outputs)]
        self._touched |= self._assigned
        for snapshot in self._start.values():
            self._touched |= snapshot.changed()

    # ---- one call of a layer

    def arrived(self, request: Request) -> None:
        """Notes what the code since the last call has touched."""
        self._of_threads.check_call()
        self._calls.append(request.layer)
        for key in self._near[request.layer]:
            self._touched |= self._start[key].changed()
        self._touched |= self._assigned

    def run(self, request: Request, copy: DeviceCopy) -> Any:
        """Tries the call, the first time that it comes, before it is run."""
        self._inside = True
        if self._first:
            self._try(request, copy)
        outputs, call = self._record(request, copy)
        if call is not None:
            self._given += [(request.layer, writes) for writes in call.writes]
            self._parts.layer_calls.forget(call)
        return outputs

    def evicted(self) -> None:
        """What runs now is the code behind the call."""
        self._inside = False

    def _try(self, request: Request, copy: DeviceCopy) -> None:
        """Runs the call until it shows nothing new, and once more.

        Raises: as `rehearse`.
        """
        calls, layer = self._parts.layer_calls, request.layer
        self._watch_touched(layer)
        for _ in range(_ATTEMPTS):
            buffers = calls.copied_buffers(layer)
            start = _BufferPrints(buffers)
            outputs, touched = self._trial(request, copy, buffers)
            self._touched |= touched
            if not calls.watch(layer, touched):
                break
        if self._note_unseen(start):
            calls.replay_buffers(layer)
        self._check_graph(layer, outputs)
        outputs = [output.detach() for output in outputs]
        self._check_written(f"layer {self._layers[layer].name}", copy)
        # Normalization gathers statistics that it does not read: to copy them for each call would be for nothing.
        advanced = dict(buffers)
        mixed = [(m, advanced[m] if changes_buffers_unseen(m) else own) for m, own in calls.copied_buffers(layer)]
        if self._same(outputs, self._trial(request, copy, mixed)[0]):
            return
        calls.replay_buffers(layer)
        if not self._same(outputs, self._trial(request, copy, calls.copied_buffers(layer))[0]):
            raise RecomputeError(
                f"layer {self._layers[layer].name} was run twice on the same arguments, attributes, buffers and random "
                f"numbers, and gave different outputs: it depends on something else that it changes ({_UNSEEN}), so its "
                "forward pass cannot be recomputed. Keep such state in attributes or buffers of the layer's modules, from "
                "the first call on."
            )

    def _note_unseen(self, start: _BufferPrints) -> bool:
        """Whether buffers have been written to since `start` without a rise of their versions (`.data`)."""
        unseen = start.written_unseen()
        self._parts.installation.buffers.written_unseen |= unseen
        return bool(unseen)

    def _trial(self, request: Request, copy: DeviceCopy, buffers: Buffers) -> tuple[list[Tensor], set[Place]]:
        """Outputs of the call over `buffers`, and the attributes that it touches; everything is as before then."""
        parts = self._parts
        state = parts.random.snapshot()
        seen = tuple(dict.fromkeys((*self._known[request.layer], *self._modules[_BETWEEN])))
        with undone(seen), buffers_apart(buffers):
            before = Noted(places_of(seen))
            with assignments() as assigned:
                trial = parts.layer_calls.trial(request, copy.leaves)
            touched = before.changed() | assigned
        parts.random.rewind(state)
        return trial.outputs, touched

    def _same(self, outputs: Sequence[Tensor], again: Sequence[Tensor]) -> bool:
        # Kernels of other devices may add up in any order.
        exact = self._parts.device.torch_device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        equal = _equal if exact else close
        return len(outputs) == len(again) and all(map(equal, outputs, again))

    def _check_given(self) -> None:
        written = {layer for layer, writes in self._given if writes.happened}
        for layer in written:
            self._parts.layer_calls.copy_inputs(layer)
        if written:
            names = ", ".join(self._layers[layer].name for layer in sorted(written))
            raise InputChangedError(f"the inputs of layers {names} are changed in place after their calls.")

    def _check_graph(self, layer: int, outputs: Sequence[Tensor]) -> None:
        """Whether gradients of a call's outputs go to that call alone."""
        name = self._layers[layer].name
        others = {self._layer_of(target) for target in targets_behind(outputs)} - {name}
        if others:
            raise RecomputeError(
                f"layer {name} computes with a tensor of {', '.join(sorted(others))} that it was not given: it comes "
                "neither in its arguments nor on an attribute of a module or in a variable that its code names, and its "
                "gradient would be lost. Pass it as an argument."
            )

    def _layer_of(self, target: GradientTarget) -> str:
        if isinstance(target, OutputGradient):
            return self._layers[self._calls[target.call]].name
        return target.layer if isinstance(target, DeadEnd) else "the code between the layers"

    def _check_written(self, who: str, copy: DeviceCopy) -> None:
        written = self._parts.residency.written(copy)
        if written:
            raise ModelError(
                f"{who} writes into the parameter {written[0]} in forward, where it is a copy on the device: what is "
                "written would be lost. Change parameters between steps (engine.module.parameters()), or compute with a "
                "changed copy (self.weight.clamp(...))."
            )

    # ---- what two passes in a row have left

    def _compare(self, first: _Prints, written: Collection[_Buffer], same_outputs: bool) -> str | None:
        """Tells apart what every forward pass writes anew, and what goes on from one to the next.

        A value that is the same behind either pass might still be read by the next one. It is taken not to be where both
        passes gave the same outputs and the value holds no tensor, which would come of the inputs.

        Args:
            written: buffers that a pass writes to.
        """
        model = set(self._all)  # a module that forward makes for itself (a loss function) is gone with it
        self._touched = {place for place in self._touched if place.module is None or place.module in model}
        second = _Prints(self._all, self._touched)
        again = (place for place in self._touched if second.attributes[place].same(first.attributes.get(place)))
        apart = [place for place in again if not second.attributes[place].has_tensors] if same_outputs else []
        random = self._parts.random
        random.apart, random.touched = tuple({*random.apart, *apart}), tuple({*random.touched, *self._touched})
        carried = [place for place in self._touched if place not in apart and not self._is_in_order(place, second)]
        names = {module: name for name, module in self._all[0].named_modules()}
        for module, key in [*((p.module, p.key) for p in carried), *self._carried_buffers(first, second, written)]:
            name = f"the variable {key}" if module is None else ".".join(filter(None, (names.get(module), key)))
            return f"{name} goes on from one forward pass to the next"
        return None

    def _is_in_order(self, place: Place, prints: _Prints) -> bool:
        """Whether a value is one layer's own, which comes to each micro-batch in turn."""
        owners = [layer for layer in self._modules if self._owns(layer, place)]
        return self._is_one_call(owners) and all(isinstance(v, ATOMS) for v in prints.attributes[place].leaves)

    def _owns(self, layer: int, place: Place) -> bool:
        return place in self._own[layer] or place.module in self._known[layer]

    def _is_one_call(self, owners: Sequence[int]) -> bool:
        return len(owners) == 1 and self._calls.count(owners[0]) == 1

    def _carried_buffers(self, first: _Prints, second: _Prints, written: Collection[_Buffer]) -> Iterable[_Buffer]:
        for (module, key), value in second.buffers.items():
            before = first.buffers.get((module, key))
            owners = [layer for layer, modules in self._modules.items() if module in modules]
            # One that is written anew each time is still one for all that wait between the layers.
            carried = before is None or (module, key) in written or not _equal(before, value)
            if carried and not self._is_one_call(owners):
                yield module, key


@dataclass(frozen=True, slots=True, eq=False)
class _Print:
    """What an attribute holds, kept as it is now."""

    leaves: list[Any]
    versions: list[tuple[int, int]]
    known: list[Any]

    @staticmethod
    def of(value: Any) -> _Print:
        leaves, shape = flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        frozen = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return _Print(frozen, [(id(t), t._version) for t in tensors], [branch.known for branch in shape.mutable])

    @property
    def has_tensors(self) -> bool:
        return bool(self.versions)

    def same(self, other: _Print | None) -> bool:
        """Whether it is as `other`, and no tensor of that was changed in place."""
        if other is None or self.known != other.known or len(self.leaves) != len(other.leaves):
            return False
        versions = dict(other.versions)
        in_place = any(versions.get(tensor, version) != version for tensor, version in self.versions)
        return not in_place and all(map(_alike, self.leaves, other.leaves))


class _Start:
    """What a forward pass begins with, kept as it is now."""

    def __init__(self, modules: Sequence[nn.Module], random: RandomStreams) -> None:
        self._random = random
        self._state = random.snapshot()
        self._attributes = Noted(places_of(modules), copies=True)
        self._buffers = copied_buffers(modules)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything is as it was; buffers, while the context is open."""
        self._attributes.restore()
        self._random.rewind(self._state)
        with buffers_apart(self._buffers):
            yield


class _BufferPrints:
    """Buffers as they are now, with their versions."""

    def __init__(self, buffers: Buffers) -> None:
        self._now = buffers
        self._then = {
            (module, key): (b, b._version, b.clone())
            for module, held in buffers
            if not changes_buffers_unseen(module)
            for key, b in held.items()
            if b is not None
        }

    def written(self) -> set[_Buffer]:
        """Those that hold something else now, or were written to."""
        return {one for one, now in self._held() if self._is_other(one, now) or not _equal(now, self._then[one][2])}

    def written_unseen(self) -> set[nn.Module]:
        """Modules with buffers that hold something else now, and say that nobody has written to them."""
        return {
            one[0] for one, now in self._held() if not self._is_other(one, now) and not _equal(now, self._then[one][2])
        }

    def _held(self) -> Iterator[tuple[_Buffer, Tensor]]:
        held = (((module, key), b) for module, buffers in self._now for key, b in buffers.items())
        return ((one, b) for one, b in held if one in self._then and b is not None)

    def _is_other(self, one: _Buffer, now: Tensor) -> bool:
        before, version, _ = self._then[one]
        return now is not before or now._version != version


class _Prints:
    """Attributes that were touched, and all buffers, as they are now."""

    def __init__(self, modules: Sequence[nn.Module], touched: Iterable[Place]) -> None:
        self.attributes = {place: _Print.of(place.read()) for place in touched}
        self.buffers = {(m, k): b.clone() for m in modules for k, b in m._buffers.items() if b is not None}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _equal(a, b)
    return type(a) is type(b) and (not isinstance(a, ATOMS) or a == b)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
