"""Checks of a ds_config against processes, devices, optimizer and host memory, before an engine takes anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harmony_ds.config import Config
from harmony_ds.config.harmony import ResidentPacks
from harmony_ds.config.optimizers import state_numbers
from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import LayerGraph, slab_bytes
from harmony_ds.device import Device
from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import ConfigError, OptimizerError, UnsupportedError
from harmony_ds.offload.disk import disk_bytes
from harmony_ds.offload.disk_weights import HOST_BYTES
from harmony_ds.offload.host_memory import HostNeed, MappedFiles, check_host_memory
from harmony_ds.offload.host_store import HostStore
from harmony_ds.optim.device_optimizer import DeviceOptimizer
from harmony_ds.optim.optimizers import ClientOptimizer, parameters_in
from harmony_ds.scheduler.host_room import cast_bytes
from harmony_ds.scheduler.plan import Plan

_ON_DISK = ("adam", "adamw", "adagrad", "lion", "sgd")
"""Optimizers of which it is known how much state they keep."""
_SWAPPED = ("auto", "kept", "off", 0)
"""Values of `harmony.residency` with which no pack is updated on the device."""


def read_plan(path: str | None) -> Plan | None:
    """Return the plan in the file `harmony.plan`.

    Raises:
        ConfigError: the file holds none.
    """
    if path is None:
        return None
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"harmony.plan cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"harmony.plan: {path} is no plan of this version of harmony_ds ({error!r}).") from error


def check_processes(config: Config, world: SingleProcess) -> None:
    """Raise UnsupportedError for settings that several processes cannot run."""
    if config.harmony.residency not in _SWAPPED:
        world.refuse("harmony.residency: packs that stay on the device and are updated there")
    harmony = config.harmony
    for what, is_asked in (('reduce "host"', harmony.reduce == "host"), ("split_masters", harmony.split_masters)):
        if is_asked and world.servers > 1:
            raise UnsupportedError(
                f"harmony.{what}: the {world.servers} servers of this training share no memory; leave it out."
            )
    if config.values["gradient_allreduce_op"] == "sum":
        world.refuse('gradient_allreduce_op "sum"')


def check_devices(config: Config, device: Device, saved: Plan | None) -> None:
    """Raise UnsupportedError for settings that several devices of one process cannot run."""
    if device.count == 1:
        return
    if config.harmony.residency not in _SWAPPED:
        raise UnsupportedError(
            f"harmony.residency is {config.harmony.residency}, and {device.count} devices run one plan (harmony.devices): "
            'none of their packs stays from step to step. Set it to "auto", "kept" or "off".'
        )
    if saved is not None and (saved.policy.resident or len(saved.packing.covering) > len(saved.packing.backward)):
        raise UnsupportedError(
            f"harmony.plan was made for one device: packs of it stay there, or the passes are cut differently, and "
            f"{device.count} devices (harmony.devices) do neither. Plan again."
        )


def residency_for(
    config: Config, device: Device, optimizer: DeviceOptimizer | None, world: SingleProcess
) -> ResidentPacks:
    """Return the search's use of spare device memory in this run: "auto", "kept", "off", or a number of packs."""
    settings = config.harmony
    if settings.residency != "auto":
        return settings.residency
    # Packs that were given are run as they are; a device without a budget has no memory that could be spare.
    if settings.pack_layers is not None or settings.plan is not None or device.budget_bytes is None:
        return "off"
    # Each of several processes updates pieces of a pack: none could update it on its device.
    able = world.size == device.count == 1 and optimizer is not None and optimizer.refusal is None
    return "auto" if able else "kept"


def with_update_bytes(graph: LayerGraph, store: HostStore, optimizer: DeviceOptimizer | None) -> LayerGraph:
    """Return the graph with the bytes that each parameter takes on the device when it is updated there.

    Raises:
        OptimizerError: it cannot be updated there.
    """
    if optimizer is None:
        return graph
    if optimizer.refusal is not None:
        raise OptimizerError(f'harmony.residency needs updates on the device: {optimizer.refusal}. Set it to "off".')
    specs = []
    for spec in graph.parameters:
        if spec.trainable and optimizer.trains(spec.name):
            master = 0 if store.compute_copy(spec.name) is None else slab_bytes(spec.numel, 4)
            spec = replace(  # noqa: PLW2901
                spec,
                state_bytes=master + optimizer.state_bytes(spec.name, spec.numel),
                update_bytes=optimizer.working_bytes(spec.name, spec.numel),
            )
        specs.append(spec)
    return replace(graph, parameters=tuple(specs))


