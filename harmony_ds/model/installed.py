"""What modules hold as their parameters: the host's, stand-ins without memory while a model runs, device copies in a call.

Every module's `_parameters` dictionary is exchanged as a whole, which costs one assignment per module:

    host           host parameters     see `harmony_ds.model`: reading one waits for its pending update
    installed      PhantomParameters   the device's dtype and device, no memory; using one raises its name
    in a call      device copies       of this layer's parameters, for the time of one layer call

Buffers are on the device while a model is installed there; those that changed are copied back afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from harmony_ds.device.base import Device
from harmony_ds.errors import ModelError
from harmony_ds.model.buffers import DeviceBuffers
from harmony_ds.model.contract import UnseenError
from harmony_ds.model.intercept import is_between_layers
from harmony_ds.model.patching import Item, patched
from harmony_ds.offload.device_copies import Leaves
from harmony_ds.offload.host_store import bypass_hooks
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.packed import OwnedBuffer
from harmony_ds.offload.rebuild import Attributes

_AT_HOME: Mapping[nn.Module, int] = {}
Touched = Callable[[str], Tensor]
NoteTrained = Callable[[nn.Parameter, bool], None]


class PhantomParameter(torch.Tensor):
    """A parameter without memory: it has the shape, dtype and device that the parameter has on the device."""

    harmony_name: str
    harmony_host: nn.Parameter
    harmony_touched: Touched
    harmony_trained: NoteTrained | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make_like(
        name: str, like: nn.Parameter, device: torch.device, touched: Touched, trained: NoteTrained | None
    ) -> PhantomParameter:
        """Return a phantom of `like` on `device`.

        When an operation wants its values, `touched` is called with its name: it runs on the tensor that is returned.
        Before its `requires_grad` is set, `trained` is called with `like` and what that is.
        """
        phantom: PhantomParameter = torch.Tensor._make_wrapper_subclass(
            PhantomParameter, like.shape, dtype=like.dtype, device=device, requires_grad=like.requires_grad
        )
        phantom.harmony_name, phantom.harmony_host, phantom.harmony_touched = name, like, touched
        phantom.harmony_trained = trained
        return phantom

    @property
    def requires_grad(self) -> bool:
        return self.harmony_host.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> PhantomParameter:
        """Set it for the layer calls of the code that does so."""
        with bypass_hooks():
            if self.harmony_trained is not None:
                self.harmony_trained(self.harmony_host, self.harmony_host.requires_grad)
            self.harmony_host.requires_grad_(requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:  # those that the program has put on the parameter
        return getattr(vars(self)["harmony_host"], name)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PhantomParameter({self.harmony_name}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(
            PhantomParameter, lambda p: p.harmony_touched(p.harmony_name), (args, kwargs or {})
        )
        return func(*args, **kwargs)


class FixedParameters(dict[str, Any]):
    """A module's parameters while an engine trains it, which cannot be replaced. Copies and pickles are plain dicts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not self.get(key, vars(self).get(key, self)):
            self._refuse(key)
        dict.__setitem__(self, key, value)

    def _refuse(self, key: str, *_: Any) -> Any:
        raise ModelError(
            f"a module's parameter {key!r} is replaced, but an engine trains this model, and goes on "
            "with the parameters that it was made with: copy values into a parameter (with torch.no_grad(): "
            "parameter.copy_(value)), or change the model before initialize. When training is over, call engine.destroy() "
            "first: then the model is a plain one (adapters are merged into a quantized base that way)."
        )

    __delitem__ = pop = _refuse


class CallParameters(FixedParameters):
    """A module's parameters in a layer call: one may be taken out and put back (PEFT's LoRA of parameters)."""

    def __setitem__(self, key: str, value: Any) -> None:
        own = self.get(key)
        is_frozen = own is not None and not (own.requires_grad or value.requires_grad)
        if is_frozen and type(own) is type(value) is not nn.Parameter:
            dict.__setitem__(self, key, value)  # PEFT's DoRA puts a packed weight, on the device, in its own place
        else:
            super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        vars(self)[key] = taken = self[key]
        dict.__delitem__(self, key)
        torch._C._autograd._unsafe_set_version_counter((taken,), (0,))  # parametrize has set it to itself


