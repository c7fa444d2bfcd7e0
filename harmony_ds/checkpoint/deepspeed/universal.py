"""Universal checkpoints of DeepSpeed, which every ZeRO stage reads: a folder with its values for each parameter."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmony_ds.checkpoint.deepspeed.zero_read import OWNED, ParameterShapes, numbered, optimizer_of, snapshot_of
from harmony_ds.checkpoint.folders import replace_text, saving
from harmony_ds.checkpoint.snapshot import SavedOptimizer, Snapshot, TensorSource, listed
from harmony_ds.checkpoint.tensor_files import load_pickle, write_pickle
from harmony_ds.errors import CheckpointError

_ADAM: dict[str, Any] = {"bias_correction": True, "decoupled_weight_decay": True, "foreach": None, "fused": None}
_ADAM |= dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
"""Hyper-parameters that only DeepSpeed's or only torch's Adam has."""
_logger = logging.getLogger(__name__)


def is_universal(folder: Path) -> bool:
    """Return whether a tag's folder is a universal checkpoint."""
    return (folder / "zero" / "optimizer_state.pt").exists()


def read_universal(folder: Path) -> Snapshot:
    """Open a universal checkpoint. Raise CheckpointError if it is torn, or of model-parallel processes."""
    whole = numbered(folder, "mp_rank_*_model_states.pt")[:1]
    # Of ZeRO-3 there is one for each process, with its parts of frozen parameters.
    models = [load_pickle(path) for path in whole or numbered(folder, "*mp_rank_*_model_states.pt")]
    if not models:
        raise CheckpointError(f"{folder} has no *_model_states.pt.")
    optimizer = load_pickle(folder / "zero" / "optimizer_state.pt")
    # ZeRO-3's count steps for the whole optimizer.
    counted = optimizer.get("optimizer_state_dict", {}).get("state", {}).values()
    step = next((state["step"] for state in counted if "step" in state), None)
    shapes: list[ParameterShapes] = models[0].get("param_shapes") or []
    masters: dict[str, TensorSource] = {}
    states: dict[str, dict[str, Any]] = {}
    for group in shapes:
        for name, shape in group.items():
            masters[name], states[name] = _parameter(folder / "zero" / name, name, tuple(shape), step)
    param_groups = optimizer.get("param_groups") or optimizer["optimizer_state_dict"]["param_groups"]
    return snapshot_of(models, masters, optimizer_of(param_groups, shapes, states), optimizer.get("loss_scaler"))


def _parameter(folder: Path, name: str, shape: tuple[int, ...], step: Any) -> tuple[TensorSource, dict[str, Any]]:
    state: dict[str, Any] = {} if step is None else {"step": step}
    for path in sorted(folder.glob("*.pt")):
        content = load_pickle(path)
        if path.stem == "step":
            state["step"] = content
            continue
        tensor = content["param"] if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor) or tensor.numel() != math.prod(shape):
            raise CheckpointError(f"{path} does not hold a tensor of shape {list(shape)}.")
        state[path.stem] = TensorSource.from_tensor(tensor.detach().view(shape))
    if "fp32" not in state:
        found = listed(path.name for path in folder.glob("*"))
        raise CheckpointError(f"{folder} has no fp32.pt for {name}; it holds {found}.")
    return state.pop("fp32"), state


def write_universal(snapshot: Snapshot, save_dir: Path, tag: str) -> Path:
    """Write `snapshot` as `save_dir`/`tag`, which must not exist, and point `latest_universal` to it."""
    optimizer = _checked(snapshot)
    target = save_dir / tag
    with saving(target) as folder:
        _write_files(snapshot, optimizer, folder)
    replace_text(save_dir / "latest_universal", tag)
    return target


def _checked(snapshot: Snapshot) -> SavedOptimizer:
    optimizer = snapshot.optimizer
    if optimizer is None:
        raise CheckpointError("a checkpoint without optimizer cannot become one of DeepSpeed.")
    if clashes := sorted(OWNED & snapshot.client_state.keys()):
        raise CheckpointError(f"the client state has {listed(clashes)}, which are DeepSpeed's own keys.")
    for name, state in optimizer.states.items():
        shape = snapshot.parameters[name].shape
        for key, value in state.items():
            if key != "step" and (not isinstance(value, TensorSource) or value.shape != shape):
                what = f"a tensor of shape {list(value.shape)}" if isinstance(value, TensorSource) else repr(value)
                raise CheckpointError(
                    f"{key} of {name} is {what}: DeepSpeed's layouts keep states of the parameter's shape "
                    f"({list(shape)}) and a step, so the state of {optimizer.kind} has no place there."
                )
    return optimizer


