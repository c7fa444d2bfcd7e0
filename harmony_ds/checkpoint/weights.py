"""Weights from safetensors files for a model that was built on the meta device.

    with torch.device("meta"):
        model = Net()                                   shapes only
    harmony_ds.load_weights(model, "weights/")          parameters are the mapped files; nothing has been read yet
    engine, *_ = harmony_ds.initialize(model=model, ...)      read layer by layer, into host slabs

Parameters stay the same objects, so that an optimizer may have been built before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.installed import belongs_to_engine
from harmony_ds.calls.patching import patched
from harmony_ds.checkpoint.snapshot import Source, listed
from harmony_ds.checkpoint.tensor_files import read_tensors
from harmony_ds.errors import CheckpointError, ModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path) -> None:
    """Give `model` the tensors in safetensors files, which are mapped: memory is taken when they are read.

    Every parameter and persistent buffer must be there under its own name, with its shape, and nothing else; a tied
    parameter under one of its names, or under several with equal values. Parameters take the dtype of the file. Other
    buffers that are on the meta device are computed by transformers' `initialize_weights`, or by the `reset_parameters` of
    modules that have buffers alone.

    Args:
        path: a safetensors file, its `.index.json`, or a directory with `model.safetensors` or its index.

    Raises:
        CheckpointError: a file cannot be read, or its tensors are not the model's.
        ModelError: a buffer is neither in the files nor computed by its module; or an engine holds the parameters.
    """
    if belongs_to_engine(model):
        raise ModelError("this model belongs to an engine: call that engine's destroy() before it gets other weights.")
    sources = {key: source for file in _files(Path(path)) for key, source in read_tensors(file).items()}
    tensors = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    _check_names(tensors, sources, path)
    first: dict[int, str] = {}
    for key, source in sources.items():
        tensor, value = tensors[key], source.read()
        if value.shape != tensor.shape or value.is_floating_point() != tensor.is_floating_point():
            theirs, ours = (f"{one.dtype} of shape {tuple(one.shape)}" for one in (value, tensor))
            raise CheckpointError(f"{key} is {theirs} in the file, and {ours} in the model.")
        before = first.setdefault(id(tensor), key)
        if before == key:
            _put(tensor, value)
        elif not torch.equal(sources[before].read(), value):
            one = f"{before} and {key} are one tensor in the model"
            raise CheckpointError(f"{one}, and have different values in {path}.")
    _compute_buffers(model)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not found:
            there = sorted(file.name for file in path.glob("*.safetensors*"))
            others = f": name one of {listed(there)}." if there else ", nor any other safetensors file."
            raise CheckpointError(f"{path} holds neither {_SINGLE} nor {_INDEX}{others}")
        path = found[0]
    if path.suffix != ".json":
        return [path]
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error!r}).") from error
    return [path.parent / shard for shard in shards]


def _check_names(tensors: Mapping[str, Tensor], sources: Mapping[str, Source], path: str | Path) -> None:
    found = {id(tensor) for name, tensor in tensors.items() if name in sources}
    missing = {id(tensor): name for name, tensor in reversed([*tensors.items()]) if id(tensor) not in found}
    unexpected = [key for key in sources if key not in tensors]
    if missing or unexpected:
        what = [f"lacks {listed(reversed(missing.values()))}"] if missing else []
        what += [f"has {listed(unexpected)}, which the model has not"] if unexpected else []
        raise CheckpointError(
            f"{path} {' and '.join(what)}. Weights of transformers whose names differ from the model's are loaded by "
            "from_pretrained, which maps them too."
        )


def _put(tensor: Tensor, value: Tensor) -> None:
    if not isinstance(tensor, nn.Parameter):
        value = value.clone()  # a small one: it must not keep the whole file mapped
    if tensor.is_meta:
        _become(tensor, value)
    else:
        tensor.data = value


def _become(tensor: Tensor, real: Tensor) -> None:
    """Turn `tensor` (meta) into `real`. It stays the same object: modules and optimizers that hold it see it."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)


def _compute_buffers(model: nn.Module) -> None:
    """Give the buffers that are still on the meta device memory, and have their modules compute their values.

    NaN marks a number that was not set. Numbers that cannot be NaN (positions, masks) show it by their version.
    """
    fresh = {id(buffer): name for name, buffer in model.named_buffers() if buffer.is_meta}
    buffers = [buffer for buffer in model.buffers() if id(buffer) in fresh]
    for buffer in buffers:
        real = torch.empty_like(buffer, device="cpu")
        _become(buffer, real.fill_(torch.nan) if buffer.is_floating_point() else real.zero_())
    versions = [buffer._version for buffer in buffers]
    if buffers:
        _compute(model, fresh)
    unset = [
        fresh[id(buffer)]
        for buffer, version in zip(buffers, versions, strict=True)
        if buffer.numel() and (buffer.isnan().any() if buffer.is_floating_point() else buffer._version == version)
    ]
    if unset:
        raise _uncomputed(model, unset)


def _compute(module: nn.Module, fresh: Mapping[int, str]) -> None:
    """Call the methods that compute the buffers `fresh` (by id): transformers' for its models, else each module's own."""
    # By name: importing transformers takes seconds, and a model that is not from there does not need it.
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        _compute_transformers(module, fresh)
        return
    for child in module.children():
        _compute(child, fresh)
    if own := [fresh[id(buffer)] for buffer in module._buffers.values() if id(buffer) in fresh]:
        compute: Any = getattr(module, "reset_parameters", None)
        if compute is None or module._parameters:  # it would overwrite their values
            raise _uncomputed(module, own)
        compute()


def _compute_transformers(model: nn.Module, fresh: Mapping[int, str]) -> None:
    """Let the model initialize the `fresh` buffers; all others carry transformers' sign that they have values."""
    kept = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in fresh]
    for module in model.modules():
        if any(id(buffer) in fresh for buffer in module._buffers.values()):
            module.__dict__.pop("_is_hf_initialized", None)
    initialize: Any = model.initialize_weights
    with patched((tensor.__dict__, "_is_hf_initialized", True) for tensor in kept):
        initialize()


def _uncomputed(module: nn.Module, names: list[str]) -> ModelError:
    return ModelError(
        f"{listed(names)} ({type(module).__name__}): on the meta device, not in the files, and not computed by a "
        "reset_parameters() of a module of buffers alone. Build buffers in host memory (accelerate.init_empty_weights), or "
        "load the model by from_pretrained."
    )
