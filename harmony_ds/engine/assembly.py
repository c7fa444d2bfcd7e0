"""Config and model to the parts of an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harmony_ds.calls.contract import Contract
from harmony_ds.calls.crossing import Crossings
from harmony_ds.calls.installed import Installation, belongs_to_engine
from harmony_ds.calls.intercept import Interception
from harmony_ds.calls.joined import Joins
from harmony_ds.calls.layer_call import LayerCalls
from harmony_ds.calls.random_streams import RandomStreams
from harmony_ds.config import Config
from harmony_ds.config.optimizers import state_numbers
from harmony_ds.decomposer.find import Decomposition, Layer, find_layers, layer_graph
from harmony_ds.decomposer.graph import LayerGraph, slab_bytes
from harmony_ds.device import Device, make_devices
from harmony_ds.engine.incoming import accept, fill_meta
from harmony_ds.errors import ConfigError, ModelError, OptimizerError, UnsupportedError
from harmony_ds.offload.cores import update_threads
from harmony_ds.offload.device_optimizer import DeviceOptimizer
from harmony_ds.offload.device_store import DeviceStore
from harmony_ds.offload.host_gradients import HostGradients
from harmony_ds.offload.host_limits import HostNeed, check_host_memory
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.optimizers import (
    ClientOptimizer,
    Masters,
    ParameterGroups,
    build_optimizer,
    check_dtypes,
    members,
    with_state_dtype,
)
from harmony_ds.offload.own_gradients import OwnGradients
from harmony_ds.offload.piece_optimizer import PieceOptimizer
from harmony_ds.offload.process_memory import MappedFiles
from harmony_ds.offload.residency import Residency
from harmony_ds.offload.stash import Stash
from harmony_ds.offload.updater import Updater
from harmony_ds.parallel import Alone, World
from harmony_ds.runtime.parts import Parts
from harmony_ds.runtime.timeline import StepTimeline
from harmony_ds.scheduler.plan import Plan
from harmony_ds.stepping.runner import Runner

_ALONE = Alone()


def _finish_updates(updater: Updater | None, device_store: DeviceStore) -> None:
    if updater is not None:
        updater.wait_all()
    device_store.show()
    device_store.finish_reads()


@dataclass(frozen=True, slots=True)
class Assembly:
    """What an engine is made of."""

    device: Device
    store: HostStore
    ledger: Ledger
    parts: Parts
    world: Alone
    runner: Runner
    interception: Interception
    layers: tuple[Layer, ...]
    optimizer: torch.optim.Optimizer | None
    host_optimizer: HostOptimizer | None

    def wait_for_updates(self) -> None:
        """Waits for what the background thread still has to do."""
        if self.parts.updater is not None:
            self.parts.updater.wait_all()

    def finish_updates(self) -> None:
        """Makes every weight, master and optimizer state on the host true, for somebody who may write into them."""
        _finish_updates(self.parts.updater, self.parts.device_store)

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory by kind."""
        gradients, optimizer = self.parts.gradients, self.host_optimizer
        return {
            **self.store.host_bytes(),
            "optimizer": 0 if optimizer is None else optimizer.state_bytes(),
            "gradients": 0 if gradients is None else gradients.host_bytes,
            "stash": self.parts.stash.host_bytes,
        }

    def destroy(self) -> None:
        """Finishes updates, ends the thread, gives the model its own forward and parameters back, frees memory.

        Raises:
            BaseException: an update's failure that nobody has seen yet, after all of that.
        """
        updater = self.parts.updater
        if updater is not None:
            updater.stop()
        self.runner.destroy()
        self.parts.device_store.destroy()
        if self.host_optimizer is not None:
            self.host_optimizer.unwatch()
            self.host_optimizer.give_back(self.store.parameters)
        self.interception.remove()
        self.parts.installation.remove()
        if self.parts.gradients is not None:
            self.parts.gradients.destroy()
        self.parts.stash.destroy()
        self.parts.joins.destroy()
        self.store.release()
        self.device.unlimit_process()
        self.world.leave()
        if updater is not None:
            updater.surface()


