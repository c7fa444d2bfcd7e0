"""Making of everything that an engine needs, from a model and a ds_config: `assemble`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from harmony_ds.assembly import preflight
from harmony_ds.assembly.prepare_model import prepare_model
from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition, Room, find_layers, layer_graph
from harmony_ds.device import Device, make_devices
from harmony_ds.distributed import ALONE, SingleProcess, World
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.contract import Contract
from harmony_ds.model.crossing import Crossings
from harmony_ds.model.installed import Installation, belongs_to_engine
from harmony_ds.model.intercept import Interception
from harmony_ds.model.joined import Joins
from harmony_ds.model.layer_call import LayerCalls
from harmony_ds.model.random_streams import RandomStreams
from harmony_ds.offload.disk import DiskFile, DiskMasters
from harmony_ds.offload.disk_weights import DiskWeights
from harmony_ds.offload.host_gradients import HostGradients
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.residency import Residency
from harmony_ds.offload.split_masters import SplitMasters
from harmony_ds.offload.stash import Stash
from harmony_ds.optim.block_optimizer import BlockOptimizer, SharedMasters, SplitOptimizer
from harmony_ds.optim.cores import update_threads
from harmony_ds.optim.device_optimizer import DeviceOptimizer
from harmony_ds.optim.device_store import DeviceStore
from harmony_ds.optim.disk_optimizer import DiskOptimizer
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.optimizer_chain import HostOptimizerChain, OptimizerChain
from harmony_ds.optim.optimizers import (
    ClientOptimizer,
    Masters,
    ParameterGroups,
    build_optimizer,
    check_dtypes,
    with_state_dtype,
)
from harmony_ds.optim.updater import Updater
from harmony_ds.optim.user_gradients import UserGradients
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.timeline import StepTimeline
from harmony_ds.scheduler.host_room import cast_bytes
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.runner import Runner


def assemble(
    model: nn.Module,
    config: Config,
    client_optimizer: ClientOptimizer | None,
    model_parameters: ParameterGroups | None,
    device: Device | None,
    world: SingleProcess = ALONE,
) -> EngineState:
    """Build all parts; afterwards `model`'s parameters lie in host slabs and its layers are intercepted."""
    if belongs_to_engine(model):
        raise ModelError("this model belongs to another engine: call that engine's destroy() first.")
    settings = config.harmony
    preflight.check_processes(config, world)
    saved = preflight.read_plan(settings.plan)
    device = device or make_devices(settings.device, settings.devices, settings.budget_bytes, settings.pin_memory)
    preflight.check_devices(config, device, saved)
    prepare_model(model, device, config.compute_dtype)
    decomposition = find_layers(model, settings.layers, _room(config, device, world))
    given = list(model.parameters() if model_parameters is None else model_parameters)
    planned = preflight.PlannedOptimizer.of(config, client_optimizer, given)
    if device.host_type == "cpu":
        preflight.check_host_room(preflight.host_need(decomposition, model, config, planned, device), world)
    store = _to_slabs(model, decomposition, config, (device, world), planned)
    masters = Masters(store.parameters, store.masters)
    optimizer = build_optimizer(with_state_dtype(config), client_optimizer, given, masters)
    if optimizer is not None:
        check_dtypes(optimizer, config)
    host_optimizer = None if optimizer is None else _host_optimizer(optimizer, store, world)
    device_optimizer = None if host_optimizer is None else DeviceOptimizer(host_optimizer, device.optimizer_device)
    residency = preflight.residency_for(config, device, device_optimizer, world)
    config = replace(config, harmony=replace(settings, residency=residency))
    stays = config.harmony.residency not in ("off", "kept") or (saved is not None and bool(saved.policy.resident))
    graph = layer_graph(decomposition, store.parameters)
    graph = preflight.with_update_bytes(graph, store, device_optimizer if stays else None)
    # From here on a thread runs: all that may be refused has been checked.
    runtime, ledger = _make_runtime(
        model, config, decomposition, (device, store, world), host_optimizer, device_optimizer
    )
    layers = decomposition.layers
    runner, interception = Runner(runtime, decomposition, graph, config, saved), Interception(layers, model, device)
    device.limit_process()
    return EngineState(device, store, ledger, runtime, world, runner, interception, layers, optimizer, host_optimizer)


def _room(config: Config, device: Device, world: SingleProcess) -> Room | None:
    """Return the first process's room for layers, so that all find the same ones; None: no bound is known."""
    budget_bytes = world.first("the device's memory", lambda: device.budget_bytes)
    if budget_bytes is None:
        return None
    return Room(budget_bytes, config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)


