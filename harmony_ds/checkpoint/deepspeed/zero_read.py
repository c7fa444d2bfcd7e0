"""Checkpoints of DeepSpeed's engine: ZeRO-1, 2 and 3, of any number of data-parallel processes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from harmony_ds.checkpoint.snapshot import ParameterGroup, Progress, SavedOptimizer, Snapshot, TensorSource, listed
from harmony_ds.checkpoint.tensor_files import Record, load_pickle
from harmony_ds.config.optimizers import keeper_of
from harmony_ds.errors import CheckpointError

ParameterShapes = Mapping[str, Sequence[int]]
"""Parameter names -> shapes, of the parameters that DeepSpeed keeps in one flat vector, in their order there."""
OWNED = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info num_experts "
    "ds_autoep_layers".split()
)
"""Keys of a model_states file that are DeepSpeed's; the others are the client state."""
_ZERO2 = ("single_partition_of_fp32_groups", "base_optimizer_state")
_ZERO3 = ("fp32_flat_groups", "optimizer_state_dict")
"""Keys of a *_optim_states.pt: the fp32 values of its vectors, of which each group of parameters has one; and torch's state
dict, to which a vector is one parameter."""


def is_zero(folder: Path) -> bool:
    """Return whether a tag's folder is of a layout of DeepSpeed."""
    return any(folder.glob("*mp_rank_*_model_states.pt"))


def read_zero(folder: Path) -> Snapshot:
    """Open a checkpoint of ZeRO-1, 2 or 3, or the weights of one without ZeRO."""
    paths = numbered(folder, "*mp_rank_*_model_states.pt")
    if others := [path.name for path in paths if "mp_rank_00" not in path.name or path.name.startswith("layer_")]:
        found = f"{folder} is of model-parallel or expert-parallel processes ({listed(others, 2)})"
        raise CheckpointError(f"{found}: convert it with DeepSpeed's own tools first.")
    models = [load_pickle(path) for path in paths]
    optims = [load_pickle(path) for path in numbered(folder, "*zero_pp_rank_*_mp_rank_*_optim_states.pt")]
    if not optims:
        return snapshot_of(models)
    saved_by = int(models[0].get("dp_world_size") or 1)
    if len(optims) != saved_by:
        found = f"holds the *_optim_states.pt of {len(optims)}"
        raise CheckpointError(f"{folder} was saved by {saved_by} processes and {found}: files are missing.")
    return snapshot_of(models, *_trained(folder, [one["optimizer_state_dict"] for one in optims], models[0]))