def check_host_room(need: HostNeed, world: SingleProcess) -> None:
    """Raise HostMemoryError if a server has too little: checked once for all of its processes, before any takes some."""
    if world.is_local_first:
        check_host_memory(replace(need, there_bytes=world.local_size * need.there_bytes))
    world.agree("the host has room")


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """An optimizer before its engine makes it or takes it over.

    Attributes:
        name: its class or type; None: there is none.
        numbers: that it keeps for each number of a parameter; None: not known.
        elements: of each parameter that it steps.
        has_state: whether the program has made some before.
    """

    name: str | None
    numbers: int | None
    elements: tuple[int, ...]
    has_state: bool = False

    @classmethod
    def of(cls, config: Config, client: ClientOptimizer | None, given: list[Any]) -> PlannedOptimizer:
        """Describe the user's, or else the ds_config's over `given`, parameters or groups of them."""
        name, options = (None, {}) if config.optimizer is None else (config.optimizer.type, config.optimizer.params)
        if isinstance(client, torch.optim.Optimizer):
            given, name = client.param_groups, type(client).__name__
            options = {key: True for group in given for key, value in group.items() if value and key != "params"}
        elif client is not None:
            name, options = "an optimizer that a function makes", {}
        numbers = None if name is None else state_numbers(name, options)
        if numbers is not None:
            numbers += bool(options.get("amsgrad"))
        elements = {id(p): p.numel() for p in parameters_in(given) if p.requires_grad}
        return cls(name, numbers, tuple(elements.values()), bool(getattr(client, "state", None)))


def host_need(
    decomposition: Decomposition, model: nn.Module, config: Config, optimizer: PlannedOptimizer, device: Device
) -> HostNeed:
    """Return the host memory that is needed whatever the plan: without the stash, and gradients at their least."""
    accumulation = config.accumulation_dtype
    parameters = dict(model.named_parameters())
    trainable = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
    weights = _slab_bytes(model, config)
    weights = min(weights, HOST_BYTES) if config.weights_folder else weights
    gradients = 0
    if optimizer.name is not None:
        layers = [sum(trainable.get(name, 0) for name in layer.parameters) for layer in decomposition.layers]
        count = sum(trainable.values()) if config.deferred_update else max(layers, default=0)
        gradients = accumulation.itemsize * count
    casts = cast_bytes(optimizer.elements, accumulation.itemsize, config.master_dtype.itemsize)
    numbers = 0 if optimizer.has_state else optimizer.numbers or 0
    state_bytes = config.state_dtype.itemsize * numbers * sum(optimizer.elements)
    mapped = MappedFiles()
    there = (p for p in parameters.values() if not mapped.holds(p))
    by_kind = {
        "weights": weights,
        "masters": config.master_bytes * sum(trainable.values()),
        "optimizer": 0 if config.disk_folder is not None else state_bytes,
        "gradients": gradients,
        "casts": casts,
    }
    return HostNeed(
        by_kind,
        there_bytes=sum(p.numel() * p.element_size() for p in there),
        page_locked_bytes=weights + gradients if device.pins_host else 0,
    )


def _slab_bytes(model: nn.Module, config: Config) -> int:
    return sum(slab_bytes(p.numel(), config.compute_dtype.itemsize) for p in model.parameters())


def weights_disk_need(decomposition: Decomposition, model: nn.Module, config: Config) -> int:
    """Return the bytes of the file for weights, in which every slab begins at a page."""
    return _slab_bytes(model, config) + (len(decomposition.layers) + 1) * disk_bytes(1, 1)


def disk_need(config: Config, model: nn.Module, optimizer: PlannedOptimizer) -> int:
    """Return the bytes of the file for masters and optimizer state; 0: nothing is kept on a disk.

    Raises:
        ConfigError: it is not known how much state the optimizer keeps.
    """
    if config.disk_folder is None or optimizer.name is None:
        return 0
    numbers, known = optimizer.numbers, optimizer.name.lower().removeprefix("deepspeedcpu") in _ON_DISK
    if numbers is None or not known:
        raise ConfigError(
            'zero_optimization.offload_optimizer.device is "nvme", and the state that '
            f'{optimizer.name} keeps for a parameter is not known. Use Adam, AdamW, Adagrad, Lion or SGD, or "cpu".'
        )
    trained = [p.numel() for p in model.parameters() if p.requires_grad and config.compute_dtype.itemsize < 4]
    masters = sum(disk_bytes(numel, 4) for numel in trained)
    return masters + numbers * sum(disk_bytes(numel, config.state_dtype.itemsize) for numel in optimizer.elements)
