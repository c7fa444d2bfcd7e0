"""Capturing a running engine as a `Snapshot`. Nothing is copied: its sources are the engine's own tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harmony_ds.checkpoint.data_position import ResumableLoader
from harmony_ds.checkpoint.snapshot import (
    ParameterGroup,
    Progress,
    SavedOptimizer,
    Snapshot,
    TensorSource,
    WrapperSource,
)
from harmony_ds.config.optimizers import kind_of
from harmony_ds.device.base import Device
from harmony_ds.model.buffers import persistent_buffers
from harmony_ds.offload.host_store import HostStore, bypass_hooks
from harmony_ds.offload.wrappers import is_wrapper
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.resident_packs import ResidentPacks

_EXTRA = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@dataclass(frozen=True, slots=True)
class Trained:
    """What a checkpoint holds of an engine at rest, without updates under way.

    Attributes:
        loader: the engine's own data loader.
        queued: how many micro-batches were taken from `loader` whose step is not taken yet.
        buffers: the module's buffers that forward passes of these micro-batches may have changed, as they were before.
    """

    module: nn.Module
    store: HostStore
    device: Device
    resident_packs: ResidentPacks
    optimizer: HostOptimizer | None
    scheduler: Any
    loader: ResumableLoader | None
    queued: int = 0
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def capture(
    trained: Trained, progress: Progress, client_state: dict[str, Any], plan: str | None, exclude_frozen: bool
) -> Snapshot:
    """Return the state of `trained`, to be written or read before the next step."""
    trained.resident_packs.sync_to_host()
    store, scheduler, loader = trained.store, trained.scheduler, trained.loader
    frozen = tuple(name for name in store.parameters if name not in store.masters)
    left_out = frozen if exclude_frozen else ()
    buffers = persistent_buffers(trained.module).items()
    masters: dict[str, TensorSource] = {}
    if trained.optimizer is not None and store.has_fp32_masters:
        stepped = set(trained.optimizer.trained)
        for name, master in store.masters.items():
            if name in stepped:
                shape = tuple(master.shape)
                masters[name] = TensorSource(shape, store.master_dtype, partial(store.read_master, name))
    with bypass_hooks():
        extra = {key: one for key, one in trained.module.state_dict(keep_vars=True).items() if key.endswith(_EXTRA)}
        parameters: dict[str, TensorSource] = {}
        for name, parameter in store.parameters.items():
            if name not in left_out:
                value = store.weight(name) if name in store.packed_kinds else parameter.data
                parameters[name] = TensorSource.from_tensor(value)
    return Snapshot(
        progress=progress,
        parameters=parameters,
        masters=masters,
        buffers={name: TensorSource.from_tensor(trained.buffers.get(name, buffer)) for name, buffer in buffers},
        tied=tied_names(trained.module),
        frozen=frozen,
        packed={name: kind for name, kind in store.packed_kinds.items() if name in parameters},
        extra=extra,
        optimizer=None if trained.optimizer is None else _capture_optimizer(trained.optimizer),
        scheduler=(type(scheduler).__name__, scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None,
        random=capture_random(trained.device),
        data=None if loader is None else loader.state_dict(trained.queued),
        client_state=client_state,
        plan=plan,
    )


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map the other names of tied parameters to their first one."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            tied[name] = first
    return tied


def _capture_optimizer(optimizer: HostOptimizer) -> SavedOptimizer:
    groups = [
        ParameterGroup(names, dict(values)) for names, values in zip(optimizer.groups(), optimizer.hyper(), strict=True)
    ]
    states: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name in group.parameters:
            state = optimizer.state_of(name)
            if state:
                states[name] = {key: _source_of(value) for key, value in state.items()}
    return SavedOptimizer(kind_of(optimizer.optimizer), tuple(groups), states)


def _source_of(value: Any) -> Any:
    """Return what a checkpoint holds of one value of an optimizer's state."""
    if is_wrapper(value):
        return WrapperSource.from_tensor(value)
    return TensorSource.from_tensor(value) if isinstance(value, Tensor) else value


def capture_random(device: Device) -> dict[str, Any]:
    """Return the states of all generators, as plain data and tensors."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    numpy = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return {"python": random.getstate(), "device": list(device.random_state()), "numpy": numpy}


def random_of(states: dict[str, Any] | None, rank: int, size: int) -> dict[str, Any] | None:
    """Return the states of process `rank` of `size`; None if another number of processes saved them."""
    if states is None or rank == 0:
        return states
    others: list[dict[str, Any]] = states.get("others", [])
    return others[rank - 1] if len(others) == size - 1 else None


def restore_random(states: dict[str, Any], device: Device) -> None:
    """Set the generators to their saved states; those of a device of another kind than the saved one stay as they are."""
    random.setstate(states["python"])
    device_states = list(device.random_state())
    for index, saved in enumerate(states["device"][: len(device_states)]):
        present = device_states[index]
        if (saved.shape, saved.dtype) == (present.shape, present.dtype):
            device_states[index] = saved
    device.set_random_state(tuple(device_states))
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
