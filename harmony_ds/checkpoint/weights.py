"""Weights for a model that was built on the meta device: from safetensors files, or from its modules' own initialization.

    with torch.device("meta"):
        model = Net()                                   shapes only
    harmony_ds.load_weights(model, "weights/")          parameters are the mapped files; nothing has been read yet
    engine, *_ = harmony_ds.initialize(model=model, ...)      read layer by layer, into host slabs

Parameters stay the same objects, so that an optimizer may have been built before. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.installed import belongs_to_engine
from harmony_ds.calls.patching import Item, patched
from harmony_ds.checkpoint.snapshot import listed
from harmony_ds.checkpoint.tensor_files import read_tensors
from harmony_ds.errors import CheckpointError, ModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path) -> None:
    """Gives `model` the tensors in safetensors files, which are mapped: memory is taken when they are read.

    Every parameter and persistent buffer must be there under its own name, with its shape, and nothing else; a tied
    parameter under one of its names, or under several with equal values. Parameters take the dtype of the file. Other
    buffers that are on the meta device are computed by their modules' own initialization, as in `initialize_weights`.

    Args:
        model: on the meta device, or in host memory.
        path: a safetensors file, its `.index.json`, or a directory with `model.safetensors` or its index.

    Raises:
        CheckpointError: a file cannot be read, or its tensors are not the model's.
        ModelError: a buffer is neither in the files nor computed by its module; or an engine holds the parameters.
    """
    if belongs_to_engine(model):
        raise ModelError("this model belongs to an engine: call that engine's destroy() before it gets other weights.")
    sources = {key: source for file in _files(Path(path)) for key, source in read_tensors(file).items()}
    places = _places(model)
    _check_names(places, sources, Path(path))
    for place in places:
        found = [key for key in place.names if key in sources]
        tensor = sources[found[0]].read()
        _check_tensor(place, found[0], tensor)
        for other in found[1:]:
            if not torch.equal(sources[other].read(), tensor):
                raise CheckpointError(
                    f"{place.names[0]} and {other} are one tensor in the model, and have different values in {path}."
                )
        place.put(tensor)
    initialize_weights(model)


@torch.no_grad()
def initialize_weights(model: nn.Module) -> tuple[str, ...]:
    """Gives memory and values to everything of `model` that is on the meta device; returns what that was, by name.

    Values come from the modules' own initialization, in the order in which modules are built (a module behind its
    children): transformers' `initialize_weights` for its models, `reset_parameters` of all others. What a constructor
    did to its parameters beyond that cannot be known, and does not happen.

    Raises:
        ModelError: something has no values then, because its module has no initialization of its own.
    """
    fresh = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta}
    calls = list(_initializers(model, "", fresh))
    tensors = [t for t in (*model.parameters(), *model.buffers()) if id(t) in fresh]
    for tensor in tensors:
        _become(tensor, _unset(tensor))
    # Numbers that cannot be NaN (positions, masks) show by their version that somebody wrote them.
    versions = {id(tensor): tensor._version for tensor in tensors}
    with _tied_once(model, fresh):
        for call in calls:
            call()
    unset = [fresh[id(t)] for t in tensors if t.numel() and _is_unset(t, versions[id(t)])]
    if unset:
        raise ModelError(_no_values(model, unset))
    return tuple(fresh.values())


# ---- the files


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not found:
            there = sorted(file.name for file in path.glob("*.safetensors*"))
            raise CheckpointError(
                f"{path} holds neither {_SINGLE} nor {_INDEX}"
                + (f": name one of {listed(there)}." if there else ", nor any other safetensors file.")
            )
        path = found[0]
    if path.suffix != ".json":
        return [path]
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error!r}).") from error
    return [path.parent / shard for shard in shards]


# ---- the model's tensors


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A parameter or a persistent buffer, and all its names; the first is canonical."""

    tensor: Tensor
    names: tuple[str, ...]

    def put(self, source: Tensor) -> None:
        if not isinstance(self.tensor, nn.Parameter):
            source = source.clone()  # a small one: it must not keep the whole file mapped
        if self.tensor.is_meta:
            _become(self.tensor, source)
        else:
            self.tensor.data = source


def _places(model: nn.Module) -> list[_Place]:
    tensors: dict[int, Tensor] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):  # not the extra state of a module
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    return [_Place(tensors[key], tuple(names[key])) for key in tensors]


