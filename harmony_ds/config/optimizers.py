"""The optimizers that a ds_config may name and that are not run, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harmony_ds.config.settings import Section
from harmony_ds.errors import ConfigError

NOT_RUN = {
    "lamb": "its kernel is CUDA's and steps whole layers on the device",
    "muadam": "it belongs to the package mup, with optimizers of its own: pass one as optimizer=...",
    "muadamw": "it belongs to the package mup, with optimizers of its own: pass one as optimizer=...",
    "musgd": "it belongs to the package mup, with optimizers of its own: pass one as optimizer=...",
    "muon": "DeepSpeed's keeps Adam beside it for other parameters: pass torch.optim.Muon as optimizer=...",
    "onebitadam": "1-bit optimizers compress what processes exchange, and there is one process",
    "zerooneadam": "1-bit optimizers compress what processes exchange, and there is one process",
    "onebitlamb": "1-bit optimizers compress what processes exchange, and there is one process",
}
"""By DeepSpeed's name, in small letters; the 1-bit ones are an older DeepSpeed's."""


def refuse_what_is_not_run(section: Section | None) -> None:
    """Raises ConfigError if `section` names an optimizer that DeepSpeed knows and that is not run here."""
    reason = None if section is None else NOT_RUN.get(section.type.lower())
    if section is not None and reason is not None:
        raise ConfigError(f'"optimizer.type": {section.type} is not run: {reason}.')


_STATES = {
    **dict.fromkeys(("adagrad", "deepspeedcpuadagrad", "lion", "deepspeedcpulion", "asgd", "rmsprop"), 1),
    **dict.fromkeys(("sgd", "adafactor"), 0),
}


def state_numbers(name: str, options: Mapping[str, Any]) -> int | None:
    """fp32 numbers that the optimizer of this name keeps per parameter; None if it is not known."""
    name = name.lower()
    if name == "sgd" and options.get("momentum"):
        return 1
    return _STATES.get(name, 2 if "adam" in name else None)
