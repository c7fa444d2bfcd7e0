"""Recipes: how an object that holds tensors is made again over other tensors, as fast as a swap-in needs it.

A recipe is compiled once, from the host's object; `make` then takes the tensors of all parts, in their order. What holds no
part is shared with the host's object, so nothing of it may be written.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Attributes = dict[nn.Module, dict[str, Any]]
"""Attributes that modules have while they hold a rebuilt tensor."""
LINK = "_hp_mapping"
"""The attribute of a host parameter by which an engine that trains it sees its uses; copies on the device have none."""
_SETTINGS = (str, int, float, bool, torch.dtype, torch.Size)


class Recipe(ABC):
    """How one object is made again."""

    @abstractmethod
    def make(self, tensors: Sequence[Tensor]) -> Any:
        """Make it over these tensors of the parts."""


@dataclasses.dataclass(frozen=True, slots=True)
class _OfPart(Recipe):
    place: int

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.place]


@dataclasses.dataclass(frozen=True, slots=True)
class _OfDict(Recipe):
    values: Mapping[Any, Any]
    changed: Mapping[Any, Recipe]

    def make(self, tensors: Sequence[Tensor]) -> dict[Any, Any]:
        return {**self.values, **_made(self.changed, tensors)}


@dataclasses.dataclass(frozen=True, slots=True)
class _OfSequence(Recipe):
    values: list[Any] | tuple[Any, ...]
    changed: Mapping[int, Recipe]

    def make(self, tensors: Sequence[Tensor]) -> Any:
        made = list(self.values)
        for place, recipe in self.changed.items():
            made[place] = recipe.make(tensors)
        return type(self.values)(made)


@dataclasses.dataclass(frozen=True, slots=True)
class _OfObject(Recipe):
    value: Any
    changed: Mapping[str, Recipe]

    def make(self, tensors: Sequence[Tensor]) -> Any:
        copy = object.__new__(type(self.value))
        vars(copy).update(vars(self.value))
        vars(copy).update(_made(self.changed, tensors))
        return copy


@dataclasses.dataclass(frozen=True, slots=True)
class _OfSubclass(Recipe):
    """Of a tensor with memory of its own, of any class: `kind`, since the engine gives the host's another one later."""

    parameter: Tensor
    kind: type[Tensor]
    place: int
    changed: Mapping[str, Recipe]

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        # `data` has a version of its own, not that of everything in the buffer.
        memory = tensors[self.place].data
        if self.kind is Tensor:
            return memory
        made = torch.Tensor._make_subclass(self.kind, memory, False)
        vars(made).update(vars(self.parameter))
        vars(made).pop(LINK, None)
        vars(made).update(_made(self.changed, tensors))
        return made


class _OfWrapper(Recipe):
    """Of a tensor that consists of inner tensors (`__tensor_flatten__`)."""

    def __init__(self, tensor: Any, recipes: Recipes) -> None:
        names, self._context = tensor.__tensor_flatten__()
        self._inner = {name: recipes.of_tensor(getattr(tensor, name)) for name in names}
        self._kind, self._size, self._strides = type(tensor), tensor.size(), tensor.stride()
        self._contexts: dict[torch.device, Any] = {}

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        inner = _made(self._inner, tensors)
        device = tensors[0].device
        if device not in self._contexts:
            self._contexts[device] = _on_device(self._context, device)
        made: Tensor = self._kind.__tensor_unflatten__(inner, self._contexts[device], self._size, self._strides)
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class _OfWrapperParameter(Recipe):
    """Of a parameter that is a wrapper; attributes that its class does not set itself are those of the host's."""

    parameter: Tensor
    tensor: _OfWrapper
    changed: Mapping[str, Recipe]

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        made = self.tensor.make(tensors)
        attributes = vars(made)
        attributes["_is_param"] = True
        for key, value in vars(self.parameter).items():
            if key not in attributes and key != LINK:
                attributes[key] = self.changed[key].make(tensors) if key in self.changed else value
        return made


