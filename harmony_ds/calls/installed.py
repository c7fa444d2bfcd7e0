"""What a module's parameters are while the engine runs it: the host's, phantoms, or copies installed for a layer's call.

Every module's `_parameters` dictionary is exchanged as a whole, which costs one assignment per module:

    host           host parameters     see `harmony_ds.parameters`: reading one waits for its pending update
    installed      PhantomParameters   the device's dtype and device, no memory; using one raises its name
    in a call      device copies       of this layer's parameters, for the time of one layer call

Buffers live on the device while a model is installed there, and what changed comes back afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.buffers import DeviceBuffers
from harmony_ds.calls.plain_copies import PlainWhenCopied
from harmony_ds.device.base import Device
from harmony_ds.errors import ModelError, ParameterOutsideLayerError
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.residency import Leaves

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


class FixedParameters(PlainWhenCopied):
    """A module's parameters while an engine has it: which ones they are cannot change."""

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


def belongs_to_engine(model: nn.Module) -> bool:
    """Whether an engine holds parameters of `model`. One that was dropped lets go of them here at the latest."""

    def watched() -> bool:
        return any(isinstance(module.__dict__.get("_parameters"), FixedParameters) for module in model.modules())

    if watched():
        gc.collect()
    return watched()


@dataclass(slots=True, eq=False)
class _Owner:
    """A module with parameters: their canonical names, the host's, and phantoms of them once they are wanted."""

    module: nn.Module
    names: dict[str, str]
    host: FixedParameters
    phantoms: dict[str, Any] = field(default_factory=dict)

    def hold(self, parameters: dict[str, Any]) -> None:
        self.module.__dict__["_parameters"] = parameters


class Installation:
    """Installs on the device what the modules of one model hold."""

    def __init__(self, model: nn.Module, canonical: Mapping[int, str], device: Device, ledger: Ledger) -> None:
        self._device = device
        self.modules = tuple(model.modules())
        self._owners: dict[nn.Module, _Owner] = {}
        for module in self.modules:
            held = module.__dict__["_parameters"]
            names = {key: canonical[id(p)] for key, p in held.items() if p is not None}
            if names:
                owner = self._owners[module] = _Owner(module, names, FixedParameters(held))
                owner.hold(owner.host)
        self.buffers = DeviceBuffers(self.modules, device, ledger)
        self._open = False
        self.touched: set[str] = set()
        self.fetch: Touched | None = None  # brings what is used outside a layer call

    @contextmanager
    def installed(self, unlayered: Mapping[str, Tensor], keep_buffers: bool = True) -> Iterator[None]:
        """While open, no module shows host tensors: phantoms, and `unlayered` device tensors by canonical name.

        What the forward pass does to buffers is kept if `keep_buffers` and nothing was raised.
        """
        if self._open:  # a forward pass inside generate()
            yield
            return
        self._open = True
        try:
            for owner in self._owners.values():
                owner.hold(self._without_host(owner, unlayered))
            with self._device.inherited():  # the model's code may ask for the current device
                self.buffers.install()
                yield
                if keep_buffers:
                    self.buffers.take_back()
        finally:
            self.buffers.restore()
            for owner in self._owners.values():
                owner.hold(owner.host)
            self._open = False

    def _without_host(self, owner: _Owner, unlayered: Mapping[str, Tensor]) -> dict[str, Any]:
        if not owner.phantoms:
            made = {
                key: PhantomParameter.of(name, owner.host[key], self._device.torch_device, self._touch)
                for key, name in owner.names.items()
            }
            owner.phantoms = FixedParameters({**dict.fromkeys(owner.host), **made})
        there = {key: unlayered[name] for key, name in owner.names.items() if name in unlayered}
        return FixedParameters({**owner.phantoms, **there}) if there else owner.phantoms

    def _touch(self, name: str) -> Tensor | None:
        self.touched.add(name)
        return None if self.fetch is None else self.fetch(name)

    def remove(self) -> None:
        """Gives every module a plain dictionary of its host parameters, and the buffers' device memory back."""
        self.buffers.drop()
        for owner in self._owners.values():
            owner.hold(dict(owner.host))

    def parameters_of(self, layer: nn.Module) -> LayerParameters:
        """Those of a layer's modules."""
        owners = [self._owners[module] for module in layer.modules() if module in self._owners]
        return LayerParameters(
            [(owner.module, {key: owner.names.get(key, "") for key in owner.host}) for owner in owners]
        )


class LayerParameters:
    """The dictionaries in which a layer's parameters are looked up."""

    def __init__(self, owners: Sequence[tuple[nn.Module, dict[str, str]]]) -> None:
        """`owners`: modules, and for each of their parameters its canonical name; "" where it is None."""
        self.modules = [module for module, _ in owners]
        self.held = [module.__dict__ for module, _ in owners]
        self._names = [names for _, names in owners]
        self._known = {name for names in self._names for name in names.values() if name}
        self.recurrent = [module for module in self.modules if isinstance(module, nn.RNNBase)]

    def installed(self, copies: Leaves) -> AbstractContextManager[None]:
        """While open, the layer's modules hold `copies`."""
        return _Installed(self, copies.made.get(self) or self._holding(copies))

    def _holding(self, copies: Leaves) -> list[FixedParameters]:
        before = [held["_parameters"] for held in self.held]
        holding = [
            FixedParameters({key: copies[name] if name in copies else held[key] for key, name in names.items()})
            for names, held in zip(self._names, before, strict=True)
        ]
        if copies.keys() >= self._known:  # what else is held may be another thing the next time
            copies.made[self] = holding
        return holding


class _Installed:
    """A class, because it is entered for each layer call."""

    __slots__ = ("_before", "_holding", "_layer", "_lists")

    def __init__(self, layer: LayerParameters, holding: Sequence[FixedParameters]) -> None:
        self._layer = layer
        self._holding = holding
        self._before: list[dict[str, Any]] = []
        self._lists: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        layer = self._layer
        self._before = [held["_parameters"] for held in layer.held]
        for held, holding in zip(layer.held, self._holding, strict=True):
            held["_parameters"] = holding
        for rnn in layer.recurrent:
            self._lists.append((rnn._flat_weights, rnn._flat_weight_refs))
            _list_weights(rnn)

    def __exit__(self, *raised: object) -> None:
        layer = self._layer
        for held, before in zip(layer.held, self._before, strict=True):
            held["_parameters"] = before
        for rnn, listed in zip(layer.recurrent, self._lists, strict=True):
            rnn._flat_weights, rnn._flat_weight_refs = listed


def _list_weights(module: nn.RNNBase) -> None:
    """Recurrent modules compute with a list of their own, which would also keep copies that have been evicted.

    Made by the module itself, it would come with memory of its own too: cuDNN's, into which the parameters are moved.
    """
    weights = [module._parameters.get(name) for name in module._flat_weights_names]
    module._flat_weights = weights
    module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]