def _check_names(places: list[_Place], keys: Mapping[str, object], path: Path) -> None:
    known = {name for place in places for name in place.names}
    missing = [place.names[0] for place in places if not any(name in keys for name in place.names)]
    unexpected = [key for key in keys if key not in known]
    if missing or unexpected:
        what = [f"lacks {listed(missing)}"] if missing else []
        what += [f"has {listed(unexpected)}, which the model has not"] if unexpected else []
        raise CheckpointError(
            f"{path} {' and '.join(what)}. Weights of transformers whose names differ from the model's are loaded by "
            "from_pretrained, which maps them too."
        )


def _check_tensor(place: _Place, key: str, tensor: Tensor) -> None:
    if tensor.shape != place.tensor.shape:
        raise CheckpointError(
            f"{key} has the shape {tuple(tensor.shape)} in the file, and {tuple(place.tensor.shape)} in the model."
        )
    if tensor.is_floating_point() != place.tensor.is_floating_point():
        raise CheckpointError(f"{key} is {tensor.dtype} in the file, and {place.tensor.dtype} in the model.")


def _become(tensor: Tensor, real: Tensor) -> None:
    """Makes `tensor` (meta) what `real` is. It stays the same object: modules and optimizers that hold it see it."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)


# ---- initialization


def _initializers(module: nn.Module, name: str, fresh: Mapping[int, str]) -> Iterator[Callable[[], Any]]:
    """What gives values to the tensors `fresh` (by id), in order.

    Raises:
        ModelError: a module cannot.
    """
    if _is_of_transformers(module):
        yield lambda: _initialize_transformers(module, fresh)
        return
    for child_name, child in module.named_children():
        yield from _initializers(child, f"{name}.{child_name}" if name else child_name, fresh)
    own = _own(module)
    mine = [fresh[id(tensor)] for tensor in own if id(tensor) in fresh]
    if not mine:
        return
    reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise ModelError(_no_values(module, mine))
    kept = [t for t in own if isinstance(t, nn.Parameter) and id(t) not in fresh]
    if kept:
        raise ModelError(
            f"{listed(mine)}: on the meta device, while other parameters of the same module have values, which its "
            "initialization would overwrite. Give all of it weights, or build the model with real buffers "
            "(accelerate.init_empty_weights)."
        )
    yield reset


def _is_of_transformers(module: nn.Module) -> bool:
    # By name: importing transformers takes seconds, and a model that is not from there does not need it.
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def _initialize_transformers(model: nn.Module, fresh: Mapping[int, str]) -> None:
    """Lets the model initialize what is `fresh`; the rest carries transformers' sign that it has values."""
    kept = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in fresh]
    for tensor in kept:
        tensor.__dict__["_is_hf_initialized"] = True
    for module in model.modules():
        if any(id(tensor) in fresh for tensor in _own(module)):
            module.__dict__.pop("_is_hf_initialized", None)
    initialize: Any = model.initialize_weights
    try:
        initialize()
    finally:
        for tensor in kept:
            tensor.__dict__.pop("_is_hf_initialized", None)


def _tied_once(model: nn.Module, fresh: Mapping[int, str]) -> AbstractContextManager[object]:
    """Shows each tied parameter to its first owner alone, so that the others do not initialize it once more."""
    seen: set[int] = set()
    hidden: list[Item] = []
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in fresh:
                continue
            if id(parameter) in seen:
                without = torch.empty_like(parameter, device="meta")
                hidden.append((module._parameters, key, nn.Parameter(without, parameter.requires_grad)))
            seen.add(id(parameter))
    return patched(hidden)


def _own(module: nn.Module) -> list[Tensor]:
    return [own for own in (*module._parameters.values(), *module._buffers.values()) if own is not None]


def _unset(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu")
    return real.fill_(torch.nan) if tensor.is_floating_point() else real.zero_()


def _is_unset(tensor: Tensor, version: int) -> bool:
    return bool(tensor.isnan().any()) if tensor.is_floating_point() else tensor._version == version


def _no_values(module: nn.Module, names: list[str]) -> str:
    return (
        f"{listed(names)} ({type(module).__name__}): on the meta device, and no reset_parameters() of its module gives it "
        "values. Build the model in host memory, or at least its buffers (accelerate.init_empty_weights), or load it by "
        "from_pretrained or harmony_ds.load_weights."
    )
