"""Mechanisms of the schedule, and how each is switched off in a ds_config: to see what it is worth.

Every switch changes when and where things happen. Results are the same bits, except where `exact_on` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ablation:
    """One mechanism that is switched off, or done in another way.

    Attributes:
        name: for tables and command lines.
        harmony: keys of the "harmony" block, and what they are set to.
        description: what is done instead.
        others: keys of other blocks, nested as in the ds_config.
        requires: what must stand in the ds_config for this to differ from it.
        device: the kind of device on which it can make a difference ("": any).
        rounds_on: kinds of device on which results are not the same bits.
    """

    name: str
    harmony: Mapping[str, Any]
    description: str
    others: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    rounds_on: tuple[str, ...] = ()

    def exact_on(self, device: str) -> bool:
        """Whether results on a device of kind `device` are the same bits as without the change."""
        return device not in self.rounds_on

    def applies_to(self, config: Mapping[str, Any], device: str) -> bool:
        """Whether a run of the ds_config `config` on a device of kind `device` ("cpu", "cuda") could differ."""
        return self.device in ("", device) and _holds(config, self.requires)

    def applied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the ds_config `config` with the mechanism switched off; other keys stay as they are."""
        return _merged(_merged(config, {"harmony": self.harmony}), self.others)


def _holds(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    for key, value in wanted.items():
        given = config.get(key)
        nested = isinstance(value, Mapping) and isinstance(given, Mapping)
        if not (_holds(given, value) if nested else given == value):  # type: ignore[arg-type]
            return False
    return True


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged


_GROUPING = {"grouping": False}
_PREFETCH = {"prefetch": False}
_JUST_IN_TIME = {"just_in_time_update": False}
_OVERLAP = {"overlap_update": False}
_FUSED = {"fuse_last_pack": False}
_RESIDENCY = {"residency": "off"}
_DEVICE_UPDATES = ("cuda",)  # its kernels round otherwise than the host's

ABLATIONS: tuple[Ablation, ...] = (
    Ablation(
        "grouping",
        _GROUPING,
        "each micro-batch passes all packs on its own: weights in and gradients out once per micro-batch, not per step",
    ),
    Ablation("prefetch", _PREFETCH, "a pack is swapped in when it is needed, not while the one before it computes"),
    Ablation(
        "just-in-time-update",
        _JUST_IN_TIME,
        "updates begin when the whole backward pass is over, not as gradients arrive",
        requires={"gradient_clipping": 0},  # else they wait for the norm of all gradients in any case
    ),
    Ablation("overlap-update", _OVERLAP, "everything waits while the host measures gradients or updates weights"),
    Ablation(
        "fused-last-pack", _FUSED, "the last pack runs forward with the others and is recomputed in the backward pass"
    ),
    Ablation("stash-on-device", {"stash": "device"}, "all stashed inputs wait on the device, if they fit"),
    Ablation("stash-on-host", {"stash": "host"}, "all stashed inputs but the last pack's wait on the host"),
    Ablation(
        "residency",
        _RESIDENCY,
        "no pack is kept on the device from forward to backward, or from step to step: the host updates all",
        rounds_on=_DEVICE_UPDATES,
    ),
    Ablation("pinned-memory", {"pin_memory": False}, "host memory is not page-locked", device="cuda"),
    Ablation(
        "bf16-gradients",
        {},
        "gradients are summed and sent in bf16, not in fp32: a choice of dtype, which rounds",
        others={"data_types": {"grad_accum_dtype": "bf16"}},
        requires={"bf16": {"enabled": True}},
        rounds_on=("cpu", "cuda"),
    ),
    Ablation(
        "everything",
        {**_GROUPING, **_PREFETCH, **_JUST_IN_TIME, **_OVERLAP, **_FUSED, **_RESIDENCY},
        "grouping, prefetch, just-in-time and overlapped updates, the fused last pack and residency, all off",
        rounds_on=_DEVICE_UPDATES,
    ),
)
"""In the order in which a waterfall shows them; "everything" comes last."""
