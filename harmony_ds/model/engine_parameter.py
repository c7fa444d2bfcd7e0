"""Parameters of a model that an engine trains: every use of one passes a gate, which waits for pending updates.

Before a step's first call, masters take over what was written into their weights.
"""

from __future__ import annotations

import threading
from copy import deepcopy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.graph_cut import raise_explained
from harmony_ds.model.link import Owner, ParameterLink
from harmony_ds.model.packed_gate import gated
from harmony_ds.model.patching import patched
from harmony_ds.offload.device_copies import leaf_over
from harmony_ds.offload.host_store import HostStore, bypass_hooks
from harmony_ds.offload.rebuild import LINK
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.resident_packs import ResidentPacks

_DESCRIPTIONS = frozenset(
    "shape dtype device layout is_leaf ndim grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "itemsize nbytes names name _version output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks numel size "
    "dim stride is_contiguous element_size is_floating_point is_complex get_device storage_offset __len__ ndimension "
    "_has_compatible_shallow_copy_type is_same_size register_hook".split()
)
"""Attributes and functions that do not depend on a parameter's values."""
_HAND_OUT_MEMORY = frozenset(
    "numpy __array__ storage untyped_storage _typed_storage data_ptr __dlpack__ __cuda_array_interface__".split()
)
"""Attributes and functions whose result lets a program write into a parameter without torch."""
_REFUSED = {
    "register_post_accumulate_grad_hook": "a gradient is complete only when its pack's group is: use register_hook, or "
    "read .grad between backward() and step()",
    "share_memory_": "its memory is a slab of the engine's: hand out clones",
}
_EXPLANATIONS = {
    "not have been used": "torch.autograd.grad with respect to parameters that an engine trains: its backward pass runs "
    "layer by layer, outside that graph. Propagate with engine.backward(loss) and read .grad of the parameters.",
    "same device": "weights are on the host outside the engine's calls: call engine(...) or engine.generate(...), and "
    "other methods, without gradients, in `with engine.streaming():`.",
}
_gate = threading.local()


def gate(passed: bool) -> patched:
    """Return a context for uses of parameters on this thread. `passed`: they skip the links, which use them so."""
    return patched([(vars(_gate), "passed", passed)])


class EngineParameter(nn.Parameter):
    """A parameter that an engine trains. Its copies and pickles, and objects that this class makes, are plain."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        descriptor = name if name in ("__get__", "__set__", "__delete__") else ""
        if descriptor:
            name = func.__self__.__name__
        is_mode = name in ("requires_grad", "requires_grad_")  # of calls: it changes no value
        if is_mode or getattr(_gate, "passed", False) or (name in _DESCRIPTIONS and descriptor != "__set__"):
            with bypass_hooks():
                return func(*args, **kwargs)
        with gate(passed=True):
            return _pass(func, name, descriptor, args, kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take the values of other memory, as `.data = ` does. Torch tells `__torch_function__` nothing of this method.

        A parametrization calls it where a program assigns the weight that it computes.
        """
        memory = torch.empty(0, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)
        self.data = memory.set_(*args, **kwargs).detach()
        return self

    # DeepSpeed's names
    get_full_hp_param = property(attrgetter("_hp_mapping.get_full_hp_param"))
    set_full_hp_param = property(attrgetter("_hp_mapping.set_full_hp_param"))
    get_full_hp_grad = property(attrgetter("_hp_mapping.get_full_hp_grad"))
    set_full_hp_grad = property(attrgetter("_hp_mapping.set_full_hp_grad"))

    def _plain(self) -> nn.Parameter:
        return leaf_over(self.detach(), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return deepcopy(self._plain(), memo)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


def _pass(func: Any, name: str, descriptor: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    used = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, EngineParameter)]
    links: list[ParameterLink] = [parameter.__dict__[LINK] for parameter in used]
    first = links[0]
    if descriptor and name == "grad":
        if descriptor == "__get__":
            return first.owner.gradient(first.name)
        return first.owner.put_gradient(first.name, args[1] if descriptor == "__set__" else None)
    if name in _REFUSED:
        raise UnsupportedError(f"{name}() of {first.name}, which an engine trains: {_REFUSED[name]}.")
    written = _written(name, descriptor, args, kwargs)
    for parameter, link in zip(used, links, strict=True):
        link.before(writes=id(parameter) in written)
    if descriptor == "__set__" and name == "data":
        return first.replace(args[1])
    versions = [parameter._version for parameter in used]
    try:
        with bypass_hooks():
            result = func(*args, **kwargs)
    except RuntimeError as error:
        raise_explained(error, _EXPLANATIONS, UnsupportedError)
    finally:
        for parameter, link, version in zip(used, links, versions, strict=True):
            if parameter._version != version:  # an operator's name may not tell that it writes
                link.note_write()
    if name in _HAND_OUT_MEMORY:
        first.watch()
    for made in filter(lambda leaf: isinstance(leaf, Tensor), tree_iter(result)):
        for link in links:
            link.note_alias(made)
    return result


