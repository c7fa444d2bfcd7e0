"""Reads and writes of one parameter, its master, state and gradient, while an engine trains it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.offload.host_store import HostStore
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.resident_packs import ResidentPacks


class Owner(Protocol):
    """The steps of an engine, as the links of its parameters see them. They call nothing of a link.

    Each method but `wait_for_updates` passes one event on to the open step: the program does something to the parameter
    `name`. After that wait, the link itself brings the value of a resident parameter to the host.
    """

    def wait_for_updates(self) -> None:
        """Before a value is read, wait for all updates on the host, and for copies that still read its memory."""

    def before_write(self, name: str) -> None:
        """Before a value is written, run queued calls, which need the value from before, or raise."""

    def gradient(self, name: str) -> Tensor | None:
        """Return the accumulated gradient itself, not scaled, since it is read; None: there is none."""

    def put_gradient(self, name: str, value: Tensor | None) -> None:
        """Replace the accumulated gradient, since the program sets it."""


class ParameterLink:
    """Link of one parameter to its memory in a slab, its master if it is trained, and the optimizer's state."""

    def __init__(
        self, name: str, store: HostStore, resident: ResidentPacks, optimizer: HostOptimizer | None, owner: Owner
    ) -> None:
        """Link the parameter `name` of `store`, which `resident` may have on the device."""
        self.name = name
        self.owner = owner
        self._parameter = store.parameters[name]
        packed = store.packed.get(name)
        memory = None if packed is None else packed.memory
        self._weight = store.weight(name) if memory is None else memory
        self.was_frozen = not self._parameter.requires_grad
        """Whether the parameter required no gradient when the engine was made."""
        self.is_watched = False
        self._optimizer = optimizer
        self._master = store.masters[name] if optimizer is not None and optimizer.trains(name) else None
        self._apart = None if self._master is self._parameter else self._master  # the master that follows the weight
        self._aliases = WeakIdKeyDictionary()  # living tensors that share its memory
        self._is_touched = False  # it may have been written since its master followed
        self._store = store
        self._resident = resident
        self._split = store.split if self._master is not None else None
        self._before: tuple[int, Tensor] | None = None  # version and weight when a split master's was touched

    def before(self, writes: bool = False) -> None:
        """Wait for all pending updates, and bring this weight on the host up to date: it is read now, or written."""
        if writes:
            self.owner.before_write(self.name)
        self.owner.wait_for_updates()
        self._resident.weight_to_host(self.name)
        self._is_touched = True
        if self._kept() is None:
            self._keep_weight()
        if writes:
            self.note_write()

    def note_write(self) -> None:
        """Note that the parameter's values are being changed."""
        self._resident.note_weight_written(self.name)

    def follow_update(self) -> None:
        """After an update, bring a weight that other tensors show up to date; it may be written through them."""
        self._resident.weight_to_host(self.name)
        self.watch()
        self._is_touched = True
        self._keep_weight()

    def _keep_weight(self) -> None:
        """Keep a copy of the weight of a split master, so that what is written into it from now on can be found."""
        if self._split is not None:
            self._before = self._split.versions[self.name], self._weight.clone()

    def _kept(self) -> Tensor | None:
        """Return that copy, unless the weight has been updated since."""
        if self._split is None or self._before is None:
            return None
        version, weight = self._before
        return weight if version == self._split.versions[self.name] else None

    @torch.no_grad()
    def replace(self, value: Tensor) -> None:
        """Copy `value` to the parameter (`.data = value`); raise ModelError if its shape, dtype or device differs."""
        own = self._weight
        kinds = [f"{tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}" for tensor in (value, own)]
        if kinds[0] != kinds[1]:
            raise ModelError(
                f"{self.name} is to become {kinds[0]}, but its engine trains it as {kinds[1]}: change a model's shapes and "
                'dtypes before initialize, and choose the dtype in the ds_config ("bf16", "fp16"). When training is over, '
                "call engine.destroy() first: then the model is a plain one."
            )
        if value.data_ptr() != own.data_ptr():  # `kept = p.data; p.data = average`: `kept` keeps its values
            for alias in list(self._aliases):
                alias.data = alias.clone()
            self._aliases.clear()
        own.copy_(value.clone() if _same_memory(value, own) else value)

    def note_alias(self, result: Tensor) -> None:
        """Note `result`, made of the parameter, if it shares the parameter's memory."""
        if result is not self._parameter and _same_memory(result, self._weight):
            self._aliases[result] = None
            self.watch()

    def watch(self) -> None:
        """Find, from now on, what is written into the parameter through other tensors or arrays."""
        self._resident.watch(self.name)
        self.is_watched = True

    @property
    def has_aliases(self) -> bool:
        """Whether another living tensor shares its memory."""
        return self.is_watched and len(self._aliases) > 0  # watched from the first one to the last

    @property
    def may_be_newer(self) -> bool:
        """Whether the weight may be newer than its master; writes through aliases raise no version that tells."""
        return (self._apart is not None or self._split is not None) and (self._is_touched or self.has_aliases)

    @torch.no_grad()
    def update_master(self) -> None:
        """Copy weights that differ from the master into it. No update may be pending."""
        self._is_touched = self.has_aliases  # one may be written, and dropped, unseen
        master, weight = self._apart, self._weight
        if self._split is not None:
            before, self._before = self._kept(), None
            if before is not None:
                self._split.round(self.name, weight != before)
            if self.has_aliases:
                self._keep_weight()
        elif master is not None and self._resident.pop_written(self.name):
            self._resident.master_to_host(self.name)
            changed = weight != master.to(weight.dtype)
            if changed.any():
                master.copy_(torch.where(changed, weight.to(master.dtype), master))
                self._resident.note_master_written(self.name)

    def end_watch(self) -> None:
        """Watch a parameter no longer whose memory no other tensor shares; what has been written so far is known."""
        if not self.has_aliases:
            self._resident.unwatch(self.name)
            self.is_watched = False

    def check_requires_grad(self) -> None:
        """Raise UnsupportedError if the parameter has been thawed, and its engine has no master and no state of it."""
        if self.was_frozen and self._parameter.requires_grad and self._master is None and self._optimizer is not None:
            raise UnsupportedError(
                f"{self.name} is not trained by this engine: it did not require a gradient, or was not among the "
                "optimizer's parameters, when initialize was called. To thaw it later, let it be trained at initialize and "
                "freeze it after that (requires_grad_(False)), or initialize again."
            )

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor | None:
        """Return a copy of the fp32 master, or of the optimizer state of that name; None if it is not trained.

        Raises:
            ValueError: there is no such state yet.
        """
        found = self._trained(optim_state_key)
        return None if found is None else found.detach().float().clone()

    @torch.no_grad()
    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Replace the master and the weight, or the optimizer state of that name."""
        self.owner.before_write(self.name)
        found = self._trained(optim_state_key)
        if found is None:
            return
        if optim_state_key is None:
            self._resident.weight_to_host(self.name)
            self._store.write_master(self.name, value)
            self._resident.note_weight_written(self.name)
            self._resident.note_master_written(self.name)
            self._keep_weight()
        else:
            found.copy_(value)
            self._resident.note_state_written(self.name)

    def _trained(self, key: str | None) -> Tensor | None:
        self.owner.wait_for_updates()
        if self._master is None or self._optimizer is None:
            return None
        if key is None:
            self._resident.master_to_host(self.name)
            self.update_master()
            return self._store.read_master(self.name)
        self._resident.state_to_host(self.name)
        found = (self._optimizer.state_of(self.name) or {}).get(key)
        if not isinstance(found, Tensor) or found.shape != self._master.shape:
            raise ValueError(f"{key} not found in optimizer state fragment")
        return found

    def get_full_hp_grad(self) -> Tensor | None:
        """Return a copy of the gradient so far, in fp32, unscaled and not clipped; None if there is none."""
        found = self.owner.gradient(self.name)
        return None if found is None else found.detach().to("cpu", torch.float32).clone()

    @torch.no_grad()
    def set_full_hp_grad(self, value: Tensor) -> None:
        found = self.owner.gradient(self.name)
        if found is not None:
            found.copy_(value)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether the storage of `a` is, or is a part of, that of `b`, or the other way around."""
    if not torch._C._has_storage(a):
        return False
    one, other = a.untyped_storage(), b.untyped_storage()
    if one._cdata == other._cdata:
        return True
    try:
        begin, end = other.data_ptr(), other.data_ptr() + other.nbytes()
        return begin < one.data_ptr() + one.nbytes() and one.data_ptr() < end
    except RuntimeError:  # of a class that keeps its values in other tensors, whose own storage has no memory
        return False
