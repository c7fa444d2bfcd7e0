"""Universal checkpoints of DeepSpeed: one folder with fp32 value and optimizer state for each parameter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from harmony_ds.checkpoint.deepspeed.flat import Shapes
from harmony_ds.checkpoint.deepspeed.pickles import load_pickle
from harmony_ds.checkpoint.deepspeed.zero_read import OptimizerFiles, numbered, optimizer_of, snapshot_of
from harmony_ds.checkpoint.snapshot import Snapshot, Source, listed
from harmony_ds.errors import CheckpointError


def is_universal(folder: Path) -> bool:
    """Whether a tag's folder is a universal checkpoint."""
    return (folder / "zero" / "optimizer_state.pt").exists()


def read_universal(folder: Path) -> Snapshot:
    """Opens a universal checkpoint.

    Raises:
        CheckpointError: it is torn, or of model-parallel processes.
    """
    paths = numbered(folder, "*mp_rank_*_model_states.pt")
    if not paths:
        raise CheckpointError(f"{folder} has no *_model_states.pt.")
    # Of ZeRO-3 there is one for each process, with its parts of frozen parameters.
    whole = [path for path in paths if not path.name.startswith("zero_pp_rank_")]
    models = [load_pickle(path) for path in whole[:1] or paths]
    model = models[0]
    optimizer = load_pickle(folder / "zero" / "optimizer_state.pt")
    shapes: list[Shapes] = model.get("param_shapes") or []
    masters: dict[str, Source] = {}
    states: dict[str, dict[str, Any]] = {}
    step = _step_of(optimizer)
    for group in shapes:
        for name, shape in group.items():
            masters[name], states[name] = _parameter(folder / "zero" / name, name, tuple(shape), step)
    param_groups = optimizer.get("param_groups") or optimizer["optimizer_state_dict"]["param_groups"]
    trained = OptimizerFiles(masters, optimizer_of(param_groups, shapes, states), optimizer.get("loss_scaler"))
    return snapshot_of(models, trained)


def _step_of(optimizer: dict[str, Any]) -> Any:
    """ZeRO-3's universal checkpoints count for the whole optimizer."""
    states = optimizer.get("optimizer_state_dict", {}).get("state", {})
    return next((state["step"] for state in states.values() if "step" in state), None)


def _parameter(folder: Path, name: str, shape: tuple[int, ...], step: Any) -> tuple[Source, dict[str, Any]]:
    state: dict[str, Any] = {} if step is None else {"step": step}
    master: Source | None = None
    for path in sorted(folder.glob("*.pt")):
        content = load_pickle(path)
        if path.stem == "step":
            state["step"] = content
            continue
        tensor = content["param"] if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor) or tensor.numel() != math.prod(shape):
            raise CheckpointError(f"{path} does not hold a tensor of shape {list(shape)}.")
        source = Source.of(tensor.detach().view(shape))
        if path.stem == "fp32":
            master = source
        else:
            state[path.stem] = source
    if master is None:
        raise CheckpointError(
            f"{folder} has no fp32.pt for {name}; it holds {listed(p.name for p in folder.glob('*'))}."
        )
    return master, state
