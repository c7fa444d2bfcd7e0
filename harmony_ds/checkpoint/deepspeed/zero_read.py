"""Checkpoints of DeepSpeed's engine: ZeRO-1, 2 and 3, of any number of data-parallel processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from harmony_ds.checkpoint.deepspeed.flat import ZERO2, ZERO3, Shapes
from harmony_ds.checkpoint.deepspeed.pickles import Record, load_pickle
from harmony_ds.checkpoint.snapshot import (
    OptimizerState,
    ParameterGroup,
    Progress,
    SchedulerState,
    Snapshot,
    Source,
    listed,
)
from harmony_ds.config.optimizers import keeper_of
from harmony_ds.config.settings import SCALER_NAMES
from harmony_ds.errors import CheckpointError

OWNED = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info num_experts "
    "ds_autoep_layers".split()
)
"""Keys of a model_states file that are DeepSpeed's; the others are the client state."""


@dataclass(frozen=True, slots=True)
class OptimizerFiles:
    """What the optimizer's files hold, by parameter."""

    masters: dict[str, Source]
    optimizer: OptimizerState
    loss_scaler: Record | None


def is_deepspeeds(folder: Path) -> bool:
    """Whether a tag's folder is of a layout of DeepSpeed."""
    return any(folder.glob("*mp_rank_*_model_states.pt"))


def read_zero(folder: Path) -> Snapshot:
    """Opens a checkpoint of ZeRO-1, 2 or 3. One without ZeRO has its weights read, but not its optimizer.

    Raises:
        CheckpointError: it is torn, or of model-parallel processes, or of another kind.
    """
    models = _model_states(folder)
    optims = [load_pickle(path) for path in numbered(folder, "*zero_pp_rank_*_mp_rank_*_optim_states.pt")]
    first = models[0]
    if not optims:
        return snapshot_of(models, None)
    saved_by = int(first.get("dp_world_size") or 1)
    if len(optims) != saved_by:
        raise CheckpointError(
            f"{folder} was saved by {saved_by} processes and holds the *_optim_states.pt of {len(optims)}: files are "
            "missing."
        )
    return snapshot_of(models, _trained(folder, [one["optimizer_state_dict"] for one in optims], first))


def _model_states(folder: Path) -> list[dict[str, Any]]:
    paths = numbered(folder, "*mp_rank_*_model_states.pt")
    others = [path.name for path in paths if "mp_rank_00" not in path.name or path.name.startswith("layer_")]
    if others:
        raise CheckpointError(
            f"{folder} is of model-parallel or expert-parallel processes ({listed(others, 2)}): convert it with "
            "DeepSpeed's own tools first."
        )
    return [load_pickle(path) for path in paths]


