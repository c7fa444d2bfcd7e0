"""Mechanisms of the schedule, and how each is switched off in a ds_config: to see what it is worth.

Every switch changes when and where things happen. Results are the same bits, except where `exact_on` says otherwise.
"""

from __future__ import annotations

from harmony_ds.config.key import Ablation
from harmony_ds.config.keys import KEYS

__all__ = ["ABLATIONS", "Ablation"]

_ALONE = tuple(ablation for key in KEYS for ablation in key.ablations)
ABLATIONS: tuple[Ablation, ...] = (
    *_ALONE,
    Ablation(
        "everything",
        {path: value for one in _ALONE if not (one.is_choice or one.device) for path, value in one.changes.items()},
        "grouping, prefetch and residency, all off",
        rounds_on=tuple(device for ablation in _ALONE if not ablation.is_choice for device in ablation.rounds_on),
    ),
)
"""In the order in which a waterfall shows them; "everything" comes last."""