def belongs_to_engine(model: nn.Module) -> bool:
    """Return whether an engine holds parameters of `model`; one that was dropped releases them here at the latest."""

    def is_held() -> bool:
        return any(isinstance(module.__dict__.get("_parameters"), FixedParameters) for module in model.modules())

    if is_held():
        gc.collect()
    return is_held()


class Installation:
    """The modules of one model, and what they hold while the engine runs them: phantoms, device copies, device buffers."""

    def __init__(
        self,
        model: nn.Module,
        canonical: Mapping[int, str],
        device: Device,
        ledger: Ledger,
        note_trained: NoteTrained | None = None,
        swapped_buffers: Iterable[OwnedBuffer] = (),
        packed: Iterable[str] = (),
    ) -> None:
        """Prepare the modules of `model`.

        Args:
            packed: canonical names of the parameters that travel as their bytes.
            note_trained: called with a parameter and its `requires_grad` before the model's code sets that.
            swapped_buffers: those that only layer calls find on the device, with their weights.
        """
        self._device = device
        self._packed = frozenset(packed)
        self._swapped: dict[nn.Module, set[str]] = {}
        for owned in swapped_buffers:
            self._swapped.setdefault(owned.module, set()).add(owned.key)
        self._model = model
        self.modules = tuple(model.modules())
        self._names: dict[nn.Module, dict[str, str]] = {}  # canonical names, of modules with parameters
        self._phantoms: dict[nn.Module, FixedParameters] = {}
        for module in self.modules:
            own = {key: host for key, host in module._parameters.items() if host is not None}
            if own:
                self._names[module] = names = {key: canonical[id(host)] for key, host in own.items()}
                place, touch = device.torch_device, self._touch
                phantoms = {
                    key: PhantomParameter.make_like(names[key], host, place, touch, note_trained)
                    for key, host in own.items()
                }
                self._phantoms[module] = FixedParameters({**module._parameters, **phantoms})
                module.__dict__["_parameters"] = FixedParameters(module._parameters)
        self.buffers = DeviceBuffers(self.modules, device, ledger, self._swapped)
        self._open = False
        self.touched: set[str] = set()
        self.fetch: Touched | None = None  # gets a parameter that is used outside a layer call

    def find_buffers(self) -> None:
        """Hold the buffers that the model's modules have now."""
        self.buffers.find_owners(self._model.modules())

    @contextmanager
    def installed(
        self, unlayered: Mapping[str, Tensor], keep_buffers: bool = True, places: Mapping[nn.Module, int] = _AT_HOME
    ) -> Iterator[None]:
        """Make modules hold phantoms, and `unlayered` device tensors by canonical name, while the context is open.

        Changes of buffers are kept if `keep_buffers` and nothing was raised. `places`: see `DeviceBuffers.installed`.
        """
        if self._open:  # a forward pass inside generate()
            yield
            return
        self._open = True
        try:
            # The device is made current, since the model's code may ask for it.
            buffers = self.buffers.installed(keep_buffers, places)
            with patched(self._without_host(unlayered)), self._device.as_current(), buffers:
                yield
        finally:
            self._open = False

    def _without_host(self, unlayered: Mapping[str, Tensor]) -> Iterator[Item]:
        for module, names in self._names.items():
            there = {key: unlayered[name] for key, name in names.items() if name in unlayered}
            phantoms = self._phantoms[module]
            yield module.__dict__, "_parameters", FixedParameters({**phantoms, **there}) if there else phantoms

    def _touch(self, name: str) -> Tensor:
        self.touched.add(name)
        if self.fetch is not None:
            return self.fetch(name)
        if is_between_layers():
            raise UnseenError(f"{name} is used outside its layer's calls.")
        raise ModelError(
            f"the parameter {name} was used outside the call of the layer that owns it, where it is not on the device. "
            "Name a module that contains both in harmony.layers. A loss that calls the model in its backward pass "
            "(GradCache, the Cached... ones of sentence-transformers) cannot be run: take the one that is not cached "
            "(MultipleNegativesRankingLoss), whose rows go through each layer a few at a time: docs/retrievers.md."
        )

    def remove(self) -> None:
        """Give every module a plain dictionary of its host parameters, and free the device buffers."""
        self.buffers.drop()
        for module in self._names:
            module.__dict__["_parameters"] = dict(module._parameters)

    def parameters_of(self, layer: nn.Module) -> LayerParameters:
        inside = list(layer.modules())
        own = [module for module in inside if module in self._names]
        has_buffers = any(module in self._swapped for module in inside)
        return LayerParameters(
            {module: self._names[module] for module in own},
            {module: [p.harmony_host for p in self._phantoms[module].values() if p is not None] for module in own},
            frozenset(inside),
            has_buffers=has_buffers,
            has_packed=has_buffers or any(not self._packed.isdisjoint(self._names[module].values()) for module in own),
        )