def _written(name: str, descriptor: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of what a function writes into: its first argument, or what it is to put its result into."""
    in_place = name.endswith("_") and not name.startswith("__")
    operator = name.startswith("__i") and name.endswith("__") and name not in ("__int__", "__index__", "__invert__")
    first = in_place or operator or name == "__setitem__" or descriptor == "__set__"
    return set(map(id, tree_iter(((args[:1] or kwargs) if first else (), kwargs.get("out")))))


class ParameterLinks:
    """Links of all parameters of a model, until `remove`."""

    def __init__(
        self, store: HostStore, resident: ResidentPacks, optimizer: HostOptimizer | None, owner: Owner
    ) -> None:
        self._owner = owner
        self._parameters = store.parameters
        self._buffers = store.buffers
        self._packed = store.packed
        self._versions = self._packed_versions()
        self._kinds: dict[str, type[nn.Parameter]] = {}
        self._links = [ParameterLink(name, store, resident, optimizer, owner) for name in store.parameters]
        for link in self._links:
            parameter = store.parameters[link.name]
            self._kinds[link.name] = kind = type(parameter)
            parameter.__dict__[LINK] = link
            parameter.__class__ = EngineParameter if kind is nn.Parameter else gated(kind)

    def _packed_versions(self) -> dict[str, int]:
        return {name: one.version for name, one in self._packed.items()}

    def apply_user_writes(self) -> None:
        """Copy what the user wrote into weights to masters; ModelError: a packed buffer was replaced."""
        for name, owned in self._buffers.items():
            if owned.module._buffers.get(owned.key) is not owned.buffer:
                raise ModelError(
                    f"the buffer {name} is replaced, a part of a quantized weight that lies in memory of the engine: copy "
                    "values into it, or change it before initialize or after destroy."
                )
        self._versions = self._packed_versions()
        newer = [link for link in self._links if link.may_be_newer]
        if newer:
            self._owner.wait_for_updates()
        for link in newer:
            link.update_master()
        for link in self._links:
            if link.is_watched:
                link.end_watch()

    def check_packed_unwritten(self) -> None:
        """Raise ModelError if the program has written into quantized weights since `apply_user_writes`."""
        for name, version in self._packed_versions().items():
            if version != self._versions[name]:
                raise ModelError(
                    f"{name}, a quantized weight or what belongs to one, was written while micro-batches wait that were "
                    "called before: change it between steps, before the first micro-batch of one."
                )

    def check_requires_grad(self) -> None:
        """Raise UnsupportedError if a parameter requires a gradient now that this engine does not train."""
        with bypass_hooks():
            for link in self._links:
                if link.was_frozen:
                    link.check_requires_grad()

    def refresh_aliases(self) -> None:
        """Make tensors that share a parameter's memory show the update of a step, as in plain PyTorch."""
        for link in self._links:
            if link.has_aliases:
                self._owner.wait_for_updates()
                link.follow_update()

    def hand_over(self, owner: Owner) -> None:
        """Ask another owner from now on."""
        for link in self._links:
            link.owner = owner

    def remove(self) -> None:
        """Make the parameters plain ones again."""
        for link in self._links:
            parameter = self._parameters[link.name]
            parameter.__class__ = self._kinds[link.name]
            parameter.__dict__.pop(LINK, None)
