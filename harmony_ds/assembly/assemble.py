"""Set an engine up: `assemble` makes everything that it needs from a model and a ds_config, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from harmony_ds.assembly import preflight
from harmony_ds.assembly.needs import (
    PlannedOptimizer,
    add_update_bytes,
    describe_optimizer,
    host_memory_need,
    optimizer_file_bytes,
    weights_file_bytes,
)
from harmony_ds.assembly.prepare_model import cast_buffers, prepare_model
from harmony_ds.config import Config
from harmony_ds.decomposer.find import Decomposition, Room, add_buffers, find_layers, layer_graph
from harmony_ds.device import Device, make_devices
from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess, World
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.contract import Contract
from harmony_ds.model.device_transfers import DeviceTransfers
from harmony_ds.model.installed import Installation, belongs_to_engine
from harmony_ds.model.intercept import Interception
from harmony_ds.model.joined import Joins
from harmony_ds.model.layer_call import LayerCalls
from harmony_ds.model.random_streams import RandomStreams
from harmony_ds.offload.crossing_tensors import CrossingTensors
from harmony_ds.offload.device_copies import DeviceCopies
from harmony_ds.offload.disk import DiskFile, DiskMasters
from harmony_ds.offload.disk_weights import DiskWeights
from harmony_ds.offload.host_gradients import HostGradients
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.packed import OwnedBuffer, Packed, find_packed, find_packed_buffers, pack_buffers, stored_bytes
from harmony_ds.offload.split_masters import SplitMasters
from harmony_ds.offload.stash import Stash
from harmony_ds.optim.block_optimizer import BlockOptimizer, SharedMasters, SplitOptimizer
from harmony_ds.optim.cores import update_threads
from harmony_ds.optim.device_optimizer import DeviceOptimizer
from harmony_ds.optim.disk_optimizer import DiskOptimizer
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.muon import mark_parameters
from harmony_ds.optim.optimizer_chain import HostOptimizerChain, OptimizerChain
from harmony_ds.optim.optimizers import (
    ClientOptimizer,
    Masters,
    ParameterGroups,
    build_optimizer,
    check_dtypes,
    with_state_dtype,
)
from harmony_ds.optim.resident_packs import ResidentPacks
from harmony_ds.optim.updater import Updater
from harmony_ds.optim.user_gradients import UserGradients
from harmony_ds.runtime.executor import Executor
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.streaming import Streamer
from harmony_ds.runtime.timeline import StepTimeline
from harmony_ds.scheduler.host_room import cast_bytes
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.health import EngineHealth
from harmony_ds.step.planner import Planner


def assemble(
    model: nn.Module,
    config: Config,
    client_optimizer: ClientOptimizer | None,
    model_parameters: ParameterGroups | None,
    device: Device | None,
    world: SingleProcess = SINGLE_PROCESS,
) -> EngineState:
    """Make everything that an engine needs, in the order below; whatever can be refused is refused before a thread runs.

    Afterwards the model's parameters lie in slabs of host memory, and calls of its layers go through the engine.

    Args:
        client_optimizer: the program's own, or a function that makes it; None: the ds_config's, if it names one.
        model_parameters: parameters or parameter groups to train; None: all of the model's.
        device: an explicit one; None: what the ds_config names.
        world: the processes that train the model together.
    """
    harmony = config.harmony

    # Arguments that contradict each other, or that several processes or devices cannot do.
    if belongs_to_engine(model):
        raise ModelError(
            "this model belongs to another engine, in which micro-batches or gradients wait for a step, or which trains it "
            "as a part of another model: call that engine's destroy() first."
        )
    preflight.refuse_for_several_processes(config, world)
    saved_plan = preflight.read_plan(harmony.plan)
    if device is None:
        device = make_devices(harmony.device, harmony.devices, harmony.budget_bytes, harmony.pin_memory)
    preflight.refuse_for_several_devices(harmony.residency, device.count, saved_plan)
    prepare_model(model, device.host_type, config.compute_dtype)
    cast_buffers(model, config)

    # Layers, and the host memory that their parameters, masters and gradients will take.
    packed = find_packed(model, config.compute_dtype, casts_frozen=config.casts_frozen)
    room = _room_for_layers(model, packed, config, device, world)
    decomposition = find_layers(model, harmony.layers, room)
    buffers = find_packed_buffers(model, [layer.module for layer in decomposition.layers])
    packed |= pack_buffers(buffers)
    decomposition = add_buffers(decomposition, {name: owned.module for name, owned in buffers.items()})
    trained = list(model.parameters() if model_parameters is None else model_parameters)
    if room is not None and device.has_values:  # an estimate says more about what does not fit
        preflight.refuse_small_budget(decomposition.layers, room, device.reserve_bytes())
    planned_optimizer = describe_optimizer(config.optimizer, client_optimizer, trained)
    if device.host_type == "cpu":
        need = host_memory_need(model, decomposition, packed, config, planned_optimizer, page_locks=device.pins_host)
        preflight.refuse_without_host_memory(need, world)
    mark_parameters(model, config.optimizer if client_optimizer is None else None)
    store = _move_to_slabs(model, decomposition, packed, buffers, config, planned_optimizer, device, world)

    # The optimizer, and who steps it: the host, or the device for packs that stay there.
    masters = Masters(store.parameters, store.masters)
    optimizer = build_optimizer(with_state_dtype(config), client_optimizer, trained, masters)
    host_optimizer: HostOptimizer | None = None
    device_optimizer: DeviceOptimizer | None = None
    if optimizer is not None:
        check_dtypes(optimizer, config)
        host_optimizer = _make_host_optimizer(optimizer, store, world)
        device_optimizer = DeviceOptimizer(host_optimizer, device.optimizer_device)

    # What the planner starts from: the layers' graph, and how spare device memory may be used.
    residency = preflight.choose_residency(harmony, device, device_optimizer, world)
    config = replace(config, harmony=replace(harmony, residency=residency))
    graph = layer_graph(decomposition, store.parameters, {name: one.nbytes for name, one in packed.items()})
    updates_on_device = residency not in ("off", "kept")
    if saved_plan is not None and saved_plan.policy.resident:
        updates_on_device = True
    if updates_on_device and device_optimizer is not None:
        graph = add_update_bytes(graph, store, device_optimizer)

    # From here on a thread runs, the updater's: everything that can be refused has been checked.
    ledger = Ledger(device)
    runtime = _make_runtime(
        model=model,
        decomposition=decomposition,
        device=device,
        store=store,
        ledger=ledger,
        world=world,
        host_optimizer=host_optimizer,
        device_optimizer=device_optimizer,
        accumulation_dtype=config.accumulation_dtype,
        most_waiting_gradients=None if config.deferred_update else harmony.gradient_slabs * device.count,
    )
    planner = Planner(runtime, decomposition, graph, config, saved_plan)
    interception = Interception(decomposition.layers, model, device)
    device.limit_process()
    return EngineState(
        device=device,
        store=store,
        ledger=ledger,
        runtime=runtime,
        world=world,
        planner=planner,
        executor=Executor(runtime),
        streamer=Streamer(runtime, decomposition.layers),
        health=EngineHealth(runtime.updater, world),
        interception=interception,
        layers=decomposition.layers,
        optimizer=optimizer,
        host_optimizer=host_optimizer,
        masters=masters,
    )


def _room_for_layers(
    model: nn.Module, packed: Mapping[str, Packed], config: Config, device: Device, world: SingleProcess
) -> Room | None:
    """Return the device memory that a layer has to fit, on the first process, so that all processes find the same layers.

    None: the device has no known bound.
    """
    budget_bytes = world.compute_on_first("the device's memory", lambda: device.budget_bytes)
    if budget_bytes is None:
        return None
    weight_bytes, gradient_bytes = config.compute_dtype.itemsize, config.accumulation_dtype.itemsize
    return Room(budget_bytes, weight_bytes, gradient_bytes, stored_bytes(packed, model))


# ---- host memory


def _move_to_slabs(
    model: nn.Module,
    decomposition: Decomposition,
    packed: Mapping[str, Packed],
    buffers: Mapping[str, OwnedBuffer],
    config: Config,
    optimizer: PlannedOptimizer,
    device: Device,
    world: SingleProcess,
) -> HostStore:
    """Move the parameters into slabs of host memory or of a file, make masters, and give all processes the same values."""
    masters: torch.dtype | SplitMasters | DiskMasters = config.master_dtype
    optimizer_bytes = 0
    if config.disk_folder is not None:
        optimizer_bytes = optimizer_file_bytes(model, config, optimizer)
    if config.harmony.split_masters:
        masters = SplitMasters(world)
    elif config.disk_folder is not None and optimizer_bytes:
        masters = DiskMasters(DiskFile(config.disk_folder, optimizer_bytes, world=world), optimizer.states or 0)

    memory: Device | DiskWeights = device
    if config.weights_folder is not None:
        nbytes = weights_file_bytes(model, decomposition, packed, config.compute_dtype.itemsize)
        memory = DiskWeights(config.weights_folder, device, nbytes, world)

    store = HostStore(model, decomposition, config.compute_dtype, memory, world, masters, packed, buffers)
    world.agree("weights are there")
    world.broadcast_to_servers(store.tensors())
    _broadcast_buffers(model, buffers, world)
    return store


def _broadcast_buffers(model: nn.Module, packed: Container[str], world: SingleProcess) -> None:
    """Copy the buffers of the first process to all others, but for those in slabs, which are shared already."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in packed}
    first = world.compute_on_first("buffers", lambda: buffers)
    if first is not buffers:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(first[name])


