"""One parameter, its master and its state: what reading and writing it means while an engine has it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.errors import CallChangedError, ModelError, UnsupportedError
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.host_store import ungated
from harmony_ds.offload.piece_optimizer import checksum


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

    @property
    def is_shared(self) -> bool:
        """Whether several processes have one copy of weights, masters and state."""
        return False

    def refuse_shared(self, what: str) -> None:
        """Raises UnsupportedError for `what` if so."""


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
        self._seen: int | None = None  # where memory is shared: a checksum of what somebody may have written into
        self._lent_out = False  # where memory is shared: somebody has its address
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
            self._owner.refuse_shared(f"changing {self.name} by hand, which every process would do again")
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
            self.watch()

    def note_address(self) -> None:
        """Somebody may write into the parameter's memory from now on, for as long as he likes."""
        self._lent_out = self._owner.is_shared
        self.watch()

    def watch(self) -> None:
        """Where memory is shared: what is written into the parameter from now on is noticed."""
        if self._owner.is_shared and self._seen is None and self.weight is not None:
            self._seen = checksum(self.weight)

    def check_unwritten(self) -> None:
        """Raises UnsupportedError if several processes have the parameter, and it was written into."""
        seen, self._seen = self._seen, None
        if seen is not None and self.weight is not None and seen != checksum(self.weight):
            self._owner.refuse_shared(
                f"changing {self.name} through .data, .detach() or the like, which every process has done again"
            )

    def forget(self) -> None:
        """What is there now is what shall be there."""
        self._seen, self._touched = None, False

    @property
    def is_held(self) -> bool:
        """Whether somebody keeps a tensor that shares the parameter's memory."""
        self._aliases = self._alive()
        return bool(self._aliases) or self._lent_out

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
        return self._touched or self._handed_out is not None or self._seen is not None

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
        self.check_unwritten()
        if self._touched:
            self._touched = False
            if not self._owner.is_shared and self._master is not None and self._master is not self._parameter:
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
        self._owner.refuse_shared(f"replacing the master or the optimizer state of {self.name}")
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
        self.check_unwritten()
        if self._owner.is_shared or self._master is None or self.weight is None or self._parameter is self._master:
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
