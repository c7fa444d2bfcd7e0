"""The links of one model's parameters: given, and taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from harmony_ds.calls.plain_copies import Added, copy_all, leave_out_added
from harmony_ds.errors import UnsupportedError
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.host_store import HostStore, ungated
from harmony_ds.parameters.engine_parameter import ATTRIBUTES, EngineParameter
from harmony_ds.parameters.link import Owner, ParameterLink, take_over


class ParameterLinks(Added):
    """Gives every parameter of a model its link, and takes them back."""

    def __init__(self, model: nn.Module, store: HostStore, optimizer: HostOptimizer | None, owner: Owner) -> None:
        self._model = model
        self._parameters = store.parameters
        self._links: list[ParameterLink] = []
        leave_out_added(model)
        for name, parameter in store.parameters.items():
            link = ParameterLink(name, store, optimizer, owner)
            self._links.append(link)
            parameter.__dict__["_hp_mapping"] = link
            for attribute in ATTRIBUTES:
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

    def settle(self, between_steps: bool = True) -> None:
        """Before weights are used: what was written into them by hand reaches their masters."""
        for link in self._links:
            if not link.is_settled:
                link.settle(between_steps)

    def check_memory(self) -> None:
        """Before the first call of a step, and before what was called is run.

        Raises:
            ModelError: a parameter has been given other memory.
        """
        with ungated():
            for link in self._links:
                link.check_memory()

    def held(self) -> list[str]:
        """The parameters whose memory somebody keeps: `p.data`, a state dict, a view."""
        return [link.name for link in self._links if link.is_held]

    def watch(self, names: Iterable[str]) -> None:
        """Where memory is shared: what is written into `names` from now on is noticed."""
        wanted = set(names)
        for link in self._links:
            if link.name in wanted:
                link.watch()

    def forget(self) -> None:
        """What the parameters are now is what they shall be."""
        for link in self._links:
            link.forget()

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
            for attribute in ("_hp_mapping", *ATTRIBUTES):
                parameter.__dict__.pop(attribute, None)
