"""The class of parameters while an engine has them: every use passes their links."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.errors import UnsupportedError
from harmony_ds.offload.host_store import ungated
from harmony_ds.parameters.link import ParameterLink

ATTRIBUTES = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")
_DESCRIPTIONS = frozenset(
    "shape dtype device layout is_leaf ndim requires_grad grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "itemsize nbytes names name _version output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks numel size "
    "dim stride is_contiguous element_size is_floating_point is_complex get_device storage_offset __len__ ndimension "
    "_has_compatible_shallow_copy_type is_same_size".split()
)
"""What says nothing about a parameter's values."""
_ALIASES = frozenset("data detach numpy __array__ data_ptr untyped_storage storage __dlpack__".split())
"""What hands out memory that can be written behind the parameter's back."""
_REFUSED = {
    "register_post_accumulate_grad_hook": "a gradient is complete only when its pack's group is: use register_hook, or "
    "read .grad between backward() and step()",
    "share_memory_": "its memory is a slab of the engine's: hand out clones",
}


class EngineParameter(nn.Parameter):
    """A parameter while an engine has it. Copies and pickles of it are plain parameters."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        descriptor = name if name in ("__get__", "__set__", "__delete__") else ""
        if descriptor:
            name = func.__self__.__name__
        if _passing.active or (name in _DESCRIPTIONS and descriptor != "__set__"):
            with ungated():
                return func(*args, **kwargs)
        _passing.active = True
        try:
            return _pass(func, name, descriptor, args, kwargs)
        finally:
            _passing.active = False

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo.get(id(self))
        if copied is None:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            copied.__dict__.update(deepcopy(_of_the_user(self), memo))
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update(_of_the_user(self))
        return plain.__reduce_ex__(protocol)


def _of_the_user(parameter: EngineParameter) -> dict[str, Any]:
    return {key: value for key, value in parameter.__dict__.items() if key not in ("_hp_mapping", *ATTRIBUTES)}


class _Passing(threading.local):
    active = False  # this thread is past the gate: what a link does to its parameter is not asked again


_passing = _Passing()


def _pass(func: Any, name: str, descriptor: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    links = list(_links_in((*args, *kwargs.values())))
    if descriptor and name == "grad" and links:
        return links[0].read_grad() if descriptor == "__get__" else links[0].write_grad(*args[1:2])
    if name in _REFUSED:
        raise UnsupportedError(f"{name}() of {links[0].name}, which an engine trains: {_REFUSED[name]}.")
    if name == "register_hook":  # backward passes that were asked for before do not see it
        links[0].owner.gradient(links[0].name)
        with ungated():
            return func(*args, **kwargs)
    if descriptor == "__set__" and name == "data":
        return links[0].replace(args[1])
    writes = _writes(name, descriptor, kwargs)
    for link in links:
        link.before(writes, name in _ALIASES)
    if name in ("requires_grad", "requires_grad_"):
        links[0].check_requires_grad(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    with ungated():
        if func is torch.autograd.grad:
            return _gradients_of_host_graph(*args, **kwargs)
        result = func(*args, **kwargs)
        if len(links) == 1 and isinstance(result, Tensor):
            links[0].note_alias(result)
        elif name in _ALIASES:
            links[0].note_address()
        return result


def _gradients_of_host_graph(*args: Any, **kwargs: Any) -> Any:
    try:
        return torch.autograd.grad(*args, **kwargs)
    except RuntimeError as error:
        if "not have been used" not in str(error):
            raise
        raise UnsupportedError(
            "torch.autograd.grad with respect to parameters that an engine trains: its backward pass runs layer by layer, "
            "outside that graph. Propagate with engine.backward(loss) and read .grad of the parameters."
        ) from error


def _writes(name: str, descriptor: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.startswith("__")
    operator = name.startswith("__i") and name.endswith("__") and name not in ("__int__", "__index__", "__invert__")
    return in_place or operator or name == "__setitem__" or descriptor == "__set__" or kwargs.get("out") is not None


def _links_in(values: Iterable[Any]) -> Iterator[ParameterLink]:
    for value in values:
        if isinstance(value, EngineParameter):
            link = value.__dict__.get("_hp_mapping")
            if link is not None:
                yield link
        elif isinstance(value, (list, tuple)):
            yield from _links_in(value)
