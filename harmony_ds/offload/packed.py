"""Packed tensors: frozen weights that travel as the bytes that they consist of, whatever their class and dtype.

    plain, of another dtype     uint8 codes, float8, fp32 scales, bf16 where fp32 computes     its own bytes
    wrapper                     a class with `__tensor_flatten__` (torchao)                    those of its inner tensors
    subclass with memory        made by `torch.Tensor._make_subclass` (bitsandbytes)           its own, and its attributes'
    quantized ones, too         attributes of the modules that own it (HQQ's `meta`), and      those of plain tensors there
                                of its parametrizations (bitsandbytes' experts)

On the host, all these plain tensors become views of one run of bytes in a slab, so that whoever holds one sees it. On the
device, an object of the same kind is made over the bytes that arrived, which copies and computes nothing. No library is
imported or named here: tensors are found in attributes, dicts, lists, and objects of the library's own classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.errors import ModelError
from harmony_ds.offload.host_memory import MappedFiles
from harmony_ds.offload.rebuild import Attributes, Recipe, Recipes

_DEPTH = 4
"""So deep are dicts, lists and objects looked into for tensors."""
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"forward"}
WORTH_SWAPPING_BYTES = 1 << 14
"""Buffers of integers or float8 from this size on are taken for quantized weights; smaller ones stay on the device."""
COMPUTED_WITH = (torch.float32, torch.bfloat16, torch.float16)
_NO_CODES = (*COMPUTED_WITH, torch.float64, torch.int64, torch.bool)
"""Dtypes of buffers that are no codes: statistics, tables, indices, masks."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The place of a plain tensor in the bytes of a packed one."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor in `memory`, uint8 of shape [bytes]."""
        flat = memory[self.start : self.start + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())


class Packed:
    """One packed tensor: the plain tensors that it consists of, their places in a run of bytes, and how it is rebuilt.

    Attributes:
        name: canonical.
        nbytes: of all its plain tensors, each aligned as in a slab.
        kind: what a checkpoint compares: class, shapes and dtypes, and how the numbers are quantized.
        is_of_plain_class: it is no subclass, though attributes of its modules may belong to it.
    """

    def __init__(self, name: str, tensor: Tensor, owners: Sequence[nn.Module], known: Iterable[int]) -> None:
        """Find what `tensor` consists of.

        Args:
            owners: the modules that hold it.
            known: ids of the model's other parameters and buffers, which are no parts of this one.

        Raises:
            ModelError: it cannot be taken apart, or not be put together again.
        """
        self.name = name
        self.nbytes = 0
        self._tensor = tensor
        self._known = frozenset(known) - {id(tensor)}
        self._found: list[Tensor] = []  # all plain tensors, by identity
        self._part_of: dict[int, int] = {}  # id of a plain tensor -> number of its part
        self._parts: list[_Part] = []
        self._part_at: dict[tuple[Any, ...], int] = {}  # memory -> number of the part
        self._own = memory_of(tensor)
        self.is_of_plain_class = type(tensor) in (Tensor, nn.Parameter)
        self._owners = tuple(owners) if is_quantized(tensor) else ()
        packages = {type(one).__module__.partition(".")[0] for one in (tensor, *self._owners)} - {"torch", "builtins"}
        self._packages = frozenset(packages)
        self._find_parts()
        self._versioned: list[Tensor] = []  # all tensors that count their writes
        recipes = Recipes(self._part_of, self._packages, _DEPTH)
        try:
            self._recipe = recipes.of_parameter(tensor, self._own)
            self._attributes = self._attribute_recipes(recipes)
            self.rebuild(torch.zeros(self.nbytes, dtype=torch.uint8, device="meta"))
        except (RuntimeError, TypeError, AttributeError, AssertionError, ValueError, KeyError) as error:
            raise ModelError(
                f"{name} is a {type(tensor).__name__} that cannot be put together again from its plain tensors: {error!r}. "
                "Its class needs __tensor_flatten__ and __tensor_unflatten__, or memory of its own; or dequantize it."
            ) from error
        parts = "; ".join(f"{part.dtype}{list(part.shape)}" for part in self._parts)
        settings = ", ".join(one for holder in self._setting_holders() for one in recipes.settings(holder))
        self.kind = f"{type(tensor).__module__}.{type(tensor).__qualname__} of {parts} ({settings})"

    def _find_parts(self) -> None:
        if self._own is not None:
            self._note(self._own)
        self._look_into(self._tensor)
        for module in self._owners:
            self._look_into({key: one for key, one in vars(module).items() if key not in _OF_EVERY_MODULE})
        if not self._found:
            raise ModelError(
                f"{self.name} is a {type(self._tensor).__name__} of layout {self._tensor.layout}, in which no plain tensor "
                "is found: its class needs __tensor_flatten__, or memory of its own."
            )

    def _note(self, tensor: Tensor) -> None:
        """Note a plain tensor of this one; those over the same memory are one part."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        if not is_plain or id(tensor) in self._known or id(tensor) in self._part_of:
            return
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.data_ptr() == 0 or memory not in self._part_at:
            self._part_at[memory] = len(self._parts)
            self._parts.append(self._new_part(tensor))
        self._part_of[id(tensor)] = self._part_at[memory]
        self._found.append(tensor)

    def _new_part(self, tensor: Tensor) -> _Part:
        if tensor.numel() <= 1:
            strides = (1,) * tensor.dim()  # it may have any
        elif torch.ops.aten.is_non_overlapping_and_dense(tensor):
            strides = tensor.stride()
        else:
            strides = torch.empty(tensor.shape, device="meta").stride()
        nbytes = tensor.numel() * tensor.element_size()
        part = _Part(self.nbytes, nbytes, tensor.dtype, tensor.shape, strides)
        self.nbytes += slab_bytes(nbytes, 1)
        return part

    def _look_into(self, value: Any, depth: int = 0) -> None:
        """Note the plain tensors in a value: the packed tensor itself, or an attribute."""
        if isinstance(value, Tensor):
            self._note(value)
            if is_wrapper(value):
                for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                    self._look_into(getattr(value, name), depth)
            if value is not self._tensor or depth:
                return
            value = vars(value)
        if depth == _DEPTH or isinstance(value, (nn.Module, type)):
            return
        inside: Iterable[Any] = ()
        if type(value) is dict:
            inside = value.values()
        elif type(value) in (list, tuple):
            inside = value
        elif type(value).__module__.partition(".")[0] in self._packages:
            inside = getattr(value, "__dict__", {}).values()
        for one in inside:
            self._look_into(one, depth + 1)

    def _attribute_recipes(self, recipes: Recipes) -> list[tuple[nn.Module, str, Recipe]]:
        """Return how attributes of the owners are made that hold parts, or that forward may move parts into."""
        attributes: list[tuple[nn.Module, str, Recipe]] = []
        for module in self._owners:
            for key, value in vars(module).items():
                if key in _OF_EVERY_MODULE:
                    continue
                recipe = recipes.of(value) or recipes.of_state(value, type(self._tensor))
                if recipe is not None:
                    attributes.append((module, key, recipe))
        return attributes

    def _setting_holders(self) -> list[Any]:
        """Return the objects whose attributes say how it is quantized: itself, or what its modules hold for a plain one."""
        holders: list[Any] = [self._tensor]
        if self.is_of_plain_class:
            held = [getattr(module, key) for module, key, _ in self._attributes]
            holders += [one for one in held if hasattr(one, "__dict__") and not isinstance(one, Tensor)]
        return holders

    @property
    def is_plain(self) -> bool:
        """Whether it is one plain tensor, so that its values say all of it."""
        return self.is_of_plain_class and len(self._parts) == 1

    @property
    def ids(self) -> set[int]:
        """The ids of its plain tensors on the host."""
        return set(self._part_of)

    # ---- the host

    @property
    def memory(self) -> Tensor | None:
        """The plain tensor over its own memory on the host; None: it consists of others alone."""
        return self._own

    @property
    def version(self) -> int:
        """A number that each write raises into it or its plain tensors on the host, but for those through `.data`."""
        return sum([one._version for one in self._versioned])

    def memory_bytes(self, mapped: MappedFiles) -> int:
        """Return the bytes of memory that its plain tensors take, but for those in mapped files."""
        counted: set[int] = set()
        total = 0
        for tensor in self._found:
            place = self._part_of[id(tensor)]
            if place not in counted and not mapped.holds(tensor):
                total += self._parts[place].nbytes
            counted.add(place)
        return total

    @torch.no_grad()
    def write_to(self, memory: Tensor) -> None:
        """Write the bytes into `memory`, uint8 of shape [nbytes]."""
        memory.zero_()
        filled: set[int] = set()
        for tensor in self._found:
            place = self._part_of[id(tensor)]
            if place not in filled:
                self._parts[place].view(memory).copy_(tensor)
                filled.add(place)

    def move_to(self, memory: Tensor) -> int:
        """Make the host's tensors views of `memory`, which holds their bytes; return how many bytes they had before.

        Each part is a storage of its own: torch.save would write all of one, and refuses tensors of several dtypes in it.
        """
        views: list[Tensor] = []
        for part in self._parts:
            piece = memory[part.start : part.start + part.nbytes]
            if not piece.is_meta:
                piece = torch.from_numpy(piece.numpy())
            views.append(replace(part, start=0).view(piece))
        for tensor in self._found:
            _place(tensor, views[self._part_of[id(tensor)]])
        if self._own is not None and self._own is not self._tensor:
            _place(self._tensor, self._own)
        self._versioned = [one for one in (self._tensor, *self._found) if not one.is_inference()]
        return self.nbytes

    # ---- the device

    def rebuild(self, memory: Tensor) -> tuple[Any, Attributes]:
        """Return an equal tensor over device `memory` [nbytes], and the attributes of its modules while they hold it."""
        tensors = [part.view(memory) for part in self._parts]
        attributes: Attributes = {}
        for module, key, recipe in self._attributes:
            attributes.setdefault(module, {})[key] = recipe.make(tensors)
        return self._recipe.make(tensors), attributes


