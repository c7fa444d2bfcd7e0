"""The "harmony" block: our own keys. Its types and docstrings make errors, options of the command line and docs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Strict, StrictBool, StrictInt, StrictStr
from pydantic.dataclasses import dataclass

_GIB = 2**30
_Count = Annotated[StrictInt, Field(ge=1)]
_Gib = Annotated[float, Strict(), Field(gt=0, le=2**30, allow_inf_nan=False)]
ResidencyChoice = Literal["auto", "kept", "off"] | Annotated[StrictInt, Field(ge=0)]
_NameList = Annotated[tuple[StrictStr, ...], Field(min_length=1)]


def _both_passes(value: object) -> object:
    """Return the rows of a layer call as (forward, backward)."""
    if isinstance(value, Mapping) and set(value) == {"forward", "backward"}:
        return value["forward"], value["backward"]
    return (value, value) if isinstance(value, int) else value


def _head_and_layers(value: object) -> object:
    """Return the tokens of a tile as (in the last layer and the loss, inside other layers)."""
    if isinstance(value, Mapping) and set(value) == {"head", "layers"}:
        return value["head"], value["layers"]
    return value


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class HarmonySettings:
    """The "harmony" block, and all that a plan is asked for beside the model and the machine."""

    device: StrictStr = "auto"
    """`"cpu"`, `"cuda"`, `"cuda:N"`, or `"auto"`: CUDA if there is one."""
    devices: Literal["all"] | _Count | _NameList = 1
    """Devices that one process drives as a pipeline: a number of at least 1, `"all"`, or a list of names such as
    `["cuda:0", "cuda:1"]`. See [parallel.md](parallel.md#a-pipeline-of-devices)."""
    parallel: Literal["auto", "pipeline"] = "pipeline"
    """Several `devices` are one pipeline; `"auto"`: one device alone where that is predicted to be faster."""
    device_memory_gib: _Gib | None = None
    """Device memory that may be used, in GiB. Without it nine tenths of what is free on CUDA, unlimited on the CPU."""
    pack_layers: _Count | None = None
    """Layer calls in a pack; searched unless given. See [planning.md](planning.md)."""
    layers: tuple[StrictStr, ...] = ()
    """A list of shell patterns over module names, such as `["model.layers.*"]` (a star matches points, too; of nested
    matches the outermost is a layer). Found unless given: those too large for the device are cut finer."""
    stash: Literal["auto", "device", "host"] = "auto"
    """Where inputs wait for backward; `"auto"`: on the device if they fit."""
    residency: ResidencyChoice = "auto"
    """Packs that stay on the device: `"auto"` (the fastest that fit), `"kept"` (weights alone, from forward to
    backward), `"off"`, or a number (the last of the backward pass, state and all). Several processes keep weights at
    most; with `pack_layers` or `plan` it is off unless given."""
    keep_graphs: StrictBool = True
    """Where memory is spare, resident packs keep autograd graphs, and are not recomputed. See
    [planning.md](planning.md)."""
    micro_batch: Annotated[
        Literal["config", "auto"] | Annotated[tuple[_Count, _Count], Strict()], BeforeValidator(_both_passes)
    ] = "config"
    """Rows that go through a layer at a time: `"config"` (one micro-batch, or fewer where nothing fits otherwise),
    `"auto"` (the fastest), a number of at least 1, or `{"forward": 8, "backward": 4}`. See
    [planning.md](planning.md#batch-sizes-of-layer-calls)."""
    tokens: Annotated[
        Literal["auto", "off"] | _Count | Annotated[tuple[_Count, _Count], Strict()], BeforeValidator(_head_and_layers)
    ] = "auto"
    """Tokens that go through the model's last layer and the loss at a time: `"auto"` (all, or fewer where nothing fits
    otherwise), `"off"` (all), or a number of at least 1. `{"head": 1024, "layers": 4096}`: also through parts of other
    layers. See [long_context.md](long_context.md)."""
    pin_memory: StrictBool = True
    """Page-lock host memory (CUDA). By default what DeepSpeed's offload blocks say."""
    seed: StrictInt | None = None
    """Seed of the micro-batches' random numbers; `torch.initial_seed()` unless given."""
    reproducible: StrictBool = True
    """Several processes add gradients up in the order of their ranks. See [parallel.md](parallel.md)."""
    split_masters: StrictBool = False
    """Keep fp32 masters of bf16 weights as the 16 bits below the weights: 2 bytes a parameter less on the host, and the
    same bits. Updates by torch's fused optimizers take longer. See [memory.md](memory.md)."""
    weights: Literal["auto", "whole", "share"] = "auto"
    """What each of several processes swaps in: the whole pack, or a share, with the rest from its peers; `"auto"`: a
    share where devices reach each other faster than the host. See [parallel.md](parallel.md)."""
    reduce: Literal["auto", "device", "host"] = "auto"
    """Where several processes add up their gradients; `"auto"`: where it is predicted to be faster (the CPU device: the
    host). See [parallel.md](parallel.md)."""
    plan: StrictStr | None = None
    """A file with a saved plan to run instead of a search."""
    profile: StrictStr | None = None
    """A file that keeps measured times and rates."""
    progress: StrictBool = True
    """Log what is measured and planned before the first step, and how long that step took (logger `harmony_ds.status`;
    standard error if the program handles no logs)."""
    unknown_keys: Literal["error", "warn"] = "error"
    """An unknown key outside of this block is an error, or a warning in the log."""
    grouping: StrictBool = True
    """A pack runs all micro-batches of the step while it is resident. See [ablations.md](ablations.md)."""
    prefetch: StrictBool = True
    """Swap the next pack in while this one computes."""
    gradient_slabs: _Count = 3
    """Host buffers for gradients whose update is not deferred."""

    @property
    def budget_bytes(self) -> int | None:
        return None if self.device_memory_gib is None else int(self.device_memory_gib * _GIB)


HARMONY_KEYS: Mapping[str, Any] = HarmonySettings.__pydantic_fields__  # type: ignore[attr-defined]
"""pydantic's FieldInfo of each key: type, default, description."""


def help_of(name: str) -> str:
    """Return the first sentence of the description of our key `name`."""
    return " ".join(HARMONY_KEYS[name].description.split()).split(". ")[0].replace("`", "").rstrip(".") + "."
