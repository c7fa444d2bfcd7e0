"""The ds_config's optimizer "Muon", as DeepSpeed 0.19.8 makes it: Muon for matrices, and an Adam for all other parameters.

Parameters of two or more dimensions are Muon's, but for those with "embed" or "lm_head" in their names. Momenta are
orthogonalized by DeepSpeed's own code (Jordan et al.: Muon, 2024; https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from harmony_ds.config import Section
from harmony_ds.config.hints import did_you_mean
from harmony_ds.errors import ConfigError

MUON = "muon"
"""Its name in a ds_config, in small letters."""
_OF_MUON = ("lr", "momentum", "weight_decay", "ns_method")
_OF_ADAM = ("lr", "betas", "eps", "weight_decay")
_OF_BOTH = ("muon_lr", "adam_lr", "adam_w_mode", "torch_adam", "fp32_optimizer_states")
_NOT_MATRICES = ("embed", "lm_head")
MakeAdam = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def mark_parameters(model: nn.Module, section: Section | None) -> None:
    """Set `use_muon` of every parameter of `model`, as `deepspeed.initialize` does, if `section` names Muon."""
    if section is None or section.type.lower() != MUON:
        return
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() >= 2 and not any(word in name.lower() for word in _NOT_MATRICES)
        parameter.use_muon = is_matrix  # type: ignore[attr-defined]


def split_groups(params: Mapping[str, Any], given: Iterable[Any]) -> list[dict[str, Any]]:
    """Return two parameter groups for each given one: matrices for Muon, and the others, with the options of each.

    What a given group says of itself comes first, then `muon_lr` and `adam_lr`, then what `params` says for both.

    Args:
        params: of the ds_config's optimizer block.
        given: parameters of a model after `mark_parameters`, or groups of them.

    Raises:
        ConfigError: `params` has a name that neither takes, or asks for Muon of single attention heads.
    """
    known = (*_OF_MUON, *_OF_ADAM, *_OF_BOTH)
    if params.get("per_head_muon"):
        raise ConfigError('"optimizer.params.per_head_muon" is not supported: whole matrices are orthogonalized.')
    for name in params:
        if name not in (*known, "per_head_muon"):
            raise ConfigError(f'"optimizer.params" of Muon does not take "{name}". {did_you_mean(name, known)}')
    entries = list(given)
    groups = [dict(entry) for entry in entries if isinstance(entry, dict)] or [{"params": entries}]
    split: list[dict[str, Any]] = []
    for group in groups:
        for use_muon, keys, own_rate in ((True, _OF_MUON, "muon_lr"), (False, _OF_ADAM, "adam_lr")):
            chosen = [
                p for p in _parameters_of(group) if p.requires_grad and bool(getattr(p, "use_muon", False)) is use_muon
            ]
            options = {key: params[key] for key in keys if key in params}
            if own_rate in params:
                options["lr"] = params[own_rate]
            options.update({key: group[key] for key in keys if key in group})
            if chosen:
                split.append({**options, "params": chosen, "use_muon": use_muon})
    return split


def _parameters_of(group: Mapping[str, Any]) -> list[Any]:
    held = group["params"]
    held = [held] if isinstance(held, torch.Tensor) else list(held)
    return [entry[1] if isinstance(entry, tuple) else entry for entry in held]


def make_muon(groups: list[dict[str, Any]], params: Mapping[str, Any], make_adam: MakeAdam) -> torch.optim.Optimizer:
    """Return DeepSpeed's optimizer over `groups`, which `split_groups` made; `make_adam` makes the one of the others."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # compiles its kernels when it first steps

    made: torch.optim.Optimizer = MuonWithAuxAdam(
        groups, adam_optimizer=make_adam, adam_w_mode=params.get("adam_w_mode", True)
    )
    return made