def numbered(folder: Path, pattern: str) -> list[Path]:
    """Files in the order of the numbers in their names."""
    return sorted(folder.glob(pattern), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def snapshot_of(models: list[dict[str, Any]], trained: OptimizerFiles | None) -> Snapshot:
    """A snapshot from what the model_states files say, and from what the optimizer's do."""
    model = models[0]
    buffers = set(model.get("buffer_names") or ())
    weights = {name: tensor for name, tensor in (model.get("module") or {}).items() if isinstance(tensor, Tensor)}
    tied = dict(model.get("shared_params") or {})
    frozen = _frozen(models)
    masters = {} if trained is None else trained.masters
    parameters: dict[str, Source] = {}
    for name, tensor in weights.items():
        empty = tensor.numel() == 0 and (name in masters or name in frozen)  # ZeRO-3 leaves a placeholder
        if name not in buffers and name not in tied and not empty:
            parameters[name] = Source.of(tensor)
    parameters = {**masters, **frozen, **parameters}
    steps = int(model.get("global_steps") or 0)
    scheduler = model.get("lr_scheduler")
    return Snapshot(
        origin=f"DeepSpeed {model.get('ds_version', '')}".strip(),
        progress=Progress(
            global_steps=steps,
            global_samples=int(model.get("global_samples") or 0),
            skipped_steps=int(model.get("skipped_steps") or 0),
            loss_scaler=None if trained is None else _scaler(trained.loss_scaler),
        ),
        parameters={name: source for name, source in parameters.items() if name not in tied},
        buffers={name: Source.of(weights[name]) for name in buffers if name in weights},
        masters=masters,
        tied=tied,
        frozen=tuple(frozen),
        optimizer=None if trained is None else trained.optimizer,
        scheduler=None if scheduler is None else SchedulerState(None, scheduler),
        client_state={key: value for key, value in model.items() if key not in OWNED},
    )


def _frozen(models: list[dict[str, Any]]) -> dict[str, Source]:
    """Frozen parameters; ZeRO-3 cuts them over its processes."""
    shapes: Shapes = models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    found: dict[str, Source] = {}
    for name, shape in shapes.items():
        if name in fragments[0]:
            found |= ZERO3.split({name: shape}, None, (fragment[name].reshape(-1) for fragment in fragments), "value")
    return found


def _scaler(record: Record | None) -> dict[str, Any] | None:
    values = {} if record is None else record.__dict__
    if "last_overflow_iter" not in values:
        return None
    return {
        "scale": float(values["cur_scale"]),
        "hysteresis": int(values["cur_hysteresis"]),
        "step": int(values["cur_iter"]),
        "last_overflow": int(values["last_overflow_iter"]),
        "settings": {ours: values[theirs] for ours, theirs in SCALER_NAMES.items()},
    }


# ---- the optimizer's files


def _trained(folder: Path, states: list[dict[str, Any]], model: dict[str, Any]) -> OptimizerFiles:
    shapes: list[Shapes] = model.get("param_shapes") or []
    first = states[0]
    form = next(
        (form for form in (ZERO3, ZERO2) if form.flat in first and isinstance(first.get(form.base), dict)), None
    )
    if form is None:
        raise CheckpointError(
            f"{folder}: its *_optim_states.pt hold {listed(sorted(first))}, which is neither ZeRO-1 or 2 nor ZeRO-3. "
            "Elastic checkpoints and those of DeepSpeed's BF16_Optimizer can be made universal by ds_to_universal.py."
        )
    paddings = first.get("param_alignment_paddings") or [None] * len(shapes)
    masters: dict[str, Source] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for index, names in enumerate(shapes):
        masters |= form.split(names, paddings[index], (state[form.flat][index] for state in states), "fp32 value")
        groups = [state[form.base]["state"].get(index, {}) for state in states]
        for key, value in groups[0].items():
            values: Mapping[str, Any] = dict.fromkeys(names, value)
            if isinstance(value, Tensor) and value.dim() > 0:
                values = form.split(names, paddings[index], (group[key] for group in groups), key)
            for name, source in values.items():
                by_name.setdefault(name, {})[key] = source
    optimizer = optimizer_of(first[form.base]["param_groups"], shapes, by_name)
    return OptimizerFiles(masters, optimizer, first.get("loss_scaler"))


def optimizer_of(
    param_groups: list[dict[str, Any]], shapes: list[Shapes], states: dict[str, dict[str, Any]]
) -> OptimizerState:
    """An optimizer by parameter names. In torch's words, a flat vector is one parameter."""
    groups = tuple(
        ParameterGroup(
            tuple(name for vector in group["params"] for name in shapes[vector]),
            {key: value for key, value in group.items() if key not in ("params", "step")},
        )
        for group in param_groups
    )
    for group, values in zip(groups, param_groups, strict=True):
        if "step" in values:  # FusedAdam counts for a whole group
            for name in group.parameters:
                if name in states:
                    states[name].setdefault("step", values["step"])
    whole = {
        name: {key: Source.of(value.clone()) if isinstance(value, Tensor) else value for key, value in state.items()}
        for name, state in states.items()
    }
    return OptimizerState(_kind(whole), groups, whole)


def _kind(states: dict[str, dict[str, Any]]) -> str:
    """The files do not name the optimizer: what it keeps tells its formula, and how it counts tells whose it is."""
    state = next(iter(states.values()), {})
    found = keeper_of(state, counts_in_tensors=isinstance(state.get("step"), Source))
    return found or f"one that keeps {listed(sorted(state)) or 'nothing'}"
