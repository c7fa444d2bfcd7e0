"""A running engine as a `Snapshot`. Nothing is copied: its sources are the engine's own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.checkpoint.data_position import ResumableLoader
from harmony_ds.checkpoint.random_state import capture_random
from harmony_ds.checkpoint.snapshot import OptimizerState, ParameterGroup, Progress, SchedulerState, Snapshot, Source
from harmony_ds.device.base import Device
from harmony_ds.offload.device_store import DeviceStore
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.host_store import HostStore, ungated


@dataclass(frozen=True, slots=True)
class Trained:
    """What of an engine a checkpoint is of, at rest: no update is under way.

    Attributes:
        loader: the engine's own data loader, if it made one.
        queued: micro-batches that were taken from it, but whose step is not taken yet.
        buffers: those of the module that forward passes of these may have changed, as they were before.
    """

    module: nn.Module
    store: HostStore
    device: Device
    device_store: DeviceStore
    optimizer: HostOptimizer | None
    scheduler: Any
    loader: ResumableLoader | None
    queued: int = 0
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def capture(
    trained: Trained, progress: Progress, client_state: dict[str, Any], plan: str | None, exclude_frozen: bool
) -> Snapshot:
    """What `trained` is now. Must be written or read before the next step."""
    trained.device_store.sync_to_host(to_be_read=True)
    store = trained.store
    frozen = tuple(name for name in store.parameters if name not in store.masters)
    excluded = frozen if exclude_frozen else ()
    return Snapshot(
        origin="harmony_ds",
        progress=progress,
        parameters={name: _source(p) for name, p in store.parameters.items() if name not in excluded},
        masters=masters_of(store),
        buffers={
            name: Source.of(trained.buffers.get(name, buffer))
            for name, buffer in persistent_buffers(trained.module).items()
        },
        tied=tied_names(trained.module),
        frozen=frozen,
        excluded=excluded,
        extra=extra_states(trained.module),
        optimizer=None if trained.optimizer is None else _optimizer(trained.optimizer),
        scheduler=_scheduler(trained.scheduler),
        random=capture_random(trained.device),
        data=None if trained.loader is None else trained.loader.state_dict(trained.queued),
        client_state=dict(client_state),
        plan=plan,
    )


def _source(parameter: Tensor) -> Source:
    with ungated():
        return Source.of(parameter.data)


def masters_of(store: HostStore) -> dict[str, Source]:
    """Return the values of masters that hold more than their weights."""
    if not store.has_fp32_masters:
        return {}

    def source(name: str, shape: torch.Size) -> Source:
        return Source(tuple(shape), store.master_dtype, lambda: store.read_master(name))

    return {name: source(name, master.shape) for name, master in store.masters.items()}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict has."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def tied_names(module: nn.Module) -> dict[str, str]:
    """Other names of parameters that have several -> the first one."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        # As a plain dict: what is only asked for its name need not be brought from the device.
        for key, parameter in dict.items(part._parameters):
            name = f"{prefix}.{key}" if prefix else key
            if parameter is not None and first.setdefault(id(parameter), name) != name:
                tied[name] = first[id(parameter)]
    return tied


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules save beside tensors, by its key in the state dict."""
    has = nn.Module.get_extra_state
    return {
        f"{name}.{nn.modules.module._EXTRA_STATE_KEY_SUFFIX}".lstrip("."): part.get_extra_state()
        for name, part in module.named_modules()
        if type(part).get_extra_state is not has
    }


def _optimizer(optimizer: HostOptimizer) -> OptimizerState:
    groups = tuple(
        ParameterGroup(names, dict(v)) for names, v in zip(optimizer.groups(), optimizer.hyper(), strict=True)
    )
    states: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name in group.parameters:
            state = optimizer.state_of(name)
            if state:
                states[name] = {
                    key: Source.of(value) if isinstance(value, Tensor) else value for key, value in state.items()
                }
    return OptimizerState(type(optimizer.optimizer).__name__, groups, states)


def _scheduler(scheduler: Any) -> SchedulerState | None:
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    return SchedulerState(type(scheduler).__name__, scheduler.state_dict())
