"""What a module's parameters are while the engine runs it.

Every module's `_parameters` dictionary is exchanged as a whole, which costs one assignment per module:

    resting        host parameters     see `harmony_ds.parameters`: reading one waits for its pending update
    lent           PhantomParameters   the device's dtype and device, no memory; using one raises its name
    in a call      device copies       of this layer's parameters, for the time of one layer call

Buffers live on the device while a model is lent, and what changed comes back afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.device.base import Device
from harmony_ds.errors import ModelError, ParameterOutsideLayerError
from harmony_ds.offload.ledger import Kind, Ledger

Touched = Callable[[str], Tensor | None]


class PhantomParameter(torch.Tensor):
    """Answers questions about shape, dtype and device like the parameter on the device would, and nothing else."""

    harmony_name: str
    harmony_touched: Touched

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(name: str, like: Tensor, device: torch.device, touched: Touched) -> PhantomParameter:
        """A phantom of `like` on `device`.

        `touched` is told its name when an operation wants its values: the operation is done with the tensor it returns,
        and raises if that is None.
        """
        phantom: PhantomParameter = torch.Tensor._make_wrapper_subclass(
            PhantomParameter, like.shape, dtype=like.dtype, device=device, requires_grad=like.requires_grad
        )
        phantom.harmony_name = name
        phantom.harmony_touched = touched
        return phantom

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PhantomParameter({self.harmony_name}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = torch.utils._pytree.tree_iter((args, kwargs))
        phantoms = {leaf.harmony_name: leaf for leaf in leaves if isinstance(leaf, PhantomParameter)}
        found = {name: phantom.harmony_touched(name) for name, phantom in phantoms.items()}
        if all(tensor is not None for tensor in found.values()):

            def value(phantom: PhantomParameter) -> Tensor | None:
                return found[phantom.harmony_name]

            args, kwargs = torch.utils._pytree.tree_map_only(PhantomParameter, value, (args, kwargs or {}))
            return func(*args, **kwargs)
        raise ParameterOutsideLayerError(
            f"the parameter {next(iter(phantoms))} was used ({func}) outside the call of the layer that owns it, where it "
            "is not on the device. Name a module that contains both the layer and this use in harmony.layers."
        )


class FixedParameters(dict[str, Any]):
    """A module's parameters while an engine has it: which ones they are cannot change. Copies are plain dicts."""

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not self.get(key, self):
            self._refuse(key, "assigned")

    def __delitem__(self, key: str) -> None:
        self._refuse(key, "deleted")

    def pop(self, key: str, *_: Any) -> Any:
        self._refuse(key, "taken out")

    def _refuse(self, key: str, what: str) -> None:
        raise ModelError(
            f"a module's parameter {key!r} is {what}, but an engine trains this model, and goes on with the parameters "
            "that it was made with: copy values into a parameter (with torch.no_grad(): parameter.copy_(value)), or change "
            "the model before initialize."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: deepcopy(value, memo) for key, value in self.items()}

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def belongs_to_engine(model: nn.Module) -> bool:
    """Whether an engine holds parameters of `model`. One that was dropped lets go of them here at the latest."""

    def watched() -> bool:
        return any(isinstance(module.__dict__.get("_parameters"), FixedParameters) for module in model.modules())

    if watched():
        gc.collect()
    return watched()


