"""Build the optimizer from the ds_config's block, or adapt the one that the user handed to `initialize`.

Either way, the masters are in its parameter groups in place of the model's parameters.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from harmony_ds.config import Config, Section
from harmony_ds.config.hints import check_params, nearest
from harmony_ds.config.optimizers import named
from harmony_ds.errors import ConfigError, OptimizerError
from harmony_ds.offload.native import make_native, native_of
from harmony_ds.optim.device_optimizer import torch_equivalent
from harmony_ds.optim.muon import MUON, make_muon, split_groups
from harmony_ds.optim.optimizer_chain import parts_of

ParameterGroups = Iterable[Any]
_HOOKS = tuple(
    f"_optimizer_{of}_{when}_hooks" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)
ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def parameters_in(groups: Iterable[Any]) -> Iterator[nn.Parameter]:
    """Yield the parameters in an optimizer's argument: parameters, pairs of `named_parameters()`, or groups of either."""
    for entry in groups:
        if isinstance(entry, dict):
            held = entry["params"]
            yield from parameters_in([held] if isinstance(held, torch.Tensor) else held)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


@dataclass(frozen=True, slots=True, eq=False)
class _Adopted:
    """What an optimizer of the program's has had before masters came in the place of its parameters.

    Attributes:
        groups: the parameters of each group, and their names if the optimizer has such.
        frozen_state: the state of frozen parameters.
    """

    optimizer: torch.optim.Optimizer
    groups: list[tuple[list[nn.Parameter], list[str] | None]]
    frozen_state: dict[Any, Any]


class Masters:
    """The masters of a model's parameters, to be put in the place of the parameters in an optimizer."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]) -> None:
        self._master_of = {id(p): masters.get(name) for name, p in parameters.items()}
        self._adopted: list[_Adopted] = []

    def groups(self, given: ParameterGroups) -> list[dict[str, Any]]:
        """Return parameter groups of masters, without frozen parameters; OptimizerError: one is not the model's."""
        entries = list(given)
        dicts: list[dict[str, Any]] = [dict(e) for e in entries if isinstance(e, dict)]
        if not dicts:
            dicts = [{"params": entries}]
        groups = [{**group, "params": self._masters(group["params"])} for group in dicts]
        return [group for group in groups if group["params"]]

    def _masters(self, parameters: Any) -> list[nn.Parameter]:
        masters: list[nn.Parameter] = []
        for parameter in parameters_in([{"params": parameters}]):
            if id(parameter) not in self._master_of:
                raise OptimizerError(
                    f"a parameter of shape {tuple(parameter.shape)} given to the optimizer is not one of the model's. If "
                    "it is of a model that only the loss calls (the guide of GISTEmbedLoss), freeze that: "
                    "guide.requires_grad_(False)."
                )
            master = self._master_of[id(parameter)]
            if master is not None and not any(master is known for known in masters):
                masters.append(master)
        return masters

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace parameters by masters in the groups and the state of the user's optimizer, without frozen ones."""
        groups = [(list(group["params"]), group.get("param_names")) for group in optimizer.param_groups]
        frozen = [key for key in optimizer.state if id(key) in self._master_of and self._master_of[id(key)] is None]
        frozen_state = {key: optimizer.state.pop(key) for key in frozen}
        self._adopted.append(_Adopted(optimizer, groups, frozen_state))
        for group in optimizer.param_groups:
            if "param_names" in group:
                pairs = zip(group["params"], group["param_names"], strict=True)
                group["param_names"] = [name for p, name in pairs if self._master_of.get(id(p)) is not None]
            group["params"] = self._masters(group["params"])
        for key in list(optimizer.state):
            master = self._master_of.get(id(key)) if isinstance(key, torch.Tensor) else None
            if master is not None and master is not key:
                optimizer.state[master] = optimizer.state.pop(key)

    def give_back_frozen(self) -> None:
        """Put frozen parameters, and their state, into the optimizers again that have had them: they may be trained later.

        The masters have been replaced by the model's own parameters.
        """
        for adopted in self._adopted:
            groups = adopted.optimizer.param_groups
            for group, (parameters, names) in zip(groups, adopted.groups, strict=False):  # the program may add groups
                known = set(map(id, parameters))
                group["params"] = parameters + [one for one in group["params"] if id(one) not in known]
                if names is not None:
                    group["param_names"] = names
            adopted.optimizer.state.update(adopted.frozen_state)
        self._adopted.clear()


