"""What a checkpoint holds, whoever wrote it and whoever reads it. Tensors are read one by one, when they are wanted.

A running engine is captured as a `Snapshot`, each layout on disk is read as one and written from one: what can be saved
can be converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Layout(str, Enum):
    """What a checkpoint can be converted to. DeepSpeed reads a universal one with any ZeRO stage."""

    HARMONY = "harmony"
    ZERO2 = "deepspeed-zero2"
    ZERO3 = "deepspeed-zero3"
    UNIVERSAL = "universal"
    HF = "hf"


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor whose form is known before it is read.

    Attributes:
        read: the tensor, in host memory. It may be somebody else's memory: who reads it must not write into it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @staticmethod
    def of(tensor: Tensor) -> Source:
        """A tensor that is there; on a device, it is copied when it is read."""
        return Source(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().cpu())

    def alone(self) -> Tensor:
        """The tensor for `torch.save`, which writes the whole memory that a view is part of: knowing only its own."""
        tensor = self.read().detach().contiguous()
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        octets: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        return torch.frombuffer(octets, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One parameter group: names of its parameters and its hyper-parameters."""

    parameters: tuple[str, ...]
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer.

    Attributes:
        kind: its class's name.
        states: by parameter: tensors (`Source`) and plain numbers under the optimizer's own keys.
    """

    kind: str
    groups: tuple[ParameterGroup, ...]
    states: dict[str, dict[str, Any]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.parameters)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A learning-rate scheduler: its class's name (None: not known) and its state_dict."""

    kind: str | None
    state: Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come.

    Attributes:
        micro_steps: at the last accumulation boundary; None: not known, so it follows from `global_steps`.
        accumulation: micro-batches of a step when it was saved.
        seed: of the micro-batches' random numbers.
        loss_scaler: what the dynamic loss scale depends on.
    """

    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int | None = None
    accumulation: int | None = None
    seed: int | None = None
    loss_scaler: dict[str, Any] | None = None

    def micro_steps_with(self, accumulation: int) -> int:
        """What a run counts on from that takes `accumulation` micro-batches in a step."""
        same = self.micro_steps is not None and self.accumulation == accumulation
        return self.micro_steps if same and self.micro_steps is not None else self.global_steps * accumulation


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a run goes on from.

    Attributes:
        origin: who wrote it, for messages.
        parameters: by name, in the dtype of compute; tied ones under their first name.
        masters: fp32 values beside those of `parameters` that are not fp32 themselves.
        buffers: the persistent ones.
        tied: other names of tied parameters -> their first name.
        frozen: parameters that are not trained.
        excluded: frozen parameters that were left out.
        extra: what modules save beside tensors (`get_extra_state`), by its key in the state dict.
        random: states of generators, None where nobody saved them.
        data: the position in the engine's own data loader.
        plan: the plan that ran, as JSON text.
    """

    origin: str
    progress: Progress
    parameters: dict[str, Source]
    buffers: dict[str, Source]
    masters: dict[str, Source] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerState | None = None
    scheduler: SchedulerState | None = None
    random: dict[str, Any] | None = None
    data: Any = None
    client_state: dict[str, Any] = field(default_factory=dict)
    plan: str | None = None

    @property
    def tensors(self) -> dict[str, Source]:
        """What a state dict has, tied parameters once."""
        return {**self.parameters, **self.buffers}

    def with_tied(self, values: dict[str, Any]) -> dict[str, Any]:
        """`values` by the names in `tensors`, and under their other names too."""
        return {**values, **{name: values[first] for name, first in self.tied.items() if first in values}}

    def fp32(self, name: str) -> Source:
        """The most precise value of a parameter."""
        return self.masters.get(name, self.parameters[name])


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for a message, the first few of them."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def state_tensors(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Source]:
    """Tensors of an optimizer's states, by "key/parameter", in the order of the parameters."""
    return {
        f"{key}/{name}": value
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Source)
    }
