"""Checkpoints that DeepSpeed goes on from: ZeRO-2 and ZeRO-3, of as many processes as will go on, and universal.

Weights are not copied. The two ZeRO layouts keep all parameters of a group in one vector, so that writing them takes
host memory for fp32 values and optimizer state once more; the universal layout is written parameter by parameter.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmony_ds.checkpoint.deepspeed.flat import ZERO2, ZERO3, ZeroForm
from harmony_ds.checkpoint.deepspeed.zero_read import OWNED
from harmony_ds.checkpoint.folders import making, point_latest
from harmony_ds.checkpoint.scripts import put_scripts
from harmony_ds.checkpoint.snapshot import Layout, OptimizerState, ParameterGroup, Snapshot, Source, listed
from harmony_ds.config.settings import SCALER_NAMES
from harmony_ds.errors import CheckpointError

_logger = logging.getLogger(__name__)


def to_deepspeed(
    snapshot: Snapshot,
    save_dir: Path,
    tag: str,
    layout: Layout,
    sub_group_size: int = 1_000_000_000,
    processes: int = 1,
) -> Path:
    """Writes `snapshot` as `save_dir`/`tag` for DeepSpeed, and points `latest` to it.

    Args:
        sub_group_size: of the ds_config that DeepSpeed will go on with; matters for ZeRO-3.
        processes: with so many DeepSpeed will go on; matters for ZeRO-2 and 3.

    Raises:
        CheckpointError: there is something that DeepSpeed's layout has no place for, or it cannot be written there.
    """
    optimizer = _checked(snapshot)
    target = save_dir / tag
    try:
        with making(target) as folder:
            if layout is Layout.UNIVERSAL:
                _write_universal(snapshot, optimizer, folder)
            else:
                form = ZERO3 if layout is Layout.ZERO3 else ZERO2
                _write_zero(snapshot, optimizer, folder, form, sub_group_size, processes)
        if layout is Layout.UNIVERSAL:
            point_latest(save_dir, tag, "latest_universal")
        else:
            point_latest(save_dir, tag)
            put_scripts(save_dir, ours=False)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    return target


def _checked(snapshot: Snapshot) -> OptimizerState:
    optimizer = snapshot.optimizer
    if optimizer is None:
        raise CheckpointError(f"a checkpoint of {snapshot.origin} without optimizer cannot become one of DeepSpeed.")
    if clashes := sorted(OWNED & snapshot.client_state.keys()):
        raise CheckpointError(f"the client state has {listed(clashes)}, which are DeepSpeed's own keys.")
    for name, state in optimizer.states.items():
        shape = snapshot.parameters[name].shape
        for key, value in state.items():
            if key != "step" and (not isinstance(value, Source) or value.shape != shape):
                what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Source) else repr(value)
                raise CheckpointError(
                    f"{key} of {name} is {what}: DeepSpeed's layouts keep states of the parameter's shape "
                    f"({list(shape)}) and a step, so the state of {optimizer.kind} has no place there."
                )
    return optimizer


# ---- what all layouts have


def _model_states(
    snapshot: Snapshot, vectors: list[tuple[str, ...]], form: ZeroForm, rank: int = 0, processes: int = 1
) -> dict[str, Any]:
    """A model_states file; ZeRO-3's has no weights, but the process's parts of frozen ones."""
    import deepspeed

    shapes = [OrderedDict((n, torch.Size(snapshot.parameters[n].shape)) for n in names) for names in vectors]
    weights = {name: source.alone() for name, source in snapshot.parameters.items()}
    fragments = OrderedDict((name, weights[name]) for name in snapshot.frozen if name in weights)
    if form is ZERO3:
        flat = {name: value.reshape(-1) for name, value in fragments.items()}
        fragments = OrderedDict((name, form.part([len(v)], v, rank, processes)[0]) for name, v in flat.items())
    module = OrderedDict((name, torch.empty(0, dtype=w.dtype) if form is ZERO3 else w) for name, w in weights.items())
    module.update((other, module[first]) for other, first in snapshot.tied.items())
    module.update((name, source.alone()) for name, source in snapshot.buffers.items())
    progress = snapshot.progress
    return {
        "module": module,
        "buffer_names": list(snapshot.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((n, torch.Size(snapshot.parameters[n].shape)) for n in fragments),
        "shared_params": dict(snapshot.tied),
        "frozen_param_fragments": fragments,
        "lr_scheduler": None if snapshot.scheduler is None else snapshot.scheduler.state,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": progress.skipped_steps,
        "global_steps": progress.global_steps,
        "global_samples": progress.global_samples,
        "dp_world_size": processes,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": str(deepspeed.__version__),
        **snapshot.client_state,
    }


def _common(snapshot: Snapshot, stage: str) -> dict[str, Any]:
    """What the optimizer's files of all layouts have."""
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    state = snapshot.progress.loss_scaler
    if state is None:
        scaler = LossScaler(scale=1)
    else:
        rules = {theirs: state["settings"][ours] for ours, theirs in SCALER_NAMES.items()}
        scaler = DynamicLossScaler(init_scale=state["scale"], **rules)
        scaler.cur_iter = state["step"]
        scaler.last_overflow_iter = state["last_overflow"]
        scaler.cur_hysteresis = state["hysteresis"]
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": state is not None,
        "overflow": False,
        "zero_stage": ZeroStageEnum[stage],
        "ds_version": str(deepspeed.__version__),
    }