def build_optimizer(
    section: Section | None, client: ClientOptimizer | None, given: ParameterGroups, masters: Masters
) -> torch.optim.Optimizer | None:
    """Return the optimizer over masters; None if neither the user nor the ds_config names one.

    Raises:
        ConfigError: the ds_config names an unknown one, or options that it does not take.
        OptimizerError: it has to be compiled and cannot be.
    """
    if client is not None:
        optimizer = client if isinstance(client, torch.optim.Optimizer) else client(given)
        for part in parts_of(optimizer):
            for hooks in _HOOKS:  # a wrapper around another one may not have called `Optimizer.__init__`
                part.__dict__.setdefault(hooks, OrderedDict())
            masters.adopt(part)
        return optimizer
    if section is None:
        return None
    if section.type.lower() == MUON:
        given = split_groups(section.params, given)
    groups = masters.groups(given)
    if not groups:
        raise OptimizerError("no parameter of the model requires a gradient: there is nothing to optimize.")
    try:
        return _by_name(section, groups)
    except TypeError as error:
        raise ConfigError(f'optimizer "{section.type}" does not take these params: {error}') from None


def with_state_dtype(config: Config) -> Section | None:
    """Return the ds_config's optimizer block, with the state's dtype that "bf16_optimizer_states" asks for."""
    section = config.optimizer
    row = None if section is None else named(section.type)
    if section is None or row is None or row.native is None or config.state_dtype == torch.float32:
        return section
    return replace(section, params={**section.params, "fp32_optimizer_states": False})


def check_dtypes(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Raise OptimizerError if `optimizer` does not keep masters and state in the dtypes that the ds_config asks for."""
    name, key = type(optimizer).__name__, "bf16.bf16_master_weights_and_grads"
    on_meta = all(p.is_meta for group in optimizer.param_groups for p in group["params"])
    if on_meta or not config.values[key]:
        return
    if native_of(optimizer) is None:
        raise OptimizerError(
            f"{key} needs an optimizer of DeepSpeed's for the host (Adam, AdamW, Adagrad or Lion in the ds_config, without "
            f'"torch_adam"), as in DeepSpeed; this is {name}.'
        )
    wide = bool(getattr(optimizer, "fp32_optimizer_states", False))
    if wide != (config.state_dtype == torch.float32):
        raise OptimizerError(
            f"bf16.bf16_optimizer_states is {json.dumps(config.state_dtype != torch.float32)}, and {name} was made with "
            f"fp32_optimizer_states={wide}: let both say the same."
        )


def _by_name(section: Section, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if section.type.lower() == MUON:
        return make_muon(groups, section.params, partial(_make_auxiliary_adam, section))
    row = named(section.type)
    if row is not None and row.native is not None:
        if groups[0]["params"][0].is_meta:  # compiled code cannot step meta tensors
            return torch_equivalent(row, groups)
        if row.native.cls == "DeepSpeedCPUAdam":
            return make_adam(section, groups)
        return make_native(row.native.cls, groups, _with_tuple_betas(section.params))
    torchs: dict[str, type[torch.optim.Optimizer]] = {}  # by the class's name in lower case
    for known in vars(torch.optim).values():
        if isinstance(known, type) and issubclass(known, torch.optim.Optimizer):
            torchs[known.__name__.lower()] = known
    cls = torchs.get(section.type.lower())
    if cls is None:
        near = nearest(
            section.type, ["Adam", "AdamW", "Adagrad", "Lion", *(known.__name__ for known in torchs.values())]
        )
        raise ConfigError(
            f"{section.type} is not a supported DeepSpeed Optimizer{f', did you mean {near}?' if near else ':'} Name Adam, "
            "AdamW, Adagrad, Lion or one of torch.optim in the ds_config, or hand an optimizer object to initialize."
        )
    check_params("optimizer.params", cls, section.params)
    optimizer: torch.optim.Optimizer = cls(groups, **section.params)
    return optimizer


def _make_auxiliary_adam(section: Section, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the Adam of the parameters that are not Muon's; their groups have its rates."""
    names = ("adam_w_mode", "torch_adam", "fp32_optimizer_states")
    options = {name: section.params[name] for name in names if name in section.params}
    on_meta = groups[0]["params"][0].is_meta  # compiled code cannot step meta tensors
    return make_adam(Section("Adam", options), groups, torchs=on_meta)


def make_adam(section: Section, parameters: ParameterGroups, torchs: bool = False) -> torch.optim.Optimizer:
    """Return DeepSpeed's CPU Adam; or torch's fused Adam, if the caller (`torchs`) or "torch_adam" asks for it."""
    options = _with_tuple_betas(section.params)
    torchs = options.pop("torch_adam", False) or torchs
    decoupled = decoupled_decay(section)
    options.pop("adam_w_mode", None)
    if not torchs:
        return make_native("DeepSpeedCPUAdam", parameters, {**options, "adamw_mode": decoupled})
    # torch's fused kernel is as fast as its others, and takes no memory for lists of tensors.
    for name in ("bias_correction", "fp32_optimizer_states", "foreach"):
        options.pop(name, None)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    check_params("optimizer.params", cls, options)
    return cls(parameters, fused=True, **options)


def decoupled_decay(section: Section) -> bool:
    """Return whether the block asks for AdamW's weight decay, as DeepSpeed reads it."""
    return bool(section.params.get("adam_w_mode", True)) or section.type.lower() == "adamw"


def _with_tuple_betas(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "betas": tuple(options["betas"])} if "betas" in options else dict(options)
