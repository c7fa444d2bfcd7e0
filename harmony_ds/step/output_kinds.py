"""Outputs that a model returns, by the form of its call, and what stands for them until they are computed.

The structure of outputs is learned the first time that each form of call is measured. Tensors among pending outputs are
pending themselves; lists, tuples and dictionaries are real ones; an object is a `_PendingObject`. What the program has
read of the structure is checked when outputs are computed.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from harmony_ds.errors import BatchError
from harmony_ds.model.own_settings import MOST_WORDS
from harmony_ds.model.untouched import is_for_measuring
from harmony_ds.profiling.sample import InputShapes, shapes_of
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.step.output_structure import (
    Constant,
    Container,
    Opaque,
    Path,
    Structure,
    TensorLeaf,
    Unknown,
    common,
    describe,
    follow_path,
    is_known,
    is_sequence,
    is_whole,
    leaves,
    make,
    map_leaves,
    same,
    summary,
    written,
)
from harmony_ds.step.pending import Node, OutputsGiven, PendingTensor, Source
from harmony_ds.step.shape_rules import ShapeRules


@dataclass(frozen=True, slots=True)
class CallForm:
    """Shapes of a call's arguments, and its modes."""

    shapes: InputShapes
    modes: object


class OutputKind:
    """What is known of the outputs of calls of one form, whatever their shapes, and their modes but for training."""

    def __init__(self) -> None:
        self._known: dict[CallForm, Structure] = {}
        self._common: Structure | None = None  # of all of them
        self._rules = ShapeRules()
        self._requires_grad: dict[object, dict[Path, bool]] = {}  # by modes

    def learn(self, outputs: Any, form: CallForm) -> None:
        """Learn that a call of `form` returned `outputs`."""
        structure = describe(outputs)
        self._common = structure if self._common is None else common(self._common, structure)
        for leaf in leaves(structure):
            if self._known.get(form) != structure:
                self._rules.learn(form.shapes, leaf)
        self._known[form] = structure
        self._requires_grad[form.modes] = {leaf.path: leaf.requires_grad for leaf in leaves(structure)}

    def expected(self, form: CallForm, losses_only: bool = False) -> Structure:
        """Return the structure of what a call of `form` will return; parts that are not known are `Unknown`.

        Args:
            losses_only: of tensors, those alone that are numbers.
        """
        exact = None if losses_only else self._known.get(form)
        assert self._common is not None
        requires_grad = self._requires_grad.get(form.modes, {})

        def expected_leaf(leaf: TensorLeaf) -> Structure:
            if (number := self._rules.number(leaf.path)) is not None:
                return replace(leaf, shape=number, requires_grad=leaf.dtype.is_floating_point)
            if exact is not None:
                return leaf
            shape = self._rules.shape(form.shapes, leaf.path)
            if shape is None or losses_only or leaf.path not in requires_grad:
                return Unknown(leaf.path)
            return replace(leaf, shape=shape, requires_grad=requires_grad[leaf.path])

        return map_leaves(expected_leaf, self._common if exact is None else exact)

    def outputs(self, source: Source, form: CallForm, device: torch.device, losses_only: bool = False) -> Any:
        """Return what stands for the outputs of `source`, a call of `form`; None: nothing can."""
        structure = self.expected(form, losses_only)
        if not is_known(structure) or not any(leaves(structure)):
            return None
        pending = _PendingOutputs(source, device, _Expectation(self, form))
        source.stand_ins = ref(pending)
        outputs = pending.stand_in(structure)
        for leaf in leaves(structure):  # numbers, that programs log after the step
            if not leaf.shape:
                pending.asked_for[leaf.path] = pending.tensor(leaf)
        return outputs


