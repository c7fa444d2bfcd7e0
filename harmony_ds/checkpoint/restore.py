"""Restoring a `Snapshot` into an engine: everything is compared first, so a checkpoint that is refused changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harmony_ds.checkpoint.capture import Trained, restore_random, tied_names
from harmony_ds.checkpoint.snapshot import SavedOptimizer, Snapshot, TensorSource, WrapperSource, listed
from harmony_ds.config.optimizers import kind_of, same_formula
from harmony_ds.errors import CheckpointError
from harmony_ds.model.buffers import persistent_buffers
from harmony_ds.offload.host_store import HostStore
from harmony_ds.optim.host_optimizer import HostOptimizer

_KERNEL_KEYS = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Hyper-parameters that choose a kernel: the engine's own stay."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load of a checkpoint, as the arguments of `load_checkpoint` say.

    Attributes:
        strict: parameters and buffers have to be those of the model, none missing and none more.
        module_only: the weights alone.
        custom: DeepSpeed's custom_load_fn(src=<state dict>, dst=<module>), which loads the weights instead.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom: Callable[..., Any] | None = None


def restore(trained: Trained, snapshot: Snapshot, options: LoadOptions, where: str) -> None:
    """Replace what `trained`, an engine at rest and all on the host, holds by `snapshot`.

    Args:
        where: the checkpoint's folder, for errors.

    Raises:
        CheckpointError: the snapshot does not fit the engine, in all ways that the message lists; nothing was changed.
    """
    snapshot = _with_names_of_model(snapshot, trained)
    whole = not options.module_only
    optimizer = trained.optimizer if whole and options.optimizer else None
    scheduler = trained.scheduler if whole and options.scheduler else None
    if not hasattr(scheduler, "load_state_dict"):
        scheduler = None
    complaints = [] if options.custom is not None else _refusals_of_model(trained, snapshot, options.strict)
    if optimizer is not None and not complaints:  # the optimizer of another model would repeat the model's complaints
        complaints += _refusals_of_optimizer(optimizer, snapshot.optimizer)
    if scheduler is not None:
        complaints += _refusals_of_scheduler(type(scheduler).__name__, snapshot)
    if complaints:
        raise CheckpointError(f"the checkpoint {where} does not fit this engine: {'; '.join(complaints)}.")
    parts: list[tuple[Any, Any]] = []
    if scheduler is not None and snapshot.scheduler is not None:
        parts.append((scheduler, snapshot.scheduler[1]))
    if snapshot.data is not None and trained.loader is not None and whole:
        parts.append((trained.loader, snapshot.data))
    _load_all_or_none(parts, where)
    with torch.no_grad():
        _put_weights(trained, snapshot, options)
        if optimizer is not None and snapshot.optimizer is not None:
            _put_optimizer(optimizer, snapshot.optimizer)
    if snapshot.random is not None and whole:
        restore_random(snapshot.random, trained.device)


def _with_names_of_model(snapshot: Snapshot, trained: Trained) -> Snapshot:
    """Return the snapshot with tied parameters under the names that the model has for them.

    Parameters may have been tied when they were saved, and be two in the model, or the other way round.
    """
    tied = tied_names(trained.module)

    def renamed(values: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        saved = snapshot.with_tied(dict(values))
        under_all_names = dict(saved)
        for alias, first_name in tied.items():
            if alias in saved and first_name not in saved:
                under_all_names[first_name] = saved[alias]
        sources: dict[str, TensorSource] = {}
        for name, source in under_all_names.items():
            is_known = name in values or name in trained.store.parameters
            if is_known and name not in tied:
                sources[name] = source
        return sources

    return replace(snapshot, parameters=renamed(snapshot.parameters), masters=renamed(snapshot.masters))


def _refusals_of_model(trained: Trained, snapshot: Snapshot, strict: bool) -> list[str]:
    """Return the reasons why the saved tensors are not the model's; empty if they are."""
    complaints: list[str] = []
    ours: dict[str, Tensor] = {**trained.store.parameters, **persistent_buffers(trained.module)}
    kinds = trained.store.packed_kinds
    for name in kinds:
        ours[name] = trained.store.weight(name)
    theirs = snapshot.tensors
    if strict:
        missing = [name for name in ours if name not in theirs]
        if left_out := [name for name in missing if name in snapshot.frozen]:
            way_out = "load it with load_module_strict=False"
            complaints.append(f"it was saved without frozen parameters ({listed(left_out)}): {way_out}")
        if lost := [name for name in missing if name not in snapshot.frozen]:
            complaints.append(f"missing in the checkpoint: {listed(lost)}")
        if unexpected := [name for name in theirs if name not in ours]:
            complaints.append(f"not in this model: {listed(unexpected)}")
    differing = [name for name in {**kinds, **snapshot.packed} if name in ours and name in theirs]
    differing = [name for name in differing if kinds.get(name) != snapshot.packed.get(name)]
    if differing:
        name = differing[0]
        saved, own = (of.get(name, "not quantized") for of in (snapshot.packed, kinds))
        complaints.append(
            f"{name} is {saved} in the checkpoint and {own} in this model (and so are {len(differing) - 1} more): quantize "
            "the model as it was, or save with exclude_frozen_parameters=True and load with load_module_strict=False"
        )
        return complaints
    complaints += [
        f"{name} is {list(theirs[name].shape)} in the checkpoint and {list(tensor.shape)} in this model"
        for name, tensor in ours.items()
        if name in theirs and tuple(tensor.shape) != theirs[name].shape
    ]
    return complaints