def numbered(folder: Path, pattern: str) -> list[Path]:
    """Return files in the order of the numbers in their names."""
    return sorted(folder.glob(pattern), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def snapshot_of(
    models: list[dict[str, Any]],
    masters: Mapping[str, TensorSource] = MappingProxyType({}),
    optimizer: SavedOptimizer | None = None,
    loss_scaler: Record | None = None,
) -> Snapshot:
    """Join the contents of the model_states files and of the optimizer's."""
    model = models[0]
    buffers, tied = model.get("buffer_names") or (), dict(model.get("shared_params") or {})
    weights = {
        k: TensorSource.from_tensor(one) for k, one in (model.get("module") or {}).items() if isinstance(one, Tensor)
    }
    frozen = _frozen(models)
    parameters = {**masters, **frozen}
    for name, source in weights.items():
        placeholder = source.nbytes == 0 and name in parameters  # ZeRO-3's
        if name not in buffers and not placeholder:
            parameters[name] = source
    scheduler = model.get("lr_scheduler")
    return Snapshot(
        progress=Progress(
            **{key: int(model.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps")},
            loss_scaler=vars(loss_scaler) if getattr(loss_scaler, "dynamic", False) else None,
        ),
        parameters={name: source for name, source in parameters.items() if name not in tied},
        buffers={name: weights[name] for name in buffers if name in weights},
        masters=dict(masters),
        tied=tied,
        frozen=tuple(frozen),
        optimizer=optimizer,
        scheduler=None if scheduler is None else (None, scheduler),
        client_state={key: value for key, value in model.items() if key not in OWNED},
    )


def _frozen(models: list[dict[str, Any]]) -> dict[str, TensorSource]:
    """Return frozen parameters, which ZeRO-3 cuts over its processes."""
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    found: dict[str, TensorSource] = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        if name in fragments[0]:
            found |= split_each({name: shape}, (part[name].reshape(-1) for part in fragments), "value")
    return found


def split_each(shapes: ParameterShapes, vectors: Iterable[Tensor], what: str) -> dict[str, TensorSource]:
    """Return the parameters in a flat vector of ZeRO-3, given the part of it that each process has saved.

    Each parameter is cut into equal shares, the last one padded, and a process has its shares one after another.

    Args:
        what: the vector holds, for errors.

    Raises:
        CheckpointError: the parts have too few elements.
    """
    parts = tuple(vectors)
    found: dict[str, TensorSource] = {}
    offset = 0  # of the parameter, in each part
    for name, shape in shapes.items():
        numel = math.prod(shape)
        share = -(-numel // len(parts))
        pieces: list[Tensor] = []
        for rank, part in enumerate(parts):
            own = max(0, min(share, numel - rank * share))  # the last processes may have padding alone
            pieces.append(part[offset : offset + own])
        found[name] = _source_of(pieces, name, shape, what)
        offset += share
    return found


def split_whole(
    shapes: ParameterShapes, vectors: Iterable[Tensor], what: str, paddings: Sequence[int] | None = None
) -> dict[str, TensorSource]:
    """Return the parameters in a flat vector of ZeRO-1 or 2, given the part of it that each process has saved.

    Parameters lie one after another, and the whole is padded and cut.

    Args:
        what: see `split_each`.
        paddings: elements after each parameter; None: there are none.

    Raises:
        CheckpointError: the parts have too few elements.
    """
    parts = tuple(vectors)
    begins = [0, *accumulate(part.numel() for part in parts)][:-1]  # of the parts, in the whole
    found: dict[str, TensorSource] = {}
    offset = 0  # of the parameter, in the whole
    for place, (name, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        pieces: list[Tensor] = []
        for part, begin in zip(parts, begins, strict=True):
            pieces.append(part[max(0, offset - begin) : max(0, offset - begin + numel)])
        found[name] = _source_of(pieces, name, shape, what)
        offset += numel
        if paddings:
            offset += paddings[place]
    return found


def _source_of(pieces: list[Tensor], name: str, shape: Sequence[int], what: str) -> TensorSource:
    """Return the parameter that `pieces` of vectors hold; CheckpointError: they have too few elements, or too many."""
    have, numel = sum(piece.numel() for piece in pieces), math.prod(shape)
    if have != numel:
        raise CheckpointError(f"the {what} of {name} has {have} elements instead of {numel}.")
    return TensorSource(tuple(shape), pieces[0].dtype, partial(_joined, pieces, tuple(shape)))


def _joined(pieces: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.cat(pieces).detach().view(shape)


def _trained(
    folder: Path, states: list[dict[str, Any]], model: dict[str, Any]
) -> tuple[dict[str, TensorSource], SavedOptimizer, Record | None]:
    shapes: list[ParameterShapes] = model.get("param_shapes") or []
    first = states[0]
    is_zero3 = _ZERO3[0] in first
    flat, base = _ZERO3 if is_zero3 else _ZERO2
    if flat not in first or not isinstance(first.get(base), dict):
        raise CheckpointError(
            f"{folder}: its *_optim_states.pt hold {listed(sorted(first))}, which is neither ZeRO-1 or 2 nor ZeRO-3. "
            "Elastic checkpoints and those of DeepSpeed's BF16_Optimizer can be made universal by ds_to_universal.py."
        )
    paddings = first.get("param_alignment_paddings") or [None] * len(shapes)
    masters: dict[str, TensorSource] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for index, names in enumerate(shapes):
        split = split_each if is_zero3 else partial(split_whole, paddings=paddings[index])
        masters |= split(names, (state[flat][index] for state in states), "fp32 value")
        groups = [state[base]["state"].get(index, {}) for state in states]
        for key, value in groups[0].items():
            values: Mapping[str, Any] = dict.fromkeys(names, value)
            if isinstance(value, Tensor) and value.dim() > 0:
                values = split(names, (group[key] for group in groups), key)
            for name, source in values.items():
                by_name.setdefault(name, {})[key] = source
    return masters, optimizer_of(first[base]["param_groups"], shapes, by_name), first.get("loss_scaler")


def optimizer_of(
    param_groups: list[dict[str, Any]], shapes: list[ParameterShapes], states: dict[str, dict[str, Any]]
) -> SavedOptimizer:
    """Return an optimizer by parameter names, of which `param_groups` have vectors of many."""
    groups = []
    for values in param_groups:
        names = tuple(name for vector in values["params"] for name in shapes[vector])
        groups.append(ParameterGroup(names, {k: v for k, v in values.items() if k not in ("params", "step")}))
        if "step" in values:  # FusedAdam counts for a whole group
            for name in states.keys() & names:
                states[name].setdefault("step", values["step"])
    whole = {
        name: {
            key: TensorSource.from_tensor(value.clone()) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        for name, state in states.items()
    }
    # The files do not name the optimizer's class; the states it keeps, and how it counts steps, tell it.
    state = next(iter(whole.values()), {})
    kind = keeper_of(state, counts_in_tensors=isinstance(state.get("step"), TensorSource))
    return SavedOptimizer(kind or f"one that keeps {listed(sorted(state)) or 'nothing'}", tuple(groups), whole)
