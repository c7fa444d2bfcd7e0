"""Mechanisms of the schedule, and how each is switched off in a ds_config: to see what it is worth.

Every switch changes when and where things happen. Results are the same bits, except where `exact_on` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harmony_ds.config.paths import value_at, with_values

__all__ = ["ABLATIONS", "Ablation"]


@dataclass(frozen=True, slots=True)
class Ablation:
    """A mechanism that is switched off, or done in another way, to see what it is worth.

    Attributes:
        name: for tables and command lines.
        changes: values of keys, by their paths.
        description: what is done instead.
        requires: what the ds_config must say for this to differ from it, by path.
        device: the kind of device on which it can make a difference ("": any).
        rounds_on: kinds of device on which results are not the same bits.
        is_choice: nothing is switched off; the same is done in another way.
    """

    name: str
    changes: Mapping[str, object]
    description: str
    requires: Mapping[str, object] = field(default_factory=dict)
    device: str = ""
    rounds_on: tuple[str, ...] = ()
    is_choice: bool = False

    @property
    def harmony(self) -> dict[str, object]:
        """The changes in our own block, by the names of its keys."""
        return {path.removeprefix("harmony."): v for path, v in self.changes.items() if path.startswith("harmony.")}

    def exact_on(self, device: str) -> bool:
        """Return whether results on a device of kind `device` are the same bits as without the change."""
        return device not in self.rounds_on

    def applies_to(self, config: Mapping[str, Any], device: str) -> bool:
        """Return whether a run of the ds_config `config` on a device of kind `device` ("cpu", "cuda") could differ."""
        holds = all(value_at(config, path) == value for path, value in self.requires.items())
        return holds and self.device in ("", device)

    def applied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the ds_config `config` with the mechanism switched off; other keys stay as they are."""
        return with_values(config, self.changes)


_STASH_ON_DEVICE = "all stashed inputs wait on the device, if they fit"
_STASH_ON_HOST = "all stashed inputs but the last pack's wait on the host"
_RESIDENCY = "no pack is kept on the device from forward to backward, or from step to step: the host updates all"
_GROUPING = (
    "each micro-batch passes all packs on its own: weights in and gradients out once per micro-batch, not per step"
)
_PREFETCH = "a pack is swapped in when it is needed, not while the one before it computes"
_SWITCHES = (
    Ablation("residency", {"harmony.residency": "off"}, _RESIDENCY, rounds_on=("cuda",)),
    Ablation("pinned-memory", {"harmony.pin_memory": False}, "host memory is not page-locked", device="cuda"),
    Ablation("grouping", {"harmony.grouping": False}, _GROUPING),
    Ablation("prefetch", {"harmony.prefetch": False}, _PREFETCH),
)
ABLATIONS: tuple[Ablation, ...] = (
    Ablation("stash-on-device", {"harmony.stash": "device"}, _STASH_ON_DEVICE, is_choice=True),
    Ablation("stash-on-host", {"harmony.stash": "host"}, _STASH_ON_HOST, is_choice=True),
    *_SWITCHES,
    Ablation(
        "bf16-gradients",
        {"data_types.grad_accum_dtype": "bf16"},
        "gradients are summed and sent in bf16, not in fp32: a choice of dtype, which rounds",
        requires={"bf16.enabled": True},
        rounds_on=("cpu", "cuda"),
        is_choice=True,
    ),
    Ablation(
        "everything",
        {path: value for one in _SWITCHES if not one.device for path, value in one.changes.items()},
        "grouping, prefetch and residency, all off",
        rounds_on=("cuda",),
    ),
)
"""In the order in which a waterfall shows them; "everything" comes last."""
