"""What a model's parameters know of their engine: masters, optimizer state, and what changing them by hand entails.

While an engine has a model, its parameters are `EngineParameter`s: plain parameters whose every use passes their
`ParameterLink` first. So what is read is true, whoever kept the parameter from whenever, and what is written, put in
its place or left as its gradient counts as it does in plain PyTorch, or is refused.

Each parameter carries its link under the names that DeepSpeed's helpers look for (`_hp_mapping`,
`get_full_hp_param`, ...), so that `deepspeed.utils.safe_get_full_fp32_param` and its like work as ours do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.plain_copies import Added, copy_all, leave_out_added
from harmony_ds.errors import CallChangedError, ModelError, UnsupportedError
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.host_store import HostStore, ungated

_ATTRIBUTES = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")

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
    return {key: value for key, value in parameter.__dict__.items() if key not in ("_hp_mapping", *_ATTRIBUTES)}


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


class Owner:
    """What an engine lets its parameters' links do; this one, that of no engine, does nothing."""

    def finish(self) -> None:
        """Makes every weight, master and state on the host true."""

    def look(self, name: str) -> None:
        """Makes the weight `name` on the host true."""

    def run_queued(self, why: str) -> None:
        """Runs what is queued and propagated from, since `why` is about to happen."""

    def has_queued(self) -> bool:
        """Whether micro-batches are queued that have not run to their end."""
        return False

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name`, itself, not scaled: what is written into it is used."""
        return None

    def is_updating(self, name: str) -> bool:
        """Whether an update of `name` is pending, whose gradient is on it."""
        return False

    def drop(self, name: str) -> None:
        """The gradient of `name` is not wanted."""


class ParameterLinks(Added):
    """Gives every parameter of a model its link, and takes them back."""

    def __init__(self, model: nn.Module, store: HostStore, optimizer: HostOptimizer | None, owner: Owner) -> None:
        self._model = model
        self._parameters = store.parameters
        self._links: list[ParameterLink] = []
        leave_out_added(model)
        for name, parameter in store.parameters.items():
            trained = optimizer is not None and optimizer.trains(name)
            link = ParameterLink(name, parameter, store.masters[name] if trained else None, optimizer, owner)
            link.weight = store.weight(name)
            self._links.append(link)
            parameter.__dict__["_hp_mapping"] = link
            for attribute in _ATTRIBUTES:
                parameter.__dict__[attribute] = getattr(link, attribute)
            parameter.__class__ = EngineParameter
        self._hook = model.register_load_state_dict_post_hook(self._loaded)
        self._before = model.register_load_state_dict_pre_hook(self._check_load)

    def _loaded(self, module: nn.Module, keys: object) -> None:
        self.take_over()

    def _check_load(self, module: nn.Module, *arguments: Any) -> None:
        metadata: dict[str, Any] = arguments[2]
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError(
                f"load_state_dict(assign=True) would replace the parameters of {type(module).__name__}, which an engine "
                "trains: leave assign out, so that values are copied into them, or load before initialize."
            )

    def settle(self) -> None:
        """Before weights are used: what was written into them by hand reaches their masters.

        Raises:
            ModelError: a parameter has been given other memory.
        """
        with ungated():
            for link in self._links:
                link.check_memory()
        for link in self._links:
            if link.is_to_be_settled:
                link.settle()

    def held(self) -> list[str]:
        """The parameters whose memory somebody keeps: `p.data`, a state dict, a view."""
        return [link.name for link in self._links if link.is_held]

    def take_over(self) -> None:
        """Makes masters follow what was written into the parameters."""
        take_over(self._parameters.values())

    def remove(self) -> None:
        """Leaves the parameters as plain ones."""
        self._hook.remove()
        self._before.remove()
        copy_all(self._model)
        for parameter in self._parameters.values():
            parameter.__class__ = nn.Parameter
            for attribute in ("_hp_mapping", *_ATTRIBUTES):
                parameter.__dict__.pop(attribute, None)


class ParameterLink:
    """One parameter, its master and its state. Copies and pickles of it are empty."""

    weight: Tensor | None = None
    """The parameter's place in its slab."""

    def __init__(
        self,
        name: str = "",
        parameter: nn.Parameter | None = None,
        master: nn.Parameter | None = None,
        optimizer: HostOptimizer | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.name = name
        self._parameter = parameter
        self._master = master
        self._optimizer = optimizer
        self._owner = owner or Owner()
        self._aliases: list[weakref.ref[Tensor]] = []
        self._handed_out: Tensor | None = None  # its values when somebody got at its memory while micro-batches wait
        self._touched = False  # somebody may have written into the parameter, and not into its master

    @property
    def owner(self) -> Owner:
        """The engine, as far as the link knows it."""
        return self._owner

    def finish(self) -> None:
        """Makes every weight, master and state on the host true."""
        self._owner.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterLink, ()

    # ---- what the user does to the parameter itself

    def before(self, writes: bool, aliases: bool = False) -> None:
        """The parameter's values are about to be read, changed (`writes`) or handed out (`aliases`)."""
        if writes:
            self._owner.run_queued(f"{self.name} is about to be changed")
        self._owner.look(self.name)
        self._touched = True
        if aliases and self._handed_out is None and self.weight is not None and self._owner.has_queued():
            self._handed_out = self.weight.clone()

    def replace(self, value: Tensor) -> None:
        """`parameter.data = value`: its values, in the parameter's own memory.

        Raises:
            ModelError: it has another shape, dtype or device.
        """
        own = self.weight
        assert own is not None
        if value.shape != own.shape or value.dtype != own.dtype or value.device != own.device:
            raise ModelError(
                f"{self.name} is to become {tuple(value.shape)}, {value.dtype}, on {value.device}, but its engine trains "
                f"it as {tuple(own.shape)}, {own.dtype}, on {own.device}: change a model's shapes and dtypes before "
                'initialize, and choose the dtype in the ds_config ("bf16", "fp16").'
            )
        self.before(writes=True)
        if value.data_ptr() != own.data_ptr():
            with torch.no_grad():
                value = value.clone() if _same_memory(value, own) else value
                self._give_away(own.clone())
                own.copy_(value)

    def note_alias(self, result: Tensor) -> None:
        """`result` came of the parameter: whoever keeps it may share its memory."""
        if result is not self._parameter and self.weight is not None and _same_memory(result, self.weight):
            self._aliases = [*self._alive(), weakref.ref(result)]

    @property
    def is_held(self) -> bool:
        """Whether somebody keeps a tensor that shares the parameter's memory."""
        self._aliases = self._alive()
        return bool(self._aliases)

    def _alive(self) -> list[weakref.ref[Tensor]]:
        return [alias for alias in self._aliases if alias() is not None]

    def _give_away(self, copy: Tensor) -> None:
        """Lets those who keep the parameter's memory have a copy of it: the parameter gets another, as they see it."""
        assert self.weight is not None
        for reference in self._aliases:
            alias = reference()
            if alias is not None:
                offset = (alias.data_ptr() - self.weight.data_ptr()) // copy.element_size()
                alias.data = copy.as_strided(alias.shape, alias.stride(), copy.storage_offset() + offset)
        self._aliases.clear()

    def check_requires_grad(self, wanted: bool) -> None:
        """`parameter.requires_grad = wanted`.

        Raises:
            UnsupportedError: it was frozen when the engine was made, which keeps no master and no state of it.
        """
        assert self._parameter is not None
        with ungated():
            changes = self._parameter.requires_grad != wanted
        if changes and wanted and self._master is None and self._optimizer is not None:
            raise UnsupportedError(
                f"{self.name} is not trained by this engine: it did not require a gradient, or was not among the "
                "optimizer's parameters, when initialize was called. To thaw it later, let it be trained at initialize and "
                "freeze it behind that (requires_grad_(False)), or initialize again."
            )

    def read_grad(self) -> Tensor | None:
        """`parameter.grad`: what has gathered since the last step; writing into it changes what is used."""
        total = self._owner.gradient(self.name)  # whose backward pass takes what is here
        own = self._own_grad()
        if total is None:
            return own
        if own is not None:
            with torch.no_grad():
                total.add_(own)
            self._put_grad(None)
        return total

    def write_grad(self, value: Tensor | None = None) -> None:
        """`parameter.grad = value`: it is used in the place of what has gathered."""
        self._owner.drop(self.name)
        if value is not None:
            self._owner.look(self.name)  # behind a pending update, which takes away what is there
        if not self._owner.is_updating(self.name):
            self._put_grad(value)

    def _own_grad(self) -> Tensor | None:
        assert self._parameter is not None
        if self._owner.is_updating(self.name):
            return None
        with ungated():
            return self._parameter.grad

    def _put_grad(self, value: Tensor | None) -> None:
        assert self._parameter is not None
        with ungated():
            self._parameter.grad = value

    def check_memory(self) -> None:
        """Raises ModelError if the parameter has been given other memory. To be called ungated."""
        if self.weight is None or self._parameter is None or self._parameter.data_ptr() == self.weight.data_ptr():
            return
        raise ModelError(
            f"{self.name} has been given other memory behind its engine's back (torch.utils.swap_tensors, or a library "
            "that assigns storages): copy values into it instead, or initialize again."
        )

    @property
    def is_to_be_settled(self) -> bool:
        """Whether somebody may have written into the parameter."""
        return self._touched or self._handed_out is not None

    def settle(self) -> None:
        """What was written into the parameter by hand reaches its master.

        Raises:
            CallChangedError: it was changed unseen while micro-batches wait.
        """
        if self._handed_out is not None and self.weight is not None:
            before, self._handed_out = self._handed_out, None
            if self._owner.has_queued() and not torch.equal(before, self.weight):
                raise CallChangedError(
                    f"{self.name} was changed through .data, .detach() or the like while micro-batches wait that were "
                    "called before. Change the parameter itself (with torch.no_grad(): parameter.copy_(value)), which lets "
                    "them run first, or change it behind engine.step()."
                )
        if self._touched:
            self._touched = False
            if self._master is not None and self._master is not self._parameter:
                self.finish()  # the master, too, may be newer on the device
                self.take_over()

    # ---- masters, state and gradients, under DeepSpeed's names

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor | None:
        """A copy of the fp32 master, or of the optimizer state of that name; None if the parameter is not trained.

        Raises:
            ValueError: there is no such state (yet).
        """
        self.finish()
        if self._master is None:
            return None
        source = self._master if optim_state_key is None else self._state(optim_state_key)
        return source.detach().float().clone()

    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Replaces the master (and the weight with it), or the optimizer state of that name."""
        self.finish()
        if self._master is None:
            return
        with torch.no_grad():
            if optim_state_key is not None:
                self._state(optim_state_key).copy_(value)
                return
            self._master.copy_(value)
            if self._parameter is not self._master and self.weight is not None:
                self.weight.copy_(self._master)

    def _state(self, key: str) -> Tensor:
        assert self._optimizer is not None and self._master is not None
        state = self._optimizer.optimizer.state
        found = state[self._master].get(key) if self._master in state else None
        if not isinstance(found, Tensor) or found.shape != self._master.shape:
            raise ValueError(f"{key} not found in optimizer state fragment")
        return found

    def get_full_hp_grad(self) -> Tensor | None:
        """A copy of the gradient so far, in fp32, unscaled and not clipped; None if the parameter has none."""
        found = self.read_grad()
        return None if found is None else found.detach().to("cpu", torch.float32).clone()

    def set_full_hp_grad(self, value: Tensor) -> None:
        """Replaces the gradient, if there is one."""
        found = self.read_grad()
        if found is not None:
            with torch.no_grad():
                found.copy_(value)

    def take_over(self) -> None:
        """Makes the master follow the parameter, where that was changed by hand."""
        if self._master is None or self.weight is None or self._parameter is self._master:
            return
        with torch.no_grad():
            changed = self.weight != self._master.to(self.weight.dtype)
            if changed.any():
                self._master.copy_(torch.where(changed, self.weight.to(self._master.dtype), self._master))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return torch._C._has_storage(a) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def link_of(parameter: object) -> ParameterLink | None:
    """The link of a parameter that an engine trains or holds."""
    link = parameter.__dict__.get("_hp_mapping") if isinstance(parameter, Tensor) else None
    return link if isinstance(link, ParameterLink) else None


def take_over(parameters: Iterable[object]) -> None:
    """Makes the masters of `parameters` follow them, where they were changed by hand."""
    links = [link for parameter in parameters if (link := link_of(parameter)) is not None]
    for owner in {link.owner for link in links}:
        owner.finish()
    for link in links:
        link.take_over()