class with_buffers(patched):  # noqa: N801 - as `patched`
    """Context in which modules hold swapped buffers, too, which forward may read alone."""

    __slots__ = ("_held",)

    def __init__(self, items: Iterable[Item], buffers: Attributes) -> None:
        self._held: list[tuple[nn.Module, str, Tensor]] = []
        for module, own in buffers.items():
            self._held += [(module, key, buffer) for key, buffer in own.items()]
        # The dictionaries of now: they are exchanged as a whole while the model is installed.
        more: list[Item] = [(module._buffers, key, buffer) for module, key, buffer in self._held]
        super().__init__([*items, *more])

    def __exit__(self, *error: object) -> None:
        changed: tuple[nn.Module, str, Tensor] | None = None
        for module, key, buffer in self._held:
            if module._buffers.get(key) is not buffer or (buffer._version if not buffer.is_inference() else 0):
                changed = module, key, buffer
        super().__exit__(*error)
        if changed is not None and error[0] is None:
            module, key, buffer = changed
            raise ModelError(
                f"forward changes the buffer {key!r} of a {type(module).__name__}, {tuple(buffer.shape)} of "
                f"{buffer.dtype}, which is taken for a part of a quantized weight and is swapped in only: the change would "
                "be lost. Keep what changes in a module of its own, without integer codes, or make it torch.int64."
            )


class LayerParameters:
    """The modules of one layer with the names of their parameters, which hold device copies for the time of a call.

    Attributes:
        has_packed: some travel as their bytes; backward passes find them in the modules, too.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, Mapping[str, str]],
        hosts: Mapping[nn.Module, Sequence[nn.Parameter]],
        modules: frozenset[nn.Module],
        *,
        has_buffers: bool,
        has_packed: bool,
    ) -> None:
        self._names = names  # canonical, of each module's parameters
        self._hosts = hosts
        self._modules = modules  # of the layer, those without parameters, too
        self.has_packed = has_packed
        self._has_buffers = has_buffers  # such as are swapped with its weights
        self._all = {name for own in names.values() for name in own.values()}

    def are_hooked(self, module: nn.Module) -> bool:
        """Return whether the user has registered hooks on parameters of `module`, one of the layer's, or inside of it."""
        with bypass_hooks():
            return any(host._backward_hooks for inner in module.modules() for host in self._hosts.get(inner, ()))

    def installed(self, leaves: Leaves) -> patched:
        """Return a context in which the layer's modules hold `leaves`."""
        if self._has_buffers:
            return with_buffers(self._items(leaves), leaves.buffers)
        return patched(leaves.cache.get(self) or self._items(leaves))

    def _items(self, leaves: Leaves) -> list[Item]:
        items: list[Item] = []
        for module, names in self._names.items():
            own = {key: leaves[name] for key, name in names.items() if name in leaves}
            parameters = CallParameters({**module._parameters, **own})
            items.append((module.__dict__, "_parameters", parameters))
            if isinstance(module, nn.RNNBase):
                # It computes with a list. If it made that itself, it would move parameters into cuDNN's memory.
                weights = [parameters.get(name) for name in module._flat_weights_names]
                items.append((module.__dict__, "_flat_weights", weights))
                refs = [w if w is None else weakref.ref(w) for w in weights]
                items.append((module.__dict__, "_flat_weight_refs", refs))
        for module, attributes in leaves.attributes.items():
            if module in self._modules:
                items += [(module.__dict__, key, value) for key, value in attributes.items()]
        if leaves.keys() >= self._all:  # other entries of the modules may change until the next call
            leaves.cache[self] = items
        return items