@dataclass(slots=True)
class _Expectation:
    """Names, kinds and shapes of a call's outputs that the program has read before the call has run."""

    kind: OutputKind
    form: CallForm
    shown: list[Structure] = field(default_factory=list)

    def read(self, outputs: Any, leaf: TensorLeaf) -> Tensor:
        """Return the tensor where `leaf` was expected among the outputs.

        Raises:
            BatchError: the outputs differ from what the program has read.
        """
        self.check(outputs)
        found = follow_path(outputs, leaf.path)
        if not isinstance(found, Tensor):
            raise BatchError(
                f"{written(leaf.path)} of the model is a {type(found).__name__} where calls of the same form had returned "
                "a tensor: let the model return the same each time, or its loss alone."
            )
        if found.shape != leaf.shape and is_for_measuring() is None:  # measuring runs the model with other rows, too
            self.kind.learn(outputs, self.form)
        return found

    def check(self, outputs: Any) -> None:
        for expected in self.shown:
            found = describe(follow_path(outputs, expected.path), expected.path)
            if not same(expected, found):
                where = f", as {written(expected.path)}," if expected.path else ""
                raise BatchError(
                    f"the model gave{where} {summary(found)} where calls of the same form had returned "
                    f"{summary(expected)}, which the program was given: let the model return the same each time, or its "
                    "loss alone."
                )


@dataclass(slots=True, weakref_slot=True, eq=False)
class _PendingOutputs:
    """Maker of stand-ins for the outputs of one call and their parts.

    Attributes:
        asked_for: tensors that the program has asked for one by one, and containers that it may have written into.
        made: other tensors that it still has.
        objects: those that were computed, or that the program has changed.
    """

    source: Source
    device: torch.device
    expectation: _Expectation
    asked_for: dict[Path, Any] = field(default_factory=dict)
    made: WeakValueDictionary[Path, PendingTensor] = field(default_factory=WeakValueDictionary)
    objects: dict[Path, Any] = field(default_factory=dict)

    def stand_in(self, structure: Structure) -> Any:
        """Return what stands for a part whose structure is known."""
        assert not isinstance(structure, Unknown)
        if isinstance(structure, TensorLeaf):
            return self.tensor(structure)
        if isinstance(structure, Constant):
            self.tell(structure)
            return structure.value
        if isinstance(structure, Opaque):
            self.tell(structure)
        elif is_whole(structure) and (structure.cls is dict or is_sequence(structure.cls)):
            return self.whole(structure)
        made = object.__new__(_pending_class(structure.cls))
        object.__setattr__(made, "_harmony", _OutputObject(self, structure))
        return made

    def whole(self, structure: Container) -> Any:
        """Return an object of the structure's class whose parts are pending."""
        self.tell(structure)
        return make(structure, {step: self.stand_in(part) for step, part in structure.stored.items()})

    def tell(self, structure: Structure) -> None:
        if structure not in self.expectation.shown:
            self.expectation.shown.append(structure)

    def tensor(self, leaf: TensorLeaf) -> PendingTensor:
        if self.source.outputs_given is OutputsGiven.ON_TRIAL and leaf.shape:
            self.source.outputs()  # what hooks and attributes get is there when the program has its outputs
        tensor: PendingTensor | None = self.made.get(leaf.path)
        if tensor is None:
            read = functools.partial(self.expectation.read, leaf=leaf)
            like = (self.source,), leaf.shape, leaf.dtype, self.device, leaf.requires_grad
            tensor = self.made[leaf.path] = PendingTensor(Node(*like, read))
        return tensor

    def computed(self, path: Path) -> Any:
        """Return the part of the outputs at `path`, computed now if need be."""
        outputs = self.source.outputs()
        self.expectation.check(outputs)
        part = follow_path(outputs, path)
        # The program may write into a copy: pending tensors are read from the outputs themselves.
        with suppress(Exception):  # there are classes that cannot be copied
            part = copy.copy(part)
        return part


_MISSING = object()
_READING = frozenset("keys items values get to_tuple copy".split())
"""Methods that change nothing."""
_CHANGING = "delattr delitem ior setattr setitem".split()
_SPECIAL = [*_CHANGING, *"bool eq hash iter len or reduce_ex repr reversed ror".split()]


@dataclass(slots=True)
class _OutputObject:
    """What a `_PendingObject` knows: where among the outputs its object will be, and what has become of it."""

    pending: _PendingOutputs
    structure: Container | Opaque

    def child(self, way: str, key: Any) -> Any:
        """Return what stands for a part of the object; `_MISSING`: that has to be asked of the object itself."""
        pending = self.pending
        if self.structure.path in pending.objects or isinstance(self.structure, Opaque):
            return _MISSING
        if not isinstance(key, (str, int)):
            return _MISSING
        structure = self.structure.ways.get((way, key))
        if structure is None or not is_known(structure):
            return _MISSING
        if structure.path not in pending.asked_for:
            stand_in = pending.stand_in(structure)
            if isinstance(stand_in, _PendingObject):
                return stand_in
            pending.asked_for[structure.path] = stand_in
        return pending.asked_for[structure.path]

    def object(self, changes: bool) -> Any:
        """Return the object, with pending parts if all are known, else computed; `changes`: it may become another."""
        objects, structure = self.pending.objects, self.structure
        if structure.path in objects:
            return objects[structure.path]
        if isinstance(structure, Container) and is_whole(structure):
            whole = self.pending.whole(structure)
            if changes:
                objects[structure.path] = whole
            return whole
        objects[structure.path] = self.pending.computed(structure.path)
        return objects[structure.path]