class Lending:
    """Exchanges what the modules of one model hold."""

    def __init__(self, model: nn.Module, canonical: Mapping[int, str], device: Device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self.modules = tuple(model.modules())
        self._owners: list[tuple[nn.Module, dict[str, str]]] = []
        for module in self.modules:
            held = module.__dict__["_parameters"]
            names = {key: canonical[id(p)] for key, p in held.items() if p is not None}
            if names:
                self._owners.append((module, names))
                module.__dict__["_parameters"] = FixedParameters(held)
        self._resting = {module: module.__dict__["_parameters"] for module, _ in self._owners}
        self._names = dict(self._owners)
        self._phantoms: dict[nn.Module, dict[str, Any]] = {}
        self._buffer_owners = [m for m in model.modules() if any(b is not None for b in m._buffers.values())]
        self._buffers = DeviceBuffers(self._buffer_owners, device, ledger)
        self._lent = False
        self.touched: set[str] = set()
        self.fetch: Touched | None = None  # brings what is used outside a layer call

    @property
    def buffer_bytes(self) -> int:
        """Device bytes of the model's buffers while it is lent."""
        return self._buffers.nbytes

    @property
    def copied_buffer_bytes(self) -> int:
        """Those that are there now."""
        return self._buffers.copied_bytes

    @contextmanager
    def lent(self, unlayered: Mapping[str, Tensor], keep_buffers: bool = True) -> Iterator[None]:
        """While open, no module shows host tensors: phantoms, and `unlayered` device tensors by canonical name.

        What the forward pass does to buffers is kept if `keep_buffers` and nothing was raised.
        """
        if self._lent:  # a forward pass inside generate()
            yield
            return
        self._lent = True
        try:
            for module, names in self._owners:
                module.__dict__["_parameters"] = self._shown(module, names, unlayered)
            with self._device.inherited():  # the model's code may ask for the current device
                self._buffers.lend()
                yield
                if keep_buffers:
                    self._buffers.take_back()
        finally:
            self._buffers.restore()
            for module, _ in self._owners:
                module.__dict__["_parameters"] = self._resting[module]
            self._lent = False

    def _shown(self, module: nn.Module, names: dict[str, str], unlayered: Mapping[str, Tensor]) -> dict[str, Any]:
        phantoms = self._phantoms.get(module)
        if phantoms is None:
            resting = self._resting[module]
            made = {
                key: PhantomParameter.of(name, resting[key], self._device.torch_device, self._touch)
                for key, name in names.items()
            }
            phantoms = self._phantoms[module] = FixedParameters({**dict.fromkeys(resting), **made})
        shown = {key: unlayered[name] for key, name in names.items() if name in unlayered}
        return FixedParameters({**phantoms, **shown}) if shown else phantoms

    def _touch(self, name: str) -> Tensor | None:
        self.touched.add(name)
        return None if self.fetch is None else self.fetch(name)

    def remove(self) -> None:
        """Gives every module a plain dictionary of its host parameters, and the buffers' device memory back."""
        self._buffers.drop()
        for module, held in self._resting.items():
            module.__dict__["_parameters"] = dict(held)

    def slots(self, layer: nn.Module) -> LayerSlots:
        """The dictionaries of a layer's modules, to be filled by `LayerSlots.filled`."""
        return LayerSlots([(module, self._names[module]) for module in layer.modules() if module in self._names])


class LayerSlots:
    """Where a layer's parameters are looked up."""

    def __init__(self, owners: Iterable[tuple[nn.Module, dict[str, str]]]) -> None:
        self._owners = tuple(owners)
        self._recurrent = [module for module, _ in self._owners if isinstance(module, nn.RNNBase)]

    @contextmanager
    def filled(self, copies: Mapping[str, Tensor]) -> Iterator[None]:
        """While open, the layer's modules hold `copies` (by canonical name)."""
        before = [module.__dict__["_parameters"] for module, _ in self._owners]
        lists = [(module._flat_weights, module._flat_weight_refs) for module in self._recurrent]
        try:
            for (module, names), shown in zip(self._owners, before, strict=True):
                filled = {key: copies.get(name, shown[key]) for key, name in names.items()}
                module.__dict__["_parameters"] = FixedParameters(
                    filled if len(filled) == len(shown) else {**shown, **filled}
                )
            for module in self._recurrent:
                _list_weights(module)
            yield
        finally:
            for (module, _), shown in zip(self._owners, before, strict=True):
                module.__dict__["_parameters"] = shown
            for module, (weights, references) in zip(self._recurrent, lists, strict=True):
                module._flat_weights, module._flat_weight_refs = weights, references


def _list_weights(module: nn.RNNBase) -> None:
    """Recurrent modules compute with a list of their own, which would also keep copies that have been evicted.

    Made by the module itself, it would come with memory of its own too: cuDNN's, into which the parameters are moved.
    """
    weights = [module._parameters.get(name) for name in module._flat_weights_names]
    module._flat_weights = weights
    module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


class DeviceBuffers:
    """The buffers of a model on the device: copied once, brought back where the forward pass changed them."""

    def __init__(self, owners: list[nn.Module], device: Device, ledger: Ledger) -> None:
        self._owners = owners
        self._device = device
        self._ledger = ledger
        self._host: dict[nn.Module, dict[str, Any]] = {}
        self._lent: dict[nn.Module, dict[str, Any]] = {}
        self._versions: dict[int, int] = {}
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}  # id(host) -> (host, its version, device copy)
        buffers = {id(b): b for m in owners for b in m._buffers.values() if b is not None}
        self.nbytes = sum(_nbytes(b) for b in buffers.values())

    @property
    def copied_bytes(self) -> int:
        return sum(_nbytes(copy) for _, _, copy in self._copies.values())

    def lend(self) -> None:
        for module in self._owners:
            host = module.__dict__["_buffers"]
            self._host[module] = host
            shown = {key: None if b is None else self._copy(b) for key, b in host.items()}
            module.__dict__["_buffers"] = shown
            self._lent[module] = dict(shown)

    def _copy(self, host: Tensor) -> Tensor:
        known = self._copies.get(id(host))
        if known is not None and known[1] == host._version:
            return known[2]
        if known is None:
            self._device.charge(_nbytes(host), "a buffer of the model")
        copy = self._device.upload(host)
        self._ledger.book_in(Kind.DATA, _nbytes(host))
        self._copies[id(host)] = (host, host._version, copy)
        self._versions[id(copy)] = copy._version
        return copy

    def take_back(self) -> None:
        """Copies what changed on the device into the host buffers (or in their place, if it was replaced)."""
        for module, lent in self._lent.items():
            if not self._changed(module, lent):
                continue
            host = self._host[module]
            shown: dict[str, Tensor | None] = module.__dict__["_buffers"]
            for key, now in _tensors(shown):
                self._ledger.book_out(Kind.DATA, _nbytes(now))
                target = host.get(key)
                if target is None or target.shape != now.shape or target.dtype != now.dtype:
                    self._forget(target)
                    host[key] = now.detach().to("cpu", copy=True)
                    continue
                with torch.no_grad():
                    target.copy_(now)
                if now is lent.get(key) and target is not None:
                    self._versions[id(now)] = now._version
                    self._copies[id(target)] = (target, target._version, now)
            self._lent[module] = {}

    def restore(self) -> None:
        """Puts the host buffers back. Device copies that were changed but not taken back are made anew next time."""
        for module, host in self._host.items():
            if self._lent[module] and self._changed(module, self._lent[module]):
                for buffer in host.values():
                    self._forget(buffer)
            module.__dict__["_buffers"] = host
        self._host.clear()
        self._lent.clear()

    def drop(self) -> None:
        """Drops every device copy."""
        for host, _, _ in list(self._copies.values()):
            self._forget(host)

    def _forget(self, host: Tensor | None) -> None:
        """Drops the device copy of a host buffer."""
        known = self._copies.pop(id(host), None)
        if known is not None:
            self._device.discharge(_nbytes(known[2]))

    def _changed(self, module: nn.Module, lent: dict[str, Any]) -> bool:
        if changes_buffers_unseen(module):
            return True
        shown: dict[str, Tensor | None] = module.__dict__["_buffers"]
        return any(now is not lent.get(key) or now._version != self._versions[id(now)] for key, now in _tensors(shown))


def changes_buffers_unseen(module: nn.Module) -> bool:
    """Whether a forward pass updates buffers without raising their version, as torch's batch_norm does."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training


def _tensors(held: Mapping[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(key, tensor) for key, tensor in held.items() if tensor is not None]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