def _to_slabs(
    model: nn.Module,
    decomposition: Decomposition,
    config: Config,
    where: tuple[Device, SingleProcess],
    planned: preflight.PlannedOptimizer,
) -> HostStore:
    device, world = where
    disk_bytes = preflight.disk_need(config, model, planned)
    masters: torch.dtype | SplitMasters | DiskMasters = config.master_dtype
    if config.harmony.split_masters:
        masters = SplitMasters(world)
    elif config.disk_folder is not None and disk_bytes:
        masters = DiskMasters(DiskFile(config.disk_folder, disk_bytes, world=world), planned.numbers or 0)
    memory: Device | DiskWeights = device
    if config.weights_folder is not None:
        nbytes = preflight.weights_disk_need(decomposition, model, config)
        memory = DiskWeights(config.weights_folder, device, nbytes, world)
    store = HostStore(model, decomposition, config.compute_dtype, memory, world, masters)
    world.agree("weights are there")
    world.broadcast(store.tensors())
    _share_buffers(model, world)
    return store


def _share_buffers(model: nn.Module, world: SingleProcess) -> None:
    """Copy the buffers of the first process to all others."""
    buffers = dict(model.named_buffers())
    first = world.first("buffers", lambda: buffers)
    if first is not buffers:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(first[name])


def _host_optimizer(optimizer: torch.optim.Optimizer, store: HostStore, world: SingleProcess) -> HostOptimizer:
    if isinstance(optimizer, OptimizerChain) and (store.split is not None or store.disk is not None or world.size > 1):
        raise UnsupportedError(
            "several optimizers step whole parameters on the host, in one process: neither several processes, nor "
            "harmony.split_masters, nor offload_optimizer on a disk."
        )
    if store.split is not None:
        return SplitOptimizer(optimizer, store.parameters, store.split, world)
    apart = [name for name, master in store.masters.items() if master is not store.parameters[name]]
    if isinstance(optimizer, OptimizerChain):
        return HostOptimizerChain(optimizer, store.masters, apart)
    if store.disk is not None:
        return DiskOptimizer(optimizer, store.masters, store.disk, world, apart)
    if isinstance(world, World):
        return BlockOptimizer(optimizer, store.masters, SharedMasters(store.masters), world, apart)
    return HostOptimizer(optimizer, store.masters, apart)


def _host_gradients(
    config: Config, device: Device, ledger: Ledger, optimizer: HostOptimizer | None, world: SingleProcess
) -> HostGradients:
    limit = None if config.deferred_update else config.harmony.gradient_slabs * device.count
    trains = (lambda _: False) if optimizer is None else optimizer.trains
    return HostGradients(
        device, ledger, config.accumulation_dtype, limit, trains, world, _casts(config, optimizer, world)
    )


def _casts(config: Config, optimizer: HostOptimizer | None, world: SingleProcess) -> Tensor | None:
    """Return the buffer that gradients are cast in for the optimizer, which has pieces of them in several processes."""
    if optimizer is None:
        return None
    pieces = [world.piece(numel) for numel in optimizer.trained_numels()]
    elements = [piece.stop - piece.start for piece in pieces]
    dtype = optimizer.master_dtype
    nbytes = cast_bytes(elements, config.accumulation_dtype.itemsize, dtype.itemsize)
    return torch.zeros(nbytes // dtype.itemsize, dtype=dtype) if nbytes else None


def _make_runtime(
    model: nn.Module,
    config: Config,
    decomposition: Decomposition,
    memory: tuple[Device, HostStore, SingleProcess],
    host_optimizer: HostOptimizer | None,
    device_optimizer: DeviceOptimizer | None,
) -> tuple[Runtime, Ledger]:
    device, store, world = memory
    ledger, timeline = Ledger(device), StepTimeline(device)
    residency = Residency(device, store, ledger, config.accumulation_dtype)
    device_store = DeviceStore(device, store, ledger, residency, device_optimizer)
    gradients = _host_gradients(config, device, ledger, host_optimizer, world)
    threads = update_threads(world.local_size) if device.copies_overlap else None
    updater = Updater(store, host_optimizer, gradients, timeline.host_work, threads)
    if host_optimizer is not None:
        host_optimizer.watch_state(partial(_hand_out_state, updater, device_store))
    contract = Contract(model, decomposition.layers)
    installation = Installation(model, decomposition.canonical, device, ledger, contract.settings.note_trained)
    stash = Stash(device, ledger)
    crossings = Crossings(device, ledger)
    layer_calls = LayerCalls(decomposition.layers, installation, stash, crossings)
    runtime = Runtime(
        device=device,
        residency=residency,
        device_store=device_store,
        stash=stash,
        gradients=gradients,
        optimizer=host_optimizer,
        updater=updater,
        installation=installation,
        contract=contract,
        crossings=crossings,
        layer_calls=layer_calls,
        joins=Joins(device, crossings, layer_calls.layers, residency),
        random=RandomStreams(device),
        timeline=timeline,
        user_gradients=UserGradients(store, updater),
        world=world,
        copy_masters_to_weights=store.copy_masters_to_weights,
    )
    return runtime, ledger


def _hand_out_state(updater: Updater, device_store: DeviceStore, names: Iterable[str]) -> None:
    """Bring the optimizer state of parameters to the host, before the program reads it."""
    updater.wait_all()
    device_store.finish_reads()
    device_store.hand_out_state(names)
