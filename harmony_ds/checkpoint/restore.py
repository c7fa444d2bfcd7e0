"""A `Snapshot` into an engine: everything is compared first, so that a checkpoint that is refused changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.checkpoint.capture import Trained, extra_states, persistent_buffers, tied_names
from harmony_ds.checkpoint.optimizer_match import matching, refusals_of_optimizer
from harmony_ds.checkpoint.random_state import restore_random
from harmony_ds.checkpoint.snapshot import Snapshot, listed
from harmony_ds.errors import CheckpointError
from harmony_ds.offload.host_store import HostStore

CustomLoad = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What of a checkpoint is loaded, in DeepSpeed's words.

    Attributes:
        strict: whether the model's parameters and buffers must be exactly the checkpoint's.
        custom: loads the weights in our place: called with src=<state dict>, dst=<module>.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom: CustomLoad | None = None


def restore(trained: Trained, snapshot: Snapshot, wanted: LoadOptions, where: str) -> None:
    """Puts `snapshot` in the place of what `trained` holds. The engine is at rest, and all of it on the host.

    Raises:
        CheckpointError: it is of another model or optimizer; nothing has been changed.
    """
    found = _renamed(snapshot, trained)
    complaints = [] if wanted.custom is not None else _refusals_of_model(trained, found, wanted.strict)
    whole = not wanted.module_only
    optimizer = trained.optimizer if whole and wanted.optimizer else None
    scheduler = (
        trained.scheduler if whole and wanted.scheduler and hasattr(trained.scheduler, "load_state_dict") else None
    )
    if optimizer is not None and not complaints:  # of another model, it would say all twice
        complaints += refusals_of_optimizer(optimizer, found.optimizer)
    if scheduler is not None:
        complaints += _refusals_of_scheduler(scheduler, found)
    if complaints:
        raise CheckpointError(f"the checkpoint {where} does not fit this engine: {'; '.join(complaints)}.")
    with _given_back_if_refused(trained, where):
        if scheduler is not None and found.scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(found.scheduler.state))
        if found.data is not None and trained.loader is not None and whole:
            trained.loader.load_state_dict(found.data)
    with torch.no_grad():
        _put_weights(trained, found, wanted)
        if optimizer is not None and found.optimizer is not None:
            for name, state in matching(optimizer, found.optimizer):
                optimizer.put_state(name, state)
    if found.random is not None and whole:
        restore_random(found.random, trained.device)


# ---- what must be the same


def _renamed(snapshot: Snapshot, trained: Trained) -> Snapshot:
    """The snapshot with tied parameters under the names that the model has for them."""
    first = tied_names(trained.module)
    parameters = dict(snapshot.parameters)
    masters = dict(snapshot.masters)
    for other, name in first.items():
        for values in (parameters, masters):
            value = values.pop(other, None)
            if value is not None:
                values.setdefault(name, value)
    for other, name in snapshot.tied.items():  # tied when it was saved, and two parameters now
        if other in trained.store.parameters and other not in parameters and name in parameters:
            parameters[other] = parameters[name]
            if name in masters:
                masters[other] = masters[name]
    return replace(snapshot, parameters=parameters, masters=masters)


def _refusals_of_model(trained: Trained, snapshot: Snapshot, strict: bool) -> list[str]:
    complaints: list[str] = []
    ours: dict[str, Tensor] = {**trained.store.parameters, **persistent_buffers(trained.module)}
    theirs = snapshot.tensors
    if strict:
        missing = [name for name in ours if name not in theirs]
        left_out = [name for name in missing if name in snapshot.excluded]
        lost = [name for name in missing if name not in snapshot.excluded]
        if left_out:
            complaints.append(
                f"it was saved without frozen parameters ({listed(left_out)}): load it with load_module_strict=False"
            )
        if lost:
            complaints.append(f"missing in the checkpoint: {listed(lost)}")
        if unexpected := [name for name in theirs if name not in ours]:
            complaints.append(f"not in this model: {listed(unexpected)}")
    complaints += [
        f"{name} is {list(theirs[name].shape)} in the checkpoint and {list(tensor.shape)} in this model"
        for name, tensor in ours.items()
        if name in theirs and tuple(tensor.shape) != theirs[name].shape
    ]
    return complaints


def _refusals_of_scheduler(scheduler: Any, snapshot: Snapshot) -> list[str]:
    found = snapshot.scheduler
    ours = type(scheduler).__name__
    if found is None:
        return [f"it has no state for {ours}: load it with load_lr_scheduler_states=False to start that afresh"]
    if found.kind is not None and found.kind != ours:
        return [f"its scheduler is {found.kind} and this engine's {ours}: load it with load_lr_scheduler_states=False"]
    return []


@contextmanager
def _given_back_if_refused(trained: Trained, where: str) -> Iterator[None]:
    """Foreign objects may refuse their state while taking it: they are given their old one back."""
    parts: tuple[Any, ...] = (trained.scheduler, trained.loader)
    kept = [(part, copy.deepcopy(part.state_dict())) for part in parts if hasattr(part, "load_state_dict")]
    try:
        yield
    except Exception as error:
        for part, state in kept:
            part.load_state_dict(state)
        raise CheckpointError(f"the checkpoint {where} does not fit this engine: {error!r}.") from error


# ---- putting it there


def _put_weights(trained: Trained, snapshot: Snapshot, wanted: LoadOptions) -> None:
    store = trained.store
    if wanted.custom is not None:
        values = {name: source.read() for name, source in snapshot.tensors.items()}
        wanted.custom(src=snapshot.with_tied(values), dst=trained.module)
        for name in store.masters:
            if store.has_fp32_masters:
                store.write_master(name, store.weight(name))
        return
    for name in store.parameters:
        if name in snapshot.parameters:
            _put_parameter(store, name, snapshot)
    for name, buffer in persistent_buffers(trained.module).items():
        if name in snapshot.buffers:
            buffer.copy_(snapshot.buffers[name].read())
    _put_extra(trained.module, snapshot.extra)


def _put_parameter(store: HostStore, name: str, snapshot: Snapshot) -> None:
    saved, weight = snapshot.parameters[name], store.weight(name)
    if name not in store.masters or not store.has_fp32_masters:
        weight.copy_(snapshot.fp32(name).read())
        return
    store.write_master(name, snapshot.fp32(name).read())
    # What was saved in the dtype of compute is taken as it was; another dtype is made from the most precise value.
    if saved.dtype == weight.dtype and store.split is None:
        weight.copy_(saved.read())


def _put_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    if not extra:
        return
    suffix = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    for key in extra_states(module):
        if key in extra:
            module.get_submodule(key.removesuffix(suffix).rstrip(".")).set_extra_state(extra[key])
