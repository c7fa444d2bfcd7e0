"""Bytes that a training will need, before anything is made: host memory, files, and device memory for updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from harmony_ds.config import Config, Section
from harmony_ds.config.optimizers import state_bytes, state_numbers
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph, ParameterSpec, slab_bytes
from harmony_ds.errors import ConfigError, OptimizerError
from harmony_ds.offload.disk import disk_bytes
from harmony_ds.offload.disk_weights import HOST_BYTES
from harmony_ds.offload.host_memory import HostNeed, MappedFiles
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.packed import Packed
from harmony_ds.optim.device_optimizer import DeviceOptimizer
from harmony_ds.optim.host_optimizer import kind_of
from harmony_ds.optim.optimizers import ClientOptimizer, parameters_in
from harmony_ds.scheduler.host_room import cast_bytes

_KNOWN_STATE = ("adam", "adamw", "adagrad", "lion", "sgd")
"""Optimizers of which it is known how much state they keep, so that a file for it can be made."""


# ---- the optimizer


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """An optimizer before it is made, or before the engine takes it from the program.

    Attributes:
        name: its class or type; None: there is none.
        states: the numbers that it keeps for each number of a parameter; None: not known.
        elements: the numbers in each parameter that it steps.
        has_state: whether the program has stepped it before, so that its state is in memory already.
    """

    name: str | None
    states: int | None
    elements: tuple[int, ...]
    has_state: bool = False

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of its state, in `dtype` unless its class quantizes it; 0 if that is not known."""
        if self.name is None or self.states is None:
            return 0
        return int(state_bytes(self.name, dtype.itemsize) * self.states * sum(self.elements))


def describe_optimizer(
    section: Section | None, client: ClientOptimizer | None, trained: Iterable[Any]
) -> PlannedOptimizer:
    """Describe the program's optimizer, or else the one of the ds_config's `section` over the parameters `trained`."""
    name: str | None
    options: dict[str, Any]
    if isinstance(client, torch.optim.Optimizer):
        trained, name, options = client.param_groups, kind_of(client), {}
        for group in client.param_groups:
            options.update({key: True for key, value in group.items() if value and key != "params"})
    elif client is not None:
        name, options = "an optimizer that a function makes", {}
    elif section is not None:
        name, options = section.type, section.params
    else:
        name, options = None, {}
    states = None if name is None else state_numbers(name, options)
    if states is not None and options.get("amsgrad"):
        states += 1
    elements = {id(p): p.numel() for p in parameters_in(trained) if p.requires_grad}
    has_state = bool(getattr(client, "state", None))
    return PlannedOptimizer(name, states, tuple(elements.values()), has_state)


# ---- host memory


def host_memory_need(
    model: nn.Module,
    decomposition: Decomposition,
    packed: Mapping[str, Packed],
    config: Config,
    optimizer: PlannedOptimizer,
    *,
    page_locks: bool,
) -> HostNeed:
    """Return the host memory that is needed whatever the plan: without the stash, and gradients at their least.

    Args:
        page_locks: whether weights and gradients are in memory that cannot be swapped out.
    """
    parameters = dict(model.named_parameters())
    trainable = {name: parameter.numel() for name, parameter in parameters.items() if parameter.requires_grad}

    weights = _slab_bytes(model, packed, config.compute_dtype.itemsize)
    if config.weights_folder is not None:
        weights = min(weights, HOST_BYTES)

    gradients = 0
    if optimizer.name is not None:
        if config.deferred_update:
            waiting = sum(trainable.values())
        else:
            layers = (sum(trainable.get(name, 0) for name in layer.parameters) for layer in decomposition.layers)
            waiting = max(layers, default=0)
        gradients = config.accumulation_dtype.itemsize * waiting

    states = 0
    if config.disk_folder is None and not optimizer.has_state:
        states = optimizer.state_bytes(config.state_dtype)

    mapped = MappedFiles()
    there_bytes = 0
    for one in packed.values():
        there_bytes += one.memory_bytes(mapped)
    for name, parameter in parameters.items():
        if name not in packed and not mapped.holds(parameter):
            there_bytes += parameter.numel() * parameter.element_size()
    return HostNeed(
        {
            "weights": weights,
            "masters": config.master_bytes * sum(trainable.values()),
            "optimizer": states,
            "gradients": gradients,
            "casts": cast_bytes(optimizer.elements, config.accumulation_dtype.itemsize, config.master_dtype.itemsize),
        },
        there_bytes=there_bytes,
        page_locked_bytes=weights + gradients if page_locks else 0,
    )


def _slab_bytes(model: nn.Module, packed: Mapping[str, Packed], weight_bytes: int) -> int:
    """Return the bytes of all slabs, with `weight_bytes` for a number that is not packed."""
    total = sum(one.nbytes for one in packed.values())
    for name, parameter in model.named_parameters():
        if name not in packed:
            total += slab_bytes(parameter.numel(), weight_bytes)
    return total


# ---- files


def weights_file_bytes(
    model: nn.Module, decomposition: Decomposition, packed: Mapping[str, Packed], weight_bytes: int
) -> int:
    """Return the bytes of the file for weights, in which every slab begins at a page."""
    slabs = len(decomposition.layers) + 1  # unlayered parameters have one, too
    return _slab_bytes(model, packed, weight_bytes) + slabs * disk_bytes(1, 1)


def optimizer_file_bytes(model: nn.Module, config: Config, optimizer: PlannedOptimizer) -> int:
    """Return the bytes of the file for masters and optimizer state; 0 without an optimizer.

    Raises:
        ConfigError: it is not known how much state the optimizer keeps.
    """
    if optimizer.name is None:
        return 0
    if optimizer.states is None or optimizer.name.lower().removeprefix("deepspeedcpu") not in _KNOWN_STATE:
        raise ConfigError(
            'zero_optimization.offload_optimizer.device is "nvme", and the state that '
            f'{optimizer.name} keeps for a parameter is not known. Use Adam, AdamW, Adagrad, Lion or SGD, or "cpu".'
        )
    masters = 0
    if config.compute_dtype.itemsize < 4:
        masters = sum(disk_bytes(p.numel(), 4) for p in model.parameters() if p.requires_grad)
    state = sum(disk_bytes(numel, config.state_dtype.itemsize) for numel in optimizer.elements)
    return masters + optimizer.states * state


# ---- device memory


def add_update_bytes(graph: LayerGraph, store: HostStore, optimizer: DeviceOptimizer) -> LayerGraph:
    """Return the graph with the bytes that each trained parameter takes on the device when it is updated there.

    Raises:
        OptimizerError: the optimizer cannot be stepped on the device.
    """
    if optimizer.refusal is not None:
        raise OptimizerError(f'harmony.residency needs updates on the device: {optimizer.refusal}. Set it to "off".')

    def with_bytes(spec: ParameterSpec) -> ParameterSpec:
        if not (spec.trainable and optimizer.trains(spec.name)):
            return spec
        has_own_master = store.compute_copy(spec.name) is not None
        master_bytes = slab_bytes(spec.numel, 4) if has_own_master else 0
        return replace(
            spec,
            state_bytes=master_bytes + optimizer.state_bytes(spec.name, spec.numel),
            update_bytes=optimizer.working_bytes(spec.name, spec.numel),
        )

    return replace(graph, parameters=tuple(with_bytes(spec) for spec in graph.parameters))