def _place(tensor: Tensor, view: Tensor) -> None:
    """Make `tensor` a tensor over the memory of `view`.

    One that was made in inference mode (HQQ's zeros) would stay without a count of its writes, and say that it has one: it
    becomes an ordinary tensor.
    """
    if not tensor.is_inference():
        tensor.data = view
        return
    ordinary = torch.Tensor._make_subclass(type(tensor), view.detach(), False)
    vars(ordinary).update(vars(tensor))
    torch.utils.swap_tensors(tensor, ordinary)


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory of its own, but inner tensors."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(type(tensor), "__tensor_flatten__")


def memory_of(tensor: Tensor) -> Tensor | None:
    """Return a plain tensor over the memory of `tensor`; None: it has none itself."""
    if type(tensor) is Tensor:
        return tensor
    is_opaque = type(tensor).__torch_dispatch__ != torch._C._disabled_torch_dispatch_impl
    if is_wrapper(tensor) or is_opaque or not torch._C._has_storage(tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor._make_subclass(torch.Tensor, tensor.detach().as_subclass(torch.Tensor), False)


# ---- which tensors are packed


def find_packed(model: nn.Module, dtype: torch.dtype, *, casts_frozen: bool) -> dict[str, Packed]:
    """Return the parameters of `model`, which computes in `dtype`, that travel as their bytes, by canonical name.

    Args:
        casts_frozen: whether frozen parameters of floating point are computed with in `dtype`. Those beside a quantized
            one in a module never are: they may be its scales.

    Raises:
        ModelError: one of a quantized class cannot be taken apart.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in _own_parameters(module):
            owners.setdefault(id(parameter), []).extend(_with_parametrizations(module))
    quantized = {id(parameter) for parameter in model.parameters() if is_quantized(parameter)}
    cast: set[int] = set()
    if casts_frozen:
        cast.update(map(id, model.parameters()))
        for module in model.modules():
            ids = {id(parameter) for parameter in _own_parameters(module)}
            if not ids.isdisjoint(quantized):
                cast -= ids
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    packed: dict[str, Packed] = {}
    for name, parameter in model.named_parameters():
        is_frozen = not parameter.requires_grad
        keeps_dtype = id(parameter) in quantized or (parameter.dtype != dtype and id(parameter) not in cast)
        if is_frozen and keeps_dtype:
            packed[name] = Packed(name, parameter, owners[id(parameter)], known)
            known |= packed[name].ids
    return packed


@dataclass(frozen=True, slots=True, eq=False)
class OwnedBuffer:
    """A buffer, its module, and its key there."""

    buffer: Tensor
    module: nn.Module
    key: str


def find_packed_buffers(model: nn.Module, layers: Iterable[nn.Module]) -> dict[str, OwnedBuffer]:
    """Return the buffers inside of `layers` that are swapped with their layer's weights, by name.

    They are large codes (integers, float8), and what lies beside such codes or beside a quantized parameter: scales, zeros.
    Buffers that several modules hold stay on the device.
    """
    places: dict[int, int] = {}
    for module in model.modules():
        for buffer in module._buffers.values():
            places[id(buffer)] = places.get(id(buffer), 0) + 1
    names = {module: name for name, module in model.named_modules()}
    owned: dict[str, OwnedBuffer] = {}
    for module in dict.fromkeys(inner for layer in layers for inner in layer.modules()):
        if isinstance(module, nn.modules.batchnorm._NormBase) or not module._buffers:
            continue
        buffers: dict[str, Tensor] = {}
        for key, buffer in module._buffers.items():
            is_plain = type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.requires_grad
            if is_plain and buffer is not None and places[id(buffer)] == 1:
                buffers[key] = buffer
        if not any(map(_are_codes, buffers.values())) and not any(map(is_quantized, _own_parameters(module))):
            continue
        for key, buffer in buffers.items():
            owned[f"{names[module]}.{key}".removeprefix(".")] = OwnedBuffer(buffer, module, key)
    return owned


def pack_buffers(buffers: Mapping[str, OwnedBuffer]) -> dict[str, Packed]:
    """Return packed tensors of these buffers, by name."""
    return {name: Packed(name, owned.buffer, (), ()) for name, owned in buffers.items()}


def _are_codes(buffer: Tensor) -> bool:
    return buffer.dtype not in _NO_CODES and not buffer.is_complex() and buffer.nbytes >= WORTH_SWAPPING_BYTES


def is_quantized(parameter: Tensor) -> bool:
    """Return whether a parameter is of a class of its own, or of a dtype that is not computed with."""
    return type(parameter) is not nn.Parameter or parameter.dtype not in COMPUTED_WITH


def stored_bytes(packed: Mapping[str, Packed], model: nn.Module) -> dict[int, int]:
    """Return the bytes of packed parameters by the parameter's id."""
    return {id(p): packed[name].nbytes for name, p in model.named_parameters() if name in packed}


def _with_parametrizations(module: nn.Module) -> list[nn.Module]:
    """Return a module that holds a parameter, and the modules that make another value of it: they may hold its scales."""
    return [module, *module] if isinstance(module, ParametrizationList) else [module]


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]
