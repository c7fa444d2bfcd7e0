"""What a model's parameters know of their engine: masters, optimizer state, and what changing them by hand entails.

Each parameter carries a `ParameterLink` under the names that DeepSpeed's helpers look for (`_hp_mapping`,
`get_full_hp_param`, ...), so that `deepspeed.utils.safe_get_full_fp32_param` and its like work as ours do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.host_store import HostStore
from harmony_ds.runtime.plain_copies import Added, copy_all, leave_out_added

_ATTRIBUTES = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")


class Gradients:
    """What an engine lets its parameters' links do; this one, that of no engine, has nothing."""

    scale = 1.0

    def finish(self) -> None:
        """Makes every weight, master and state on the host true."""

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name`, itself, times `scale`."""
        return None

    def changed(self, name: str) -> None:
        """The gradient of `name` has been replaced."""


class ParameterLinks(Added):
    """Gives every parameter of a model its link, and takes them back."""

    def __init__(
        self, model: nn.Module, store: HostStore, optimizer: HostOptimizer | None, gradients: Gradients
    ) -> None:
        self._model = model
        self._parameters = store.parameters
        leave_out_added(model)
        for name, parameter in store.parameters.items():
            trained = optimizer is not None and optimizer.trains(name)
            link = ParameterLink(name, parameter, store.masters[name] if trained else None, optimizer, gradients)
            parameter.__dict__["_hp_mapping"] = link
            for attribute in _ATTRIBUTES:
                parameter.__dict__[attribute] = getattr(link, attribute)
            leave_out_added(parameter)
        self._hook = model.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, module: nn.Module, keys: object) -> None:
        self.take_over()

    def take_over(self) -> None:
        """Makes masters follow what was written into the parameters."""
        take_over(self._parameters.values())

    def remove(self) -> None:
        """Leaves the parameters as plain ones."""
        self._hook.remove()
        copy_all(self._model)
        for parameter in self._parameters.values():
            copy_all(parameter)
            for attribute in ("_hp_mapping", *_ATTRIBUTES):
                parameter.__dict__.pop(attribute, None)


class ParameterLink(Added):
    """One parameter, its master and its state. Copies and pickles of it are empty."""

    def __init__(
        self,
        name: str = "",
        parameter: nn.Parameter | None = None,
        master: nn.Parameter | None = None,
        optimizer: HostOptimizer | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self._name = name
        self._parameter = parameter
        self._master = master
        self._optimizer = optimizer
        self._gradients = gradients or Gradients()

    @property
    def engine(self) -> Gradients:
        """Whose parameter it is."""
        return self._gradients

    def finish(self) -> None:
        """Makes every weight, master and state on the host true."""
        self._gradients.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterLink, ()

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
            if self._parameter is not self._master and self._parameter is not None:
                self._parameter.copy_(self._master)

    def _state(self, key: str) -> Tensor:
        assert self._optimizer is not None and self._master is not None
        state = self._optimizer.optimizer.state
        found = state[self._master].get(key) if self._master in state else None
        if not isinstance(found, Tensor) or found.shape != self._master.shape:
            raise ValueError(f"{key} not found in optimizer state fragment")
        return found

    def get_full_hp_grad(self) -> Tensor | None:
        """A copy of the gradient, in fp32, unscaled and not clipped; None if the parameter has none.

        Raises:
            UsageError, UnsupportedError: gradients are not there now.
        """
        found = None if self._master is None else self._gradients.gradient(self._name)
        return None if found is None else found.detach().to("cpu", torch.float32).clone() / self._gradients.scale

    def set_full_hp_grad(self, value: Tensor) -> None:
        """Replaces the gradient. Raises as `get_full_hp_grad`."""
        found = None if self._master is None else self._gradients.gradient(self._name)
        if found is not None:
            with torch.no_grad():
                found.copy_(value * self._gradients.scale)
            self._gradients.changed(self._name)

    def take_over(self) -> None:
        """Makes the master follow the parameter, if that was changed by hand."""
        if self._master is None or self._parameter is None or self._parameter is self._master:
            return
        with torch.no_grad():
            if not torch.equal(self._parameter, self._master.to(self._parameter.dtype)):
                self._master.copy_(self._parameter)


def link_of(parameter: object) -> ParameterLink | None:
    """The link of a parameter that an engine trains or holds."""
    link = getattr(parameter, "_hp_mapping", None)
    return link if isinstance(link, ParameterLink) else None


def take_over(parameters: Iterable[object]) -> None:
    """Makes the masters of `parameters` follow them, where they were changed by hand."""
    links = [link for parameter in parameters if (link := link_of(parameter)) is not None]
    for gradients in {link.engine for link in links}:
        gradients.finish()
    for link in links:
        link.take_over()