class _PendingObject:
    """Stand-in for an object among outputs, which is computed when the program asks for what is not known of it."""

    __slots__ = ("__weakref__", "_harmony")
    _harmony: _OutputObject

    def __getattr__(self, name: str) -> Any:
        part = self._harmony
        if (child := part.child("attribute", name)) is not _MISSING:
            return child
        cls = part.structure.cls
        if name.startswith("__") and not hasattr(cls, name):  # a protocol is asked for
            raise AttributeError(name)
        if name == "get" and issubclass(cls, Mapping):
            return functools.partial(Mapping.get, self)
        changes = callable(getattr(cls, name, None)) and name not in _READING
        return getattr(part.object(changes), name)

    def __getitem__(self, key: Any) -> Any:
        child = self._harmony.child("item", key)
        return self._harmony.object(changes=False)[key] if child is _MISSING else child

    def __contains__(self, key: Any) -> bool:
        return self._harmony.child("item", key) is not _MISSING or key in self._harmony.object(changes=False)


@functools.cache
def _pending_class(cls: Any) -> type[_PendingObject]:
    """Return a class with the special methods that `cls` has: Python looks for them in the class alone."""
    namespace: dict[str, Any] = {f"__{name}__": _handing_on(name) for name in _SPECIAL if hasattr(cls, f"__{name}__")}
    namespace |= {"__slots__": (), "__class__": cls, "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs)}
    if is_dataclass(cls):
        namespace["__dataclass_fields__"] = cls.__dataclass_fields__
    made = type(cls.__name__, (_PendingObject,), namespace)
    register_pytree_node(made, _open, _close)
    return made


def _handing_on(name: str) -> Callable[..., Any]:
    def special(self: _PendingObject, *args: Any) -> Any:
        return getattr(self._harmony.object(changes=name in _CHANGING), f"__{name}__")(*args)

    return special


def _open(outputs: _PendingObject) -> tuple[list[Any], None]:
    return [outputs._harmony.object(changes=False)], None


def _close(parts: Any, _: None) -> Any:
    (whole,) = parts
    return whole


class OutputKinds:
    """Kinds of outputs of one model, learned the first time that each form of call is measured."""

    def __init__(self) -> None:
        self._known: defaultdict[object, dict[object, OutputKind]] = defaultdict(dict)  # by form, and by strings

    def get(self, call: MicroBatch) -> OutputKind | None:
        known, words = self._of_form(call)
        return known.get(words)

    def learn(self, call: MicroBatch, outputs: Any, inputs: Any = None) -> None:
        """Learn that `call` returned `outputs`, or would with `inputs`."""
        known, words = self._of_form(call)
        shapes = shapes_of(call.inputs if inputs is None else inputs)
        known.setdefault(words, OutputKind()).learn(outputs, CallForm(shapes, call.state.modes))

    def outputs(self, call: MicroBatch, source: Source, losses_only: bool) -> Any:
        """Return what stands for the outputs of `call`; None: nothing can."""
        known, words = self._of_form(call)
        form = CallForm(shapes_of(call.inputs), call.state.modes)
        return known[words].outputs(source, form, call.home, losses_only)

    def _of_form(self, call: MicroBatch) -> tuple[dict[object, OutputKind], object]:
        """Return what calls of the form of `call` returned, in its modes; and its strings."""
        args, kwargs = call.inputs
        present = {key: value for key, value in (*enumerate(args), *kwargs.items()) if value is not None}
        words = frozenset((key, value) for key, value in present.items() if isinstance(value, str))
        known = self._known[call.state.modes.training, frozenset(present), call.inputs_form]
        return known, words if words in known or len(known) < MOST_WORDS else None