class Recipes:
    """Compiler of recipes for the objects that hold the parts of one packed tensor."""

    def __init__(self, part_of: Mapping[int, int], packages: frozenset[str], depth: int) -> None:
        """Compile for these parts.

        Args:
            part_of: id of a plain tensor on the host -> number of its part.
            packages: only objects of classes from these packages are looked into, so deep as `depth`.
        """
        self._part_of = part_of
        self._packages = packages
        self._depth = depth

    def of_parameter(self, parameter: Tensor, memory: Tensor | None) -> Recipe:
        """Return the recipe of the packed tensor itself; `memory`: its own, if it has any."""
        changed = self._of_values(vars(parameter), 1)
        if memory is None:
            return _OfWrapperParameter(parameter, _OfWrapper(parameter, self), changed)
        return _OfSubclass(parameter, type(parameter), self._part_of[id(memory)], changed)

    def of_tensor(self, tensor: Any) -> Recipe:
        """Return the recipe of an inner tensor, a part or a wrapper itself; KeyError: it is neither."""
        if hasattr(type(tensor), "__tensor_flatten__"):
            return _OfWrapper(tensor, self)
        return _OfPart(self._part_of[id(tensor)])

    def of(self, value: Any, depth: int = 0) -> Recipe | None:
        """Return the recipe of an attribute; None: it holds no part."""
        if isinstance(value, Tensor):
            place = self._part_of.get(id(value))
            return None if place is None else _OfPart(place)
        if depth == self._depth or isinstance(value, (nn.Module, type)):
            return None
        if type(value) is dict:
            changed = self._of_values(value, depth + 1)
            return _OfDict(value, changed) if changed else None
        if type(value) in (list, tuple):
            places = self._of_values(dict(enumerate(value)), depth + 1)
            return _OfSequence(value, places) if places else None
        if self._is_state(value):
            changed = self._of_values(vars(value), depth + 1)
            return _OfObject(value, changed) if changed else None
        return None

    def of_state(self, value: Any, kind: type) -> Recipe | None:
        """Return the recipe of an object of the library of `kind` that holds no part yet; None: it is none.

        Forward may move tensors of the device into it, which would keep packs there that were evicted.
        """
        library = kind.__module__.partition(".")[0]
        is_library = library != "torch" and type(value).__module__.partition(".")[0] == library
        return (
            _OfObject(value, {}) if is_library and self._is_state(value) and not isinstance(value, nn.Module) else None
        )

    def settings(self, value: Any, depth: int = 0) -> Iterator[str]:
        """Yield the plain values in attributes of the packed tensor, and of objects there: how it is quantized."""
        for key, one in sorted(vars(value).items()):
            if isinstance(one, _SETTINGS) and not key.startswith("_") and key != "module":
                yield f"{key}={one}"
            elif self._is_state(one) and depth < self._depth and not isinstance(one, (nn.Module, Tensor, type)):
                yield from (f"{key}.{text}" for text in self.settings(one, depth + 1))

    def _of_values(self, values: Mapping[Any, Any], depth: int) -> dict[Any, Recipe]:
        recipes: dict[Any, Recipe] = {}
        for key, value in values.items():
            recipe = self.of(value, depth)
            if recipe is not None:
                recipes[key] = recipe
        return recipes

    def _is_state(self, value: Any) -> bool:
        return type(value).__module__.partition(".")[0] in self._packages and hasattr(value, "__dict__")


def _made(recipes: Mapping[Any, Recipe], tensors: Sequence[Tensor]) -> dict[Any, Any]:
    return {key: recipe.make(tensors) for key, recipe in recipes.items()}


def _on_device(context: Any, device: torch.device) -> Any:
    """Return the context of a flattened tensor with the devices in it exchanged."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, Mapping):
        return {key: _on_device(value, device) for key, value in context.items()}
    if dataclasses.is_dataclass(context) and not isinstance(context, type):
        values = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
        held = {key: device for key, value in values.items() if isinstance(value, torch.device)}
        return dataclasses.replace(context, **held) if held else context
    if type(context) in (list, tuple):
        return type(context)(_on_device(value, device) for value in context)
    return context
