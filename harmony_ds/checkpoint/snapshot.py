"""The content of a checkpoint, independent of its layout on disk; tensors are read one by one, when they are needed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harmony_ds.errors import CheckpointError
from harmony_ds.offload.wrappers import inner_tensors


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor whose shape and dtype are known before `read` returns it, in host memory that must not be written into."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorSource:
        """Wrap a tensor in memory; one on a device is copied when it is read."""
        return TensorSource(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().cpu())

    def to(self, dtype: torch.dtype) -> TensorSource:
        """Convert values of floating point when they are read; leave others."""
        if not self.dtype.is_floating_point:
            return self
        return TensorSource(self.shape, dtype, lambda: self.read().to(dtype))

    def compact(self) -> Tensor:
        """Return the tensor over memory of its own size alone: `torch.save` writes all of the memory that a view is of."""
        tensor = self.read().detach().contiguous()
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        octets: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        return torch.frombuffer(octets, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class WrapperSource:
    """A tensor of a class that keeps its values in other tensors, such as an optimizer's state in 8 bits.

    Attributes:
        kind: the class, as `module:name`.
        parts: the tensors that hold its values, by the names of its attributes.
        context: what else its `__tensor_flatten__` returns.
    """

    kind: str
    parts: dict[str, TensorSource]
    context: Any

    @staticmethod
    def from_tensor(tensor: Tensor) -> WrapperSource:
        """Take apart a wrapper whose values are in plain tensors."""
        wrapper: Any = tensor
        parts = {name: TensorSource.from_tensor(part) for name, part in inner_tensors(wrapper).items()}
        kind = type(wrapper)
        return WrapperSource(f"{kind.__module__}:{kind.__qualname__}", parts, wrapper.__tensor_flatten__()[1])

    def read(self) -> Tensor:
        """Return the tensor over memory of its own.

        Raises:
            CheckpointError: no class of this name has been imported.
        """
        module, _, name = self.kind.partition(":")
        kind: Any = getattr(sys.modules.get(module), name, None)  # a checkpoint must not say what is imported
        if not (isinstance(kind, type) and issubclass(kind, Tensor)):
            raise CheckpointError(
                f"the checkpoint holds a tensor of {self.kind}, which is not there: import its package."
            )
        inner = {key: source.read().clone() for key, source in self.parts.items()}
        made: Tensor = kind.__tensor_unflatten__(inner, self.context, None, None)  # type: ignore[attr-defined]
        return made


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One parameter group: names of its parameters and its hyper-parameters."""

    parameters: tuple[str, ...]
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer as it is in a checkpoint.

    Attributes:
        kind: its class's name.
        states: by parameter, its tensors (`TensorSource`, `WrapperSource`) and numbers, under its own keys.
    """

    kind: str
    groups: tuple[ParameterGroup, ...]
    states: dict[str, dict[str, Any]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.parameters)


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of a run.

    Attributes:
        micro_steps: at the last accumulation boundary; None: unknown, so it follows from `global_steps`.
        accumulation: micro-batches of a step when it was saved.
        seed: of the micro-batches' random numbers.
        loss_scaler: the attributes of DeepSpeed's dynamic loss scaler.
    """

    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int | None = None
    accumulation: int | None = None
    seed: int | None = None
    loss_scaler: dict[str, Any] | None = None

    def micro_steps_with(self, accumulation: int) -> int:
        """Return the micro-steps of a run that goes on with `accumulation` micro-batches in a step."""
        if self.micro_steps is None or self.accumulation != accumulation:
            return self.global_steps * accumulation
        return self.micro_steps


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a run goes on from.

    Attributes:
        parameters: by name, in the dtype of compute; tied ones under their first name.
        masters: fp32 values of those `parameters` that are not fp32 themselves.
        buffers: the persistent ones.
        tied: other names of tied parameters -> their first name.
        frozen: parameters that are not trained; they may have been left out of `parameters`.
        packed: how the parameters are quantized that `parameters` holds as bytes.
        extra: results of modules' `get_extra_state`, by their keys in the state dict.
        scheduler: the class's name (None: unknown) and the state_dict of the learning-rate scheduler.
        random: states of generators; None: not saved.
        data: the position in the engine's own data loader.
        plan: the plan that ran, as JSON text.
    """

    progress: Progress
    parameters: dict[str, TensorSource]
    buffers: dict[str, TensorSource]
    masters: dict[str, TensorSource] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    packed: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: SavedOptimizer | None = None
    scheduler: tuple[str | None, Any] | None = None
    random: dict[str, Any] | None = None
    data: Any = None
    client_state: dict[str, Any] = field(default_factory=dict)
    plan: str | None = None

    @property
    def tensors(self) -> dict[str, TensorSource]:
        """Parameters (tied ones once) and buffers."""
        return {**self.parameters, **self.buffers}

    def with_tied(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values`, by the names in `tensors`, under the other names of tied parameters too."""
        others = {name: values[first] for name, first in self.tied.items() if first in values}
        return {**values, **others}

    def fp32(self, name: str) -> TensorSource:
        """Return the most precise value of a parameter."""
        return self.masters.get(name, self.parameters[name])

    def check_plain(self, what: str) -> None:
        """Raise CheckpointError if `what`, an export, would hold bytes of quantized parameters that nobody reads."""
        packed = [name for name in self.packed if name in self.parameters]
        if packed:
            raise CheckpointError(
                f"{what} would hold {len(packed)} quantized weights as bytes of the engine's ({listed(packed, 2)}), "
                "which nothing else reads. Leave them out (exclude_frozen_parameters=True), or "
                "save adapters by model.save_pretrained, or all of it by torch.save(engine.module.state_dict(), path)."
            )


def listed(names: Iterable[str], most: int = 8) -> str:
    """Join names for a message, the first few of them."""
    listed_names = list(names)
    text = ", ".join(listed_names[:most])
    if len(listed_names) > most:
        text += f" and {len(listed_names) - most} more"
    return text