def _param_groups(optimizer: OptimizerState, vectors_of: list[list[int]]) -> list[dict[str, Any]]:
    """Hyper-parameters, those that only DeepSpeed's or only torch's Adam has included."""
    adam: dict[str, Any] = {
        "bias_correction": True,
        "amsgrad": False,
        "decoupled_weight_decay": True,
        "maximize": False,
    }
    adam |= {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
    defaults = adam if "Adam" in optimizer.kind else {}
    groups = zip(optimizer.groups, vectors_of, strict=True)
    return [{**defaults, **group.values, "params": vectors} for group, vectors in groups]


def _step_of(optimizer: OptimizerState, names: Iterable[str]) -> Any:
    """DeepSpeed counts once for all of `names`."""
    found = {name: optimizer.states[name]["step"] for name in names if "step" in optimizer.states.get(name, {})}
    if not found:
        return None
    steps = {name: value.read() if isinstance(value, Source) else value for name, value in found.items()}
    most = max(steps.values(), key=float)
    behind = [name for name, step in steps.items() if float(step) != float(most)]
    if behind:
        _logger.warning("DeepSpeed counts steps once for a group: %s had fewer than %g", listed(behind), float(most))
    return most.clone() if isinstance(most, Tensor) else most


# ---- ZeRO-2 and ZeRO-3


def _write_zero(
    snapshot: Snapshot, optimizer: OptimizerState, folder: Path, form: ZeroForm, sub_group_size: int, processes: int
) -> None:
    vectors: list[tuple[str, ...]] = []
    vectors_of: list[list[int]] = []
    for group in optimizer.groups:
        cut = _sub_groups(snapshot, group, sub_group_size, processes) if form is ZERO3 else [group.parameters]
        vectors_of.append(list(range(len(vectors), len(vectors) + len(cut))))
        vectors += cut
    flat = [_flat({name: snapshot.fp32(name) for name in names}) for names in vectors]
    found = {index: _flat_state(snapshot, optimizer, names) for index, names in enumerate(vectors)}
    numels = [[snapshot.parameters[name].numel for name in names] for names in vectors]
    half = any(source.dtype == torch.bfloat16 for source in snapshot.parameters.values())
    for rank in range(processes):
        base, parts, paddings = _part_of_rank(form, numels, flat, found, rank, processes)
        states = {
            **_common(snapshot, form.stage),
            form.base: {"state": base, "param_groups": _param_groups(optimizer, vectors_of)},
            form.flat: parts,
            "partition_count": processes if form is ZERO3 else [processes] * len(vectors),
        }
        if form is ZERO2:
            states["group_paddings"] = paddings
            states["param_alignment_paddings"] = [[0] * len(names) for names in vectors]
        if form is ZERO3 or rank == 0:
            prefix = f"zero_pp_rank_{rank}_" if form is ZERO3 else ""
            model = _model_states(snapshot, vectors, form, rank, processes)
            torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": states, "ds_config": {}, "ds_version": states["ds_version"]},
            folder / f"{'bf16_' if half else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


def _part_of_rank(
    form: ZeroForm,
    numels: list[list[int]],
    flat: list[Tensor],
    found: dict[int, dict[str, Any]],
    rank: int,
    processes: int,
) -> tuple[dict[int, dict[str, Any]], list[Tensor], list[int]]:
    """Return one process's parts: of the states, of the vectors, and the paddings of these."""

    def own(index: int, vector: Any) -> Any:
        return form.part(numels[index], vector, rank, processes)[0] if _is_flat(vector) else vector

    states = {i: {key: own(i, value) for key, value in state.items()} for i, state in found.items() if state}
    paddings = [form.part(n, v, rank, processes)[1] for n, v in zip(numels, flat, strict=True)]
    parts = [own(index, vector) for index, vector in enumerate(flat)]
    return states, [part[: len(part) - padding] for part, padding in zip(parts, paddings, strict=True)], paddings


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _sub_groups(snapshot: Snapshot, group: ParameterGroup, most: int, processes: int) -> list[tuple[str, ...]]:
    """As ZeRO-3 cuts a parameter group: a part is closed by the parameter whose share makes it large enough."""
    parts: list[list[str]] = [[]]
    count = 0
    for name in group.parameters:
        if count >= most:
            parts.append([])
            count = 0
        parts[-1].append(name)
        count += -(-snapshot.parameters[name].numel // processes)
    return [tuple(part) for part in parts]


def _flat(sources: dict[str, Source]) -> Tensor:
    """One after another."""
    vector = torch.zeros(sum(source.numel for source in sources.values()))
    offset = 0
    for source in sources.values():
        vector[offset : offset + source.numel].copy_(source.read().reshape(-1))
        offset += source.numel
    return vector


def _flat_state(snapshot: Snapshot, optimizer: OptimizerState, names: tuple[str, ...]) -> dict[str, Any]:
    known = [optimizer.states[name] for name in names if name in optimizer.states]
    keys = list(dict.fromkeys(key for state in known for key in state))
    found: dict[str, Any] = {}
    for key in keys:
        if key == "step":
            found[key] = _step_of(optimizer, names)
            continue
        sources: dict[str, Source] = {}
        for name in names:
            nothing = Source.of(torch.zeros(()).expand(snapshot.parameters[name].shape))
            sources[name] = optimizer.states.get(name, {}).get(key, nothing)
        found[key] = _flat(sources)
    return found


# ---- universal


def _write_universal(snapshot: Snapshot, optimizer: OptimizerState, folder: Path) -> None:
    vectors = [group.parameters for group in optimizer.groups]
    for name in snapshot.parameters:
        own = folder / "zero" / name
        own.mkdir(parents=True)
        tensors = {"fp32": snapshot.fp32(name), **optimizer.states.get(name, {})}
        for key, source in tensors.items():
            if key != "step" and isinstance(source, Source):
                torch.save({"cat_dim": 0, "param": source.alone().float()}, own / f"{key}.pt")
        if (step := _step_of(optimizer, [name])) is not None:
            torch.save(step, own / "step.pt")
    groups = _param_groups(optimizer, [[index] for index in range(len(vectors))])
    step = _step_of(optimizer, optimizer.names)
    common = {
        **_common(snapshot, ZERO2.stage),
        "partition_count": [1] * len(vectors),
        "param_groups": groups,
        # ZeRO-3 looks for these two in here
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    states = {
        **_model_states(snapshot, vectors, ZERO2),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    torch.save({**states, "module": OrderedDict()}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
