"""Whether a saved optimizer fits the engine's, and its state in the form that the engine's keeps.

State goes by the names of parameters. Optimizers of one formula may take each other's place: torch's Adam and AdamW, and
DeepSpeed's compiled or fused ones, differ in how they count steps and in a few hyper-parameters only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harmony_ds.checkpoint.snapshot import OptimizerState, Source, listed
from harmony_ds.config.optimizers import same_formula
from harmony_ds.offload.host_optimizer import HostOptimizer

_HOW_NOT_WHAT = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Hyper-parameters that choose a kernel: the engine's own stay."""


def refusals_of_optimizer(optimizer: HostOptimizer, saved: OptimizerState | None) -> list[str]:
    """Why `saved` cannot go on in `optimizer`; empty if it can."""
    kind = type(optimizer.optimizer).__name__
    way_out = "load it with load_optimizer_states=False to start the optimizer afresh"
    if saved is None:
        return [f"it has no state for the optimizer {kind}: {way_out}"]
    if not same_formula(kind, saved.kind):
        return [f"its optimizer is {saved.kind} and this engine's {kind}: {way_out}"]
    ours, theirs = optimizer.groups(), tuple(group.parameters for group in saved.groups)
    complaints = []
    known, given = {name for names in ours for name in names}, {name for names in theirs for name in names}
    if known - given:
        complaints.append(f"its optimizer has no {listed(sorted(known - given))}")
    if given - known:
        complaints.append(f"its optimizer has {listed(sorted(given - known))}, which this engine's does not")
    if not complaints and [set(names) for names in ours] != [set(names) for names in theirs]:
        complaints.append(
            f"its {len(theirs)} parameter groups divide the parameters otherwise than this engine's {len(ours)}: {way_out}"
        )
    return complaints


def matching(optimizer: HostOptimizer, saved: OptimizerState) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Gives `optimizer` the saved hyper-parameters; yields, by parameter, a state of its own in the optimizer's form."""
    kind = type(optimizer.optimizer).__name__
    same = kind == saved.kind
    for present, group in zip(optimizer.optimizer.param_groups, saved.groups, strict=True):
        for key, value in group.values.items():
            if key not in _HOW_NOT_WHAT and (same or key in present):
                present[key] = value.clone() if isinstance(value, Tensor) else value
    for name in saved.names:
        state = saved.states.get(name)
        yield name, None if state is None else _taken(optimizer, state, optimizer.state_of(name), same)


def _taken(
    optimizer: HostOptimizer, state: Mapping[str, Any], present: Mapping[str, Any] | None, same: bool
) -> dict[str, Any]:
    """A saved state in the memory of the present one, where that has the same form."""
    taken: dict[str, Any] = {}
    for key, value in state.items():
        taken[key] = _read_into((present or {}).get(key), value) if isinstance(value, Source) else value
    if not same and "step" in taken:  # DeepSpeed's compiled optimizers count in a Python number, torch's in a tensor
        taken["step"] = int(taken["step"]) if optimizer.native else torch.tensor(float(taken["step"]))
    return taken


def _read_into(memory: Any, source: Source) -> Tensor:
    if isinstance(memory, Tensor) and tuple(memory.shape) == source.shape and memory.dtype == source.dtype:
        return memory.copy_(source.read())
    return source.read().clone()