def assemble(
    model: nn.Module,
    config: Config,
    client_optimizer: ClientOptimizer | None,
    model_parameters: ParameterGroups | None,
    device: Device | None,
    world: Alone = _ALONE,
) -> Assembly:
    """Builds everything; afterwards `model`'s parameters lie in host slabs and its layers are intercepted."""
    if belongs_to_engine(model):
        raise ModelError("this model belongs to another engine: call that engine's destroy() first.")
    settings = config.harmony
    _check_parallel(config, world)
    saved = saved_plan(settings.plan)
    device = device or make_devices(settings.device, settings.devices, settings.budget_bytes, settings.pin_memory)
    _check_pipeline(config, device, saved)
    accept(model, device, config.compute_dtype)
    decomposition = find_layers(model, settings.layers)
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if device.host_type == "cpu":
        _check_room(host_need(decomposition, model, config, (client_optimizer, given), device), world)
        fill_meta(model)
    store = _to_slabs(model, decomposition, config, device, world)
    masters = Masters(store.parameters, store.masters)
    optimizer = build_optimizer(with_state_dtype(config), client_optimizer, given, masters)
    if optimizer is not None:
        check_dtypes(optimizer, config.master_dtype, config.state_dtype)
    host_optimizer = None if optimizer is None else _host_optimizer(optimizer, store, world)
    device_optimizer = None if host_optimizer is None else DeviceOptimizer(host_optimizer, device.steps_as)
    config = replace(config, harmony=replace(settings, residency=_residency(config, device, device_optimizer, world)))
    stays = config.harmony.residency not in ("off", "kept") or (saved is not None and bool(saved.policy.resident))
    graph = with_update_bytes(layer_graph(decomposition, store.parameters), store, device_optimizer if stays else None)
    # What follows starts a thread: whatever may be refused has been by now.
    memory = device, store, world
    parts, ledger = _parts(model, config, decomposition, memory, host_optimizer, device_optimizer)
    layers = decomposition.layers
    runner, interception = Runner(parts, decomposition, graph, config, saved), Interception(layers, model)
    device.limit_process()
    return Assembly(device, store, ledger, parts, world, runner, interception, layers, optimizer, host_optimizer)


def _check_room(need: HostNeed, world: Alone) -> None:
    """Raises HostMemoryError if a server has too little: asked once for all of its processes, before any takes some."""
    if world.leads:
        check_host_memory(replace(need, there_bytes=world.local_size * need.there_bytes))
    world.agree("the host has room")


def _check_parallel(config: Config, world: Alone) -> None:
    """Raises UnsupportedError for what several processes cannot do."""
    if config.harmony.micro_batch == "auto":
        world.refuse('harmony.micro_batch "auto"')
    if config.harmony.residency not in ("auto", "kept", "off", 0):
        world.refuse("harmony.residency: packs that stay on the device and are updated there")
    if config.harmony.reduce == "host" and world.servers > 1:
        raise UnsupportedError(
            f'harmony.reduce "host": the {world.servers} servers of this training share no memory; leave it out.'
        )
    if config.values["gradient_allreduce_op"] == "sum":
        world.refuse('gradient_allreduce_op "sum"')


def _check_pipeline(config: Config, device: Device, saved: Plan | None) -> None:
    """Raises UnsupportedError for what several devices of one process cannot do."""
    if device.count == 1:
        return
    if config.harmony.residency not in ("auto", "kept", "off", 0):
        raise UnsupportedError(
            f"harmony.residency is {config.harmony.residency}, and {device.count} devices run one plan (harmony.devices): "
            'none of their packs stays from step to step. Set it to "auto", "kept" or "off".'
        )
    if saved is not None and (saved.policy.resident or len(saved.packing.covering) > len(saved.packing.backward)):
        raise UnsupportedError(
            f"harmony.plan was made for one device: packs of it stay there, or the passes are cut differently, and "
            f"{device.count} devices (harmony.devices) do neither. Plan again."
        )


def _to_slabs(
    model: nn.Module, decomposition: Decomposition, config: Config, device: Device, world: Alone
) -> HostStore:
    store = HostStore(model, decomposition, config.compute_dtype, device, world, config.master_dtype)
    world.agree("weights are there")
    world.spread(store.memory())
    _share_buffers(model, world)
    return store


def _share_buffers(model: nn.Module, world: Alone) -> None:
    """All processes begin with the buffers of the first."""
    buffers = dict(model.named_buffers())
    first = world.first("buffers", lambda: buffers)
    if first is not buffers:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(first[name])


def _host_optimizer(optimizer: torch.optim.Optimizer, store: HostStore, world: Alone) -> HostOptimizer:
    apart = [name for name, master in store.masters.items() if master is not store.parameters[name]]
    if isinstance(world, World):
        return PieceOptimizer(optimizer, store.masters, world, apart)
    return HostOptimizer(optimizer, store.masters, apart)