def _refusals_of_optimizer(optimizer: HostOptimizer, saved: SavedOptimizer | None) -> list[str]:
    """Return the reasons why `saved` cannot go on in `optimizer`; empty if it can."""
    kind = kind_of(optimizer.optimizer)
    way_out = "load it with load_optimizer_states=False to start the optimizer afresh"
    if saved is None:
        return [f"it has no state for the optimizer {kind}: {way_out}"]
    if not same_formula(kind, saved.kind):
        return [f"its optimizer is {saved.kind} and this engine's {kind}: {way_out}"]
    ours = [set(names) for names in optimizer.groups()]
    theirs = [set(group.parameters) for group in saved.groups]
    missing = set().union(*ours) - set().union(*theirs)
    unexpected = set().union(*theirs) - set().union(*ours)
    complaints = []
    if missing:
        complaints.append(f"its optimizer has no {listed(sorted(missing))}")
    if unexpected:
        complaints.append(f"its optimizer has {listed(sorted(unexpected))}, which this engine's does not")
    if not complaints and ours != theirs:
        both = f"its {len(theirs)} parameter groups divide the parameters otherwise than this engine's {len(ours)}"
        complaints.append(f"{both}: {way_out}")
    return complaints


def _refusals_of_scheduler(ours: str, snapshot: Snapshot) -> list[str]:
    """Return the reason why the saved schedule cannot go on in the class `ours`; empty if it can."""
    way_out = "load it with load_lr_scheduler_states=False"
    if snapshot.scheduler is None:
        return [f"it has no state for {ours}: {way_out} to start that afresh"]
    theirs, _ = snapshot.scheduler
    if theirs not in (None, ours):
        return [f"its scheduler is {theirs} and this engine's {ours}: {way_out}"]
    return []


def _load_all_or_none(parts: list[tuple[Any, Any]], where: str) -> None:
    """Load the state of each part; if one refuses its state half-way, give all of them their old ones back."""
    kept = [(part, copy.deepcopy(part.state_dict())) for part, _ in parts]
    try:
        for part, state in parts:
            part.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        for part, state in kept:
            part.load_state_dict(state)
        raise CheckpointError(f"the checkpoint {where} does not fit this engine: {error!r}.") from error


def _put_weights(trained: Trained, snapshot: Snapshot, options: LoadOptions) -> None:
    """Write the saved parameters, masters and buffers into the model's."""
    store = trained.store
    if options.custom is not None:
        values = {name: source.read() for name, source in snapshot.tensors.items()}
        options.custom(src=snapshot.with_tied(values), dst=trained.module)
        for name in store.masters if store.has_fp32_masters else ():
            store.write_master(name, store.weight(name))
        return
    for name in store.parameters:
        if name in snapshot.parameters:
            _put_parameter(store, name, snapshot)
    for name, buffer in persistent_buffers(trained.module).items():
        if name in snapshot.buffers:
            buffer.copy_(snapshot.buffers[name].read())
    if snapshot.extra:
        trained.module.load_state_dict(snapshot.extra, strict=False)


def _put_parameter(store: HostStore, name: str, snapshot: Snapshot) -> None:
    """Write the saved value of the parameter `name` into its weight, and into its master if it has one."""
    saved, weight = snapshot.parameters[name], store.weight(name)
    if name in store.packed and name not in store.packed_kinds:
        memory = store.packed[name].memory  # its values, not its bytes
        assert memory is not None
        weight = memory
    if name not in store.masters or not store.has_fp32_masters:
        weight.copy_(snapshot.fp32(name).read())
        return
    store.write_master(name, snapshot.fp32(name).read())
    # The saved value in the dtype of compute, if there is one; otherwise made from the most precise value.
    if saved.dtype == weight.dtype and store.split is None:
        weight.copy_(saved.read())


def _put_optimizer(optimizer: HostOptimizer, saved: SavedOptimizer) -> None:
    """Give `optimizer` the saved hyper-parameters and, for each parameter, a state of its own in the optimizer's form."""
    same = kind_of(optimizer.optimizer) == saved.kind
    for present, group in zip(optimizer.optimizer.param_groups, saved.groups, strict=True):
        for key, value in group.values.items():
            if key not in _KERNEL_KEYS and (same or key in present):
                present[key] = value.clone() if isinstance(value, Tensor) else value
    for name in saved.names:
        state = saved.states.get(name)
        if state is not None:
            present_state = optimizer.state_of(name) or {}
            kept = optimizer.state_dtype
            state = {key: _read_into(present_state.get(key), value, kept) for key, value in state.items()}
            if not same and "step" in state:  # a Python number in DeepSpeed's compiled optimizers, a tensor in torch's
                state["step"] = int(state["step"]) if optimizer.native else torch.tensor(float(state["step"]))
        optimizer.put_state(name, state)


def _read_into(memory: Any, value: Any, dtype: torch.dtype | None) -> Any:
    """Read a saved tensor, in `dtype` if one is given, into `memory` where that has its form, otherwise into new memory."""
    if isinstance(value, WrapperSource):
        return value.read()
    if not isinstance(value, TensorSource):
        return value
    tensor = (value if dtype is None else value.to(dtype)).read()
    fits = isinstance(memory, Tensor) and (memory.shape, memory.dtype) == (tensor.shape, tensor.dtype)
    return memory.copy_(tensor) if fits else tensor.clone()