def _write_files(snapshot: Snapshot, optimizer: SavedOptimizer, folder: Path) -> None:
    steps = {name: step for one in optimizer.groups for name, step in _steps_of(optimizer, one.parameters).items()}
    for name in snapshot.parameters:
        parameter_folder = folder / "zero" / name
        parameter_folder.mkdir(parents=True)
        tensors = {"fp32": snapshot.fp32(name), **optimizer.states.get(name, {})}
        for key, source in tensors.items():
            if key != "step" and isinstance(source, TensorSource):
                write_pickle(parameter_folder / f"{key}.pt", {"cat_dim": 0, "param": source.compact().float()})
        if name in steps:
            write_pickle(parameter_folder / "step.pt", steps[name])
    write_pickle(folder / "zero" / "optimizer_state.pt", _optimizer_values(snapshot, optimizer))
    values = _model_values(snapshot, optimizer)
    write_pickle(folder / "mp_rank_00_model_states.pt", values)
    write_pickle(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", {**values, "module": {}})


def _steps_of(optimizer: SavedOptimizer, names: Iterable[str]) -> dict[str, Any]:
    """Return the steps of parameters that DeepSpeed counts together: the most that any of them has."""
    steps_found = {name: optimizer.states[name]["step"] for name in names if "step" in optimizer.states.get(name, {})}
    steps = {
        name: value.read().clone() if isinstance(value, TensorSource) else value for name, value in steps_found.items()
    }
    most: Any = max(steps.values(), key=float, default=None)
    if fewer := [name for name, step in steps.items() if float(step) != float(most)]:
        _logger.warning("DeepSpeed counts steps once for a group: %s had fewer than %g", listed(fewer), float(most))
    return dict.fromkeys(steps, most)


def _optimizer_values(snapshot: Snapshot, optimizer: SavedOptimizer) -> dict[str, Any]:
    from deepspeed import __version__
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    defaults = _ADAM if "Adam" in optimizer.kind else {}
    groups = [{**defaults, **one.values, "params": [index]} for index, one in enumerate(optimizer.groups)]
    common = {key: value for key, value in groups[0].items() if all(one.get(key) == value for one in groups)}
    common["params"] = []
    step: Any = next(iter(_steps_of(optimizer, optimizer.names).values()), None)
    if isinstance(step, Tensor) and (len(groups) > 1 or sum(one.nbytes for one in snapshot.parameters.values()) > 2e9):
        step = int(step)
    state, scaler = snapshot.progress.loss_scaler, LossScaler(scale=1)
    if state is not None:
        scaler = object.__new__(DynamicLossScaler)
        vars(scaler).update(state)
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": state is not None,
        "overflow": False,
        "zero_stage": ZeroStageEnum.gradients,
        "ds_version": str(__version__),
        "partition_count": [1] * len(groups),
        "param_groups": groups,
        # ZeRO-3 takes one group's values for all groups: those that differ stay as its script has them. And one step:
        # several of its sub-groups would all count up one tensor.
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [common]},
    }


def _model_values(snapshot: Snapshot, optimizer: SavedOptimizer) -> dict[str, Any]:
    """Return the content of a model_states file."""
    from deepspeed import __version__

    def shapes(names: Iterable[str]) -> dict[str, torch.Size]:
        return {name: torch.Size(snapshot.parameters[name].shape) for name in names}

    weights = {name: source.compact() for name, source in snapshot.tensors.items()}
    frozen = [name for name in snapshot.frozen if name in weights]
    progress, scheduler = snapshot.progress, snapshot.scheduler
    return {
        "module": snapshot.with_tied(weights),
        "buffer_names": list(snapshot.buffers),
        "param_shapes": [shapes(group.parameters) for group in optimizer.groups],
        "frozen_param_shapes": shapes(frozen),
        "shared_params": dict(snapshot.tied),
        "frozen_param_fragments": {name: weights[name] for name in frozen},
        "lr_scheduler": scheduler and scheduler[1],
        **dict.fromkeys(("optimizer", "data_sampler", "random_ltd")),
        "skipped_steps": progress.skipped_steps,
        "global_steps": progress.global_steps,
        "global_samples": progress.global_samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": str(__version__),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        **snapshot.client_state,
    }
