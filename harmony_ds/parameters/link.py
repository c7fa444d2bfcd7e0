"""One parameter, its master and its state: what reading and writing it means while an engine has it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from harmony_ds.errors import CallChangedError, ModelError, UnsupportedError
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.host_store import HostStore, ungated
from harmony_ds.offload.piece_optimizer import checksum


class Owner(Protocol):
    """What an engine lets its parameters' links do."""

    def finish(self) -> None:
        """Makes every weight, master and state on the host true."""

    def materialize(self, name: str) -> None:
        """Makes the weight `name` on the host true."""

    def run_queued(self, why: str) -> None:
        """Runs what is queued and propagated from, since `why` is about to happen."""

    def has_queued(self) -> bool:
        """Whether micro-batches are queued that have not run to their end."""

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name`, itself, not scaled: what is written into it is used."""

    def is_updating(self, name: str) -> bool:
        """Whether an update of `name` is pending, whose gradient is on it."""

    def drop(self, name: str) -> None:
        """The gradient of `name` is not wanted."""

    def is_shared(self) -> bool:
        """Whether several processes have one copy of weights, masters and state."""

    def refuse_shared(self, what: str) -> None:
        """Raises UnsupportedError for `what` if so."""


class ParameterLink:
    """One parameter, its place in its slab, its master if it is trained, and that one's state."""

    def __init__(self, name: str, store: HostStore, optimizer: HostOptimizer | None, owner: Owner) -> None:
        self.name = name
        self.owner = owner
        self._parameter = store.parameters[name]
        self._weight = store.weight(name)
        self._optimizer = optimizer
        trained = optimizer is not None and optimizer.trains(name)
        self._master = store.masters[name] if trained else None
        self._apart = None if self._master is self._parameter else self._master  # the master that has to follow
        self._aliases: list[weakref.ref[Tensor]] = []
        self._handed_out: Tensor | None = None  # its values when somebody got at its memory while micro-batches wait
        self._seen: int | None = None  # where memory is shared: a checksum of what somebody may have written into
        self._lent_out = False  # where memory is shared: somebody has its address
        self._touched = False  # somebody may have written into the parameter, and not into its master
        self.is_settled = True
        """Nothing of that waits to be looked at."""

    # ---- what the user does to the parameter itself

    def before(self, writes: bool, aliases: bool = False) -> None:
        """The parameter's values are about to be read, changed (`writes`) or handed out (`aliases`)."""
        if writes:
            self.owner.refuse_shared(f"changing {self.name} by hand, which every process would do again")
            self._check_handed_out()
            self.owner.run_queued(f"{self.name} is about to be changed")
        self.owner.materialize(self.name)
        self._touched, self.is_settled = True, False
        if aliases and self._handed_out is None and self.owner.has_queued():
            self._handed_out = self._weight.clone()

    def replace(self, value: Tensor) -> None:
        """`parameter.data = value`: its values, in the parameter's own memory.

        Raises:
            ModelError: it has another shape, dtype or device.
        """
        own = self._weight
        if value.shape != own.shape or value.dtype != own.dtype or value.device != own.device:
            raise ModelError(
                f"{self.name} is to become {tuple(value.shape)}, {value.dtype}, on {value.device}, but its engine trains "
                f"it as {tuple(own.shape)}, {own.dtype}, on {own.device}: change a model's shapes and dtypes before "
                'initialize, and choose the dtype in the ds_config ("bf16", "fp16").'
            )
        changed = self._take_back(value)
        self.before(writes=True)
        with torch.no_grad():
            if changed is not None:
                own.copy_(changed)
            elif value.data_ptr() != own.data_ptr():
                value = value.clone() if _same_memory(value, own) else value
                self._give_away(own.clone())
                own.copy_(value)

    def _take_back(self, value: Tensor) -> Tensor | None:
        """`parameter.data *= 2` writes first, and says so behind that: the values as they were are put back, for the
        micro-batches that wait. What was written; None if it was nothing.
        """
        before = self._handed_out
        if before is None or value.data_ptr() != self._weight.data_ptr() or torch.equal(before, self._weight):
            return None
        with torch.no_grad():
            written = self._weight.clone()
            self._weight.copy_(before)
        return written

    def note_alias(self, result: Tensor) -> None:
        """`result` came of the parameter: whoever keeps it may share its memory."""
        if result is not self._parameter and _same_memory(result, self._weight):
            self._aliases = [*(alias for alias in self._aliases if alias() is not None), weakref.ref(result)]
            self.watch()

    def note_address(self) -> None:
        """Somebody may write into the parameter's memory from now on, for as long as he likes."""
        self._lent_out = self.owner.is_shared()
        self.watch()

    def watch(self) -> None:
        """Where memory is shared: what is written into the parameter from now on is noticed."""
        if self.owner.is_shared() and self._seen is None:
            self._seen, self.is_settled = checksum(self._weight), False

    def check_unwritten(self) -> None:
        """Raises UnsupportedError if several processes have the parameter, and it was written into."""
        seen, self._seen = self._seen, None
        if seen is not None and seen != checksum(self._weight):
            self.owner.refuse_shared(
                f"changing {self.name} through .data, .detach() or the like, which every process has done again"
            )

    def forget(self) -> None:
        """What is there now is what shall be there."""
        self._seen, self._touched = None, False

    @property
    def is_held(self) -> bool:
        """Whether somebody keeps a tensor that shares the parameter's memory."""
        self._aliases = [alias for alias in self._aliases if alias() is not None]
        return bool(self._aliases) or self._lent_out

    def _give_away(self, copy: Tensor) -> None:
        """Lets those who keep the parameter's memory have a copy of it: the parameter gets another, as they see it."""
        for reference in self._aliases:
            alias = reference()
            if alias is not None:
                offset = (alias.data_ptr() - self._weight.data_ptr()) // copy.element_size()
                alias.data = copy.as_strided(alias.shape, alias.stride(), copy.storage_offset() + offset)
        self._aliases.clear()

    def check_requires_grad(self, wanted: bool) -> None:
        """`parameter.requires_grad = wanted`.

        Raises:
            UnsupportedError: it was frozen when the engine was made, which keeps no master and no state of it.
        """
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
        total = self.owner.gradient(self.name)  # whose backward pass takes what is here
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
        self.owner.drop(self.name)
        if value is not None:
            self.owner.materialize(self.name)  # behind a pending update, which takes away what is there
        if not self.owner.is_updating(self.name):
            self._put_grad(value)

    def _own_grad(self) -> Tensor | None:
        if self.owner.is_updating(self.name):
            return None
        with ungated():
            return self._parameter.grad

    def _put_grad(self, value: Tensor | None) -> None:
        with ungated():
            self._parameter.grad = value

    def check_memory(self) -> None:
        """Raises ModelError if the parameter has been given other memory. To be called ungated."""
        if self._parameter.data_ptr() == self._weight.data_ptr():
            return
        raise ModelError(
            f"{self.name} has been given other memory behind its engine's back (torch.utils.swap_tensors, or a library "
            "that assigns storages): copy values into it instead, or initialize again."
        )

    def settle(self, between_steps: bool = True) -> None:
        """What was written into the parameter by hand reaches its master.

        Raises:
            CallChangedError: it was changed unseen while micro-batches wait.
        """
        # The master has to follow what is written into a tensor that somebody keeps of it. No version tells of all of that
        # (not of `kept.data`, nor of another library's views), so that values are compared: once a step, since parameters
        # are written between steps.
        kept = self._apart is not None and self.is_held
        self.is_settled = not kept
        if self._handed_out is not None:
            self._check_handed_out()
        if self._seen is not None:
            self.check_unwritten()
        if self._touched or (kept and between_steps):
            self._touched = False
            if self._apart is not None and not self.owner.is_shared():
                self.owner.finish()  # the master, too, may be newer on the device
                self.take_over()

    def _check_handed_out(self) -> None:
        """Raises CallChangedError if the parameter was changed unseen while micro-batches wait."""
        before, self._handed_out = self._handed_out, None
        if before is not None and self.owner.has_queued() and not torch.equal(before, self._weight):
            raise CallChangedError(
                f"{self.name} was changed through .data, .detach() or the like while micro-batches wait that were "
                "called before. Change the parameter itself (with torch.no_grad(): parameter.copy_(value)), which lets "
                "them run first, or change it behind engine.step()."
            )

    # ---- masters, state and gradients, under DeepSpeed's names

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor | None:
        """A copy of the fp32 master, or of the optimizer state of that name; None if the parameter is not trained.

        Raises:
            ValueError: there is no such state (yet).
        """
        self.owner.finish()
        if self._master is None:
            return None
        if not self.owner.has_queued():
            self.settle()
        source = self._master if optim_state_key is None else self._state(optim_state_key)
        return source.detach().float().clone()

    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Replaces the master (and the weight with it), or the optimizer state of that name."""
        self.owner.refuse_shared(f"replacing the master or the optimizer state of {self.name}")
        self.owner.finish()
        if self._master is None:
            return
        with torch.no_grad():
            if optim_state_key is not None:
                self._state(optim_state_key).copy_(value)
                return
            self._master.copy_(value)
            if self._apart is not None:
                self._weight.copy_(self._master)

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
        self.check_unwritten()
        master = self._apart
        if master is None or self.owner.is_shared():
            return
        with torch.no_grad():
            changed = self._weight != master.to(self._weight.dtype)
            if changed.any():
                master.copy_(torch.where(changed, self._weight.to(master.dtype), master))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return torch._C._has_storage(a) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def link_of(parameter: object) -> ParameterLink | None:
    """The link of a parameter that an engine trains or holds."""
    link = parameter.__dict__.get("_hp_mapping") if isinstance(parameter, Tensor) else None
    return link if isinstance(link, ParameterLink) else None


def links_of(parameters: Iterable[object]) -> list[ParameterLink]:
    """The links of those of `parameters` that have one, whose engines have made every value on the host true."""
    links = [link for parameter in parameters if (link := link_of(parameter)) is not None]
    for owner in {link.owner for link in links}:
        owner.finish()
    return links


def take_over(parameters: Iterable[object]) -> None:
    """Makes the masters of `parameters` follow them, where they were changed by hand."""
    for link in links_of(parameters):
        link.take_over()