# ---- the optimizer


def _make_host_optimizer(optimizer: torch.optim.Optimizer, store: HostStore, world: SingleProcess) -> HostOptimizer:
    """Return the optimizer of masters in host memory: whole, split in two, on a disk, or a piece in each process."""
    if isinstance(optimizer, OptimizerChain) and (store.split is not None or store.disk is not None or world.size > 1):
        raise UnsupportedError(
            "several optimizers step whole parameters on the host, in one process: neither several processes, nor "
            "harmony.split_masters, nor offload_optimizer on a disk."
        )
    if store.split is not None:
        return SplitOptimizer(optimizer, store.parameters, store.split, world)
    separate = [name for name, master in store.masters.items() if master is not store.parameters[name]]
    if isinstance(optimizer, OptimizerChain):
        return HostOptimizerChain(optimizer, store.masters, separate)
    if store.disk is not None:
        return DiskOptimizer(optimizer, store.masters, store.disk, world, separate)
    if isinstance(world, World):
        return BlockOptimizer(optimizer, store.masters, SharedMasters(store.masters), world, separate)
    return HostOptimizer(optimizer, store.masters, separate)


# ---- the runtime


def _make_runtime(
    *,
    model: nn.Module,
    decomposition: Decomposition,
    device: Device,
    store: HostStore,
    ledger: Ledger,
    world: SingleProcess,
    host_optimizer: HostOptimizer | None,
    device_optimizer: DeviceOptimizer | None,
    accumulation_dtype: torch.dtype,
    most_waiting_gradients: int | None,
) -> Runtime:
    """Make everything that runs the model, and start the updater's thread.

    Args:
        most_waiting_gradients: gradients of how many packs may wait on the host for their update; None: of any number.
    """
    # Bytes: device copies of parameters, gradients, and stashes.
    timeline = StepTimeline(device)
    device_copies = DeviceCopies(device, store, ledger, accumulation_dtype)
    resident_packs = ResidentPacks(device, store, ledger, device_copies, device_optimizer)
    stash = Stash(device, ledger)
    trains: Callable[[str], bool] = _trains_nothing
    casts: Tensor | None = None
    if host_optimizer is not None:
        trains = host_optimizer.trains
        casts = _make_cast_buffer(host_optimizer, accumulation_dtype, world)
    gradients = HostGradients(device, ledger, accumulation_dtype, most_waiting_gradients, trains, world, casts)

    # Updates.
    threads = update_threads(world.local_size) if device.copies_overlap else None
    updater = Updater(store, host_optimizer, gradients, timeline.host_work, threads)
    if host_optimizer is not None:
        host_optimizer.watch_state(partial(_bring_state_to_host, updater, resident_packs))

    # Calls of layers.
    contract = Contract(model, decomposition.layers)
    installation = Installation(
        model,
        decomposition.canonical,
        device,
        ledger,
        contract.settings.note_trained,
        store.buffers.values(),
        store.packed,
    )
    device_transfers = DeviceTransfers(device, ledger)
    layer_calls = LayerCalls(decomposition.layers, installation, stash, device_transfers, device.parts_to_run)
    joins = Joins(device, device_transfers, layer_calls.layers, device_copies)
    contract.when_structure_changes(installation.find_buffers)
    contract.when_structure_changes(layer_calls.find_buffers)

    return Runtime(
        device=device,
        device_copies=device_copies,
        resident_packs=resident_packs,
        stash=stash,
        crossing_tensors=CrossingTensors(device, ledger, stash),
        host_gradients=gradients,
        optimizer=host_optimizer,
        updater=updater,
        installation=installation,
        contract=contract,
        device_transfers=device_transfers,
        layer_calls=layer_calls,
        joins=joins,
        random=RandomStreams(device),
        timeline=timeline,
        user_gradients=UserGradients(store, updater),
        world=world,
        copy_masters_to_weights=store.copy_masters_to_weights,
    )


def _trains_nothing(name: str) -> bool:  # noqa: ARG001
    """Answer for a training without an optimizer whether the optimizer trains the parameter `name`."""
    return False


def _make_cast_buffer(optimizer: HostOptimizer, accumulation_dtype: torch.dtype, world: SingleProcess) -> Tensor | None:
    """Return the buffer that gradients are cast in to the optimizer's dtype; None if they have it already.

    Each of several processes casts its piece of a gradient alone.
    """
    pieces = [world.piece(numel) for numel in optimizer.trained_numels()]
    elements = [piece.stop - piece.start for piece in pieces]
    dtype = optimizer.master_dtype
    nbytes = cast_bytes(elements, accumulation_dtype.itemsize, dtype.itemsize)
    return torch.zeros(nbytes // dtype.itemsize, dtype=dtype) if nbytes else None


def _bring_state_to_host(updater: Updater, resident_packs: ResidentPacks, names: Iterable[str]) -> None:
    """Bring the optimizer's state of the parameters `names` to the host, before the program reads it."""
    updater.wait_all()
    resident_packs.finish_reads()
    resident_packs.hand_out_state(names)
