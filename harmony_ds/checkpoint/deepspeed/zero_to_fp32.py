"""DeepSpeed's `zero_to_fp32`, the module and the script beside a checkpoint, for checkpoints of ours too.

Tags, shards, dtypes and DeepSpeed's own checkpoints stay DeepSpeed's code. Of ours, that code is given the weights as it
takes those of ZeRO-3 itself: as objects that make a tensor when one is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmony_ds.checkpoint import layout
from harmony_ds.checkpoint.snapshot import Snapshot, Source

_READ = "_get_fp32_state_dict_from_zero_checkpoint"


def teach(namespace: dict[str, Any]) -> None:
    """Lets the functions of DeepSpeed's module, whose globals these are, read checkpoints of ours as well."""
    theirs: Callable[..., Any] = namespace[_READ]
    if theirs.__module__ == __name__:
        return

    def read(ds_checkpoint_dir: str, exclude_frozen_parameters: bool) -> Any:
        folder = Path(ds_checkpoint_dir)
        if layout.is_ours(folder):
            return _weights(layout.read(folder), exclude_frozen_parameters)
        return theirs(ds_checkpoint_dir, exclude_frozen_parameters)

    namespace[_READ] = read


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """What DeepSpeed's code asks of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    contiguous: Callable[[], Tensor]


def _weights(snapshot: Snapshot, exclude_frozen: bool) -> dict[str, Any]:
    """Buffers and trained parameters in fp32, frozen parameters as they were saved: as DeepSpeed has them."""
    left_out = snapshot.frozen if exclude_frozen else ()
    sources = {name: snapshot.fp32(name) for name in snapshot.parameters if name not in left_out}
    weights = {name: _weight(source, name in snapshot.frozen) for name, source in (snapshot.buffers | sources).items()}
    return snapshot.with_tied(weights)


def _weight(source: Source, as_saved: bool) -> _Weight:
    dtype = torch.float32 if source.dtype.is_floating_point and not as_saved else source.dtype
    return _Weight(torch.Size(source.shape), dtype, lambda: source.read().to(dtype).contiguous())