def _parts(
    model: nn.Module,
    config: Config,
    decomposition: Decomposition,
    memory: tuple[Device, HostStore, Alone],
    host_optimizer: HostOptimizer | None,
    device_optimizer: DeviceOptimizer | None,
) -> tuple[Parts, Ledger]:
    device, store, world = memory
    ledger, timeline = Ledger(device), StepTimeline(device)
    residency = Residency(device, store, ledger, config.accumulation_dtype)
    device_store = DeviceStore(device, store, ledger, residency, device_optimizer)
    gradients: HostGradients | None = None
    updater: Updater | None = None
    if host_optimizer is not None:
        limit = None if config.deferred_update else config.harmony.gradient_slabs * device.count
        gradients = HostGradients(device, ledger, config.accumulation_dtype, limit, host_optimizer.trains, world)
        gradients.master_dtype = config.master_dtype
        threads = update_threads(world.local_size) if device.copies_overlap else None
        updater = Updater(store, host_optimizer, gradients, timeline.host_work, threads)
        host_optimizer.watch(partial(_finish_updates, updater, device_store))
    installation, stash = Installation(model, decomposition.canonical, device, ledger), Stash(device, ledger)
    crossings = Crossings(device, ledger)
    layer_calls = LayerCalls(decomposition.layers, installation, stash, crossings)
    parts = Parts(
        device=device,
        residency=residency,
        device_store=device_store,
        stash=stash,
        gradients=gradients,
        optimizer=host_optimizer,
        updater=updater,
        installation=installation,
        contract=Contract(model),
        crossings=crossings,
        layer_calls=layer_calls,
        joins=Joins(device, crossings, layer_calls.name_of, layer_calls.may_be_joined),
        random=RandomStreams(device),
        timeline=timeline,
        own=OwnGradients(store, updater),
        world=world,
        follow_masters=store.follow_masters,
    )
    return parts, ledger


def _residency(config: Config, device: Device, optimizer: DeviceOptimizer | None, world: Alone) -> str | int:
    """What the search may do in this run with spare device memory: "auto", "kept", "off", or so many packs."""
    settings = config.harmony
    if settings.residency != "auto":
        return settings.residency
    # Packs that were given are run as they are; a device without a budget has no memory that could be spare.
    if settings.pack_layers is not None or settings.plan is not None or device.budget_bytes is None:
        return "off"
    # Each of several processes updates pieces of a pack: none could update it on its device.
    able = world.size == device.count == 1 and optimizer is not None and optimizer.refusal is None
    return "auto" if able else "kept"


def saved_plan(path: str | None) -> Plan | None:
    """The plan that `harmony.plan` names.

    Raises:
        ConfigError: there is none in that file.
    """
    if path is None:
        return None
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"harmony.plan cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"harmony.plan: {path} is no plan of this version of harmony_ds ({error!r}).") from error


def with_update_bytes(graph: LayerGraph, store: HostStore, optimizer: DeviceOptimizer | None) -> LayerGraph:
    """The graph with what each parameter takes on the device when it is updated there.

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
            master = 0 if store.upload_copy(spec.name) is None else slab_bytes(spec.numel, 4)
            spec = replace(  # noqa: PLW2901
                spec,
                state_bytes=master + optimizer.state_bytes(spec.name, spec.numel),
                update_bytes=optimizer.working_bytes(spec.name, spec.numel),
            )
        specs.append(spec)
    return replace(graph, parameters=tuple(specs))


def host_need(
    decomposition: Decomposition,
    model: nn.Module,
    config: Config,
    optimizer: tuple[ClientOptimizer | None, list[Any]],
    device: Device,
) -> HostNeed:
    """Host memory as far as it is known before anything is planned: without the stash, and gradients at their least.

    Args:
        optimizer: the user's, and the parameters or groups that it is of otherwise.
    """
    dtype, accumulation = config.compute_dtype, config.accumulation_dtype
    parameters = dict(model.named_parameters())
    trainable = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
    weights = sum(slab_bytes(p.numel(), dtype.itemsize) for p in parameters.values())
    gradients = 0
    if optimizer[0] is not None or config.optimizer is not None:
        layers = [sum(trainable.get(name, 0) for name in layer.parameters) for layer in decomposition.layers]
        count = sum(trainable.values()) if config.deferred_update else max(layers, default=0)
        gradients = accumulation.itemsize * count
    mapped = MappedFiles()
    there = (p for p in parameters.values() if not p.is_meta and not mapped.holds(p))
    by_kind = {
        "weights": weights,
        "masters": 0 if dtype == config.master_dtype else 4 * sum(trainable.values()),
        "optimizer": _state_bytes(config, *optimizer),
        "gradients": gradients,
    }
    return HostNeed(
        by_kind,
        there_bytes=sum(p.numel() * p.element_size() for p in there),
        page_locked_bytes=weights + gradients if device.pins_host else 0,
    )


def _state_bytes(config: Config, client: ClientOptimizer | None, given: list[Any]) -> int:
    """Of the optimizer's state that is still to be made; 0 where nothing is known of it."""
    groups, numbers = given, None
    if isinstance(client, torch.optim.Optimizer):
        groups = client.param_groups
        numbers = 0 if client.state else state_numbers(type(client).__name__, client.defaults)
    elif client is None and config.optimizer is not None:
        numbers = state_numbers(config.optimizer.type, config.optimizer.params)
    elements = sum({id(p): p.numel() for p in members(groups) if p.requires_grad}.values())
    return config.state_dtype.itemsize * (numbers or 0) * elements
