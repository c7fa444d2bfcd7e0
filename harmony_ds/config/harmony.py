"""The "harmony" block: our own keys. A field is its row of the table of keys; its note is its documentation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from harmony_ds.config import forms
from harmony_ds.config.forms import Form, optional
from harmony_ds.config.key import Ablation, Effect, Key, Option

_GIB = 2**30
_NO_CLIPPING = {"gradient_clipping": 0}  # else updates wait for the norm of all gradients in any case
DEVICE_UPDATES = ("cuda",)
"""Where a device's own kernels update resident packs, and round otherwise than the host's."""


def _key(
    form: Form, default: Any, note: str, *ablations: Ablation, shown: str = "", option: Option | None = None
) -> Any:
    """A field; its default is that of the key."""
    row = {"form": form, "default": default, "note": note, "shown": shown, "option": option, "ablations": ablations}
    return field(default=default, metadata=row)


def _off(name: str, key: str, instead: str, value: object = False, **more: Any) -> Ablation:
    return Ablation(name, {f"harmony.{key}": value}, instead, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSwitches:
    """How a plan is carried out. Every plan knows what it was made with: see `harmony_ds.scheduler.plan.Policy`."""

    grouping: bool = _key(
        forms.SWITCH,
        True,
        "a pack on the device runs all micro-batches of the step; else each passes all packs on its own "
        "([ablations.md](ablations.md))",
        _off(
            "grouping",
            "grouping",
            "each micro-batch passes all packs on its own: weights in and gradients out once per micro-batch, not per step",
        ),
    )
    prefetch: bool = _key(
        forms.SWITCH,
        True,
        "swap the next pack in while this one computes",
        _off("prefetch", "prefetch", "a pack is swapped in when it is needed, not while the one before it computes"),
    )
    just_in_time_update: bool = _key(
        forms.SWITCH,
        True,
        "without clipping or loss scaling, a pack is updated as soon as its gradients arrive; else when the backward pass "
        "is over",
        _off(
            "just-in-time-update",
            "just_in_time_update",
            "updates begin when the whole backward pass is over, not as gradients arrive",
            requires=_NO_CLIPPING,
        ),
    )
    overlap_update: bool = _key(
        forms.SWITCH,
        True,
        "the host updates weights while the device computes; else everything waits for it",
        _off(
            "overlap-update",
            "overlap_update",
            "everything waits while the host measures gradients or updates weights",
        ),
    )
    fuse_last_pack: bool = _key(
        forms.SWITCH,
        True,
        "forward, loss and backward of the last pack are one; else it runs forward with the others and is recomputed",
        _off(
            "fused-last-pack",
            "fuse_last_pack",
            "the last pack runs forward with the others and is recomputed in the backward pass",
        ),
    )
    gradient_slabs: int = _key(forms.COUNT, 3, "host buffers for gradients whose update is not deferred")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonySettings(PlanSwitches):
    """The "harmony" block, and all that a plan is asked for beside the model and the machine."""

    device: str = _key(forms.DEVICE, "auto", '`"cpu"`, `"cuda"`, `"cuda:N"`; auto takes CUDA if there is one')
    device_memory_gib: float | None = _key(
        optional(forms.AMOUNT),
        None,
        "budget in GiB; without it nine tenths of what is free on CUDA, unlimited on the CPU",
        shown="none",
        option=Option("--device-memory-gib", "Device memory that may be used, in GiB.", 0.001),
    )
    pack_layers: int | None = _key(
        optional(forms.COUNT), None, "layer calls in a pack ([planning.md](planning.md))", shown="searched"
    )
    layers: tuple[str, ...] = _key(
        forms.PATTERNS, (), 'shell patterns over module names, such as `["model.layers.*"]`', shown="found"
    )
    stash: str = _key(
        forms.PLACE,
        "auto",
        'where inputs wait for backward: on the device if they fit, `"device"`, `"host"`',
        _off(
            "stash-on-device", "stash", "all stashed inputs wait on the device, if they fit", "device", is_choice=True
        ),
        _off(
            "stash-on-host", "stash", "all stashed inputs but the last pack's wait on the host", "host", is_choice=True
        ),
    )
    residency: str | int = _key(
        forms.PACKS,
        "auto",
        'packs that stay on the device, state and all: what the search finds fastest within a budget; `"off"` none; N the '
        "last N of the backward pass. With `pack_layers` or `plan`: off unless given",
        _off(
            "residency",
            "residency",
            "no pack is kept on the device from forward to backward, or from step to step: the host updates all",
            "off",
            rounds_on=DEVICE_UPDATES,
        ),
    )
    micro_batch: str | tuple[int, int] = _key(
        forms.ROWS,
        "config",
        'rows of a micro-batch that go through a layer at a time: all; `"auto"`: what the search finds fastest; N, or '
        '`{"forward": N, "backward": M}` ([planning.md](planning.md#pieces-of-a-micro-batch))',
    )
    pin_memory: bool = _key(
        forms.SWITCH,
        True,
        "page-lock host memory (CUDA); by default what DeepSpeed's offload blocks say",
        _off("pinned-memory", "pin_memory", "host memory is not page-locked", device="cuda"),
    )
    seed: int | None = _key(
        optional(forms.WHOLE), None, "of the micro-batches' random numbers", shown="`torch.initial_seed()`"
    )
    reproducible: bool = _key(
        forms.SWITCH,
        True,
        "several processes add gradients up in the order of their ranks; else as their library likes "
        "([parallel.md](parallel.md))",
    )
    plan: str | None = _key(
        optional(forms.FILE), None, "a file with a saved plan to run in the place of a search", shown="none"
    )
    profile: str | None = _key(
        optional(forms.FILE), None, "a file in which measured times and rates are kept", shown="none"
    )

    @property
    def budget_bytes(self) -> int | None:
        return None if self.device_memory_gib is None else int(self.device_memory_gib * _GIB)


OURS: tuple[Key, ...] = tuple(
    Key(f"harmony.{one.name}", Effect.OURS, **one.metadata) for one in fields(HarmonySettings)
)
