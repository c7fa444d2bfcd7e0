"""Plain weights of a checkpoint under the names of DeepSpeed's `zero_to_fp32`, the module and the script."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.checkpoint.convert import export_weights, open_checkpoint
from harmony_ds.checkpoint.snapshot import Snapshot, TensorSource

_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,  # noqa: ARG001
) -> dict[str, Tensor]:
    """Return the fp32 state dict of a checkpoint of any layout, the latest one without `tag`."""
    snapshot, sources = _opened(checkpoint_dir, tag, exclude_frozen_parameters, torch.float32)
    return snapshot.with_tied({name: source.read() for name, source in sources.items()})


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None) -> Any:
    """Load the fp32 weights of a checkpoint into `model`, and return it."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, *options: Any, **named: Any
) -> None:
    """Call `convert_zero_checkpoint_to_state_dict` for fp32; its other options are the same."""
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, *options, **named)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write pytorch_model.bin into `output_dir`, or model.safetensors, or shards and their index."""
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    snapshot, sources = _opened(checkpoint_dir, tag, exclude_frozen_parameters, kind)
    shard_size = sys.maxsize if max_shard_size is None else max_shard_size
    if safe_serialization:
        export_weights(sources, Path(output_dir), shard_size)
    else:
        export_weights(snapshot.with_tied(sources), Path(output_dir), shard_size, "pytorch_model.bin")


def _opened(
    folder: str | Path, tag: str | None, exclude_frozen: bool, dtype: torch.dtype
) -> tuple[Snapshot, dict[str, TensorSource]]:
    _, snapshot = open_checkpoint(Path(folder), tag)
    if not exclude_frozen:
        snapshot.check_plain("a state dict of plain weights")
    sources = {n: snapshot.fp32(n) for n in snapshot.parameters if not (exclude_frozen and n in snapshot.frozen)}
    weights: dict[str, TensorSource] = {}
    for name, source in (snapshot.buffers | sources).items():
        is_code = source.dtype in _CODES  # of quantized weights: fp32 does not hold all values
        weights[name] = source if is_code else source.to(dtype)
    return snapshot, weights


def main() -> None:
    """Run as DeepSpeed's `zero_to_fp32.py` and, by --dtype, its `zero_to_torch.py`."""
    parser = argparse.ArgumentParser(description="Make plain weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="a folder with checkpoints")
    parser.add_argument("output_dir")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="default: the latest checkpoint")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    arguments = vars(parser.parse_args())
    del arguments["debug"]
    convert_zero_checkpoint_to_state_dict(**arguments)
