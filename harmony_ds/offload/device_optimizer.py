"""Steps parameters that live on the device, with optimizer state that lives there too.

On the CPU device the user's own optimizer steps them: the same code on the same kind of memory gives the same bits. On
an accelerator an optimizer of torch's does so through its own kernels; DeepSpeed's compiled ones, which know host memory
only, are replaced by torch's of the same formula. Parameters and states are this room's own: they share nothing with
the host's. Knows no packs.

    configured             on the CPU device      on an accelerator
    torch.optim            itself                 itself, fused or parameter by parameter
    DeepSpeedCPUAdam       itself                 torch.optim.AdamW or Adam
    DeepSpeedCPUAdagrad    itself                 torch.optim.Adagrad
    DeepSpeedCPULion       itself                 Lion, below
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.config.optimizers import OptimizerRow
from harmony_ds.device.live_bytes import LiveBytes
from harmony_ds.errors import OptimizerError
from harmony_ds.offload.host_optimizer import HostOptimizer, Hyper, part_of
from harmony_ds.offload.native import native_of

_FUSED_ON_CUDA = (torch.optim.Adam, torch.optim.SGD)  # AdamW is an Adam
_GRAIN = 512
"""Allocators give memory in pieces of at least this many bytes."""
_STEPS = 8
"""RAdam takes more memory from its sixth step on."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Device bytes of one parameter's update: its state between steps, and what a step takes beside that."""

    state_bytes: int
    working_bytes: int


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675), with the state of DeepSpeed's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                state["step"] += 1
                momentum = state["exp_avg"]
                direction = (momentum * beta1).add_(parameter.grad, alpha=1 - beta1)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                # As DeepSpeed's: where the direction is zero, its sign still moves the parameter.
                parameter.sub_(torch.full_like(direction, group["lr"]).copysign_(direction))
                momentum.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


class DeviceOptimizer:
    """Steps subsets of the device's parameters with the hyper-parameters of the host's."""

    def __init__(self, host: HostOptimizer, device: torch.device) -> None:
        self._host = host
        self._on_host = device.type == "cpu"
        row = native_of(host.optimizer)
        stand_in = None
        if row is not None:
            coupled = not getattr(host.optimizer, "adam_w_mode", True)
            stand_in = stand_in_of(row, [nn.Parameter(torch.empty(0))], coupled)
        self._fused = device.type == "cuda" and isinstance(stand_in or host.optimizer, _FUSED_ON_CUDA)
        # Memory is asked of the stand-in in any case: compiled code cannot step tensors that have no memory.
        self._asked = part_of(stand_in or host.optimizer)
        self._replaced = stand_in is not None and not self._on_host
        self._kept_as = row.kept_as if row is not None and self._replaced else {}
        self._kept_back = {there: here for here, there in self._kept_as.items() if there}
        self._part = part_of(stand_in if stand_in is not None and self._replaced else host.part)
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._part.state = self.state
        self._known: dict[tuple[torch.Size, int], Footprint] = {}

    @property
    def refusal(self) -> str | None:
        """Why this optimizer cannot step anything on the device, if so."""
        if self._host.steps_whole:
            return f"the step of {type(self._host.optimizer).__name__} has to be called as a whole"
        if self._replaced and not all(
            group.get("bias_correction", True) for group in self._host.optimizer.param_groups
        ):
            return "bias_correction is off, which torch's Adam does not know"
        return None

    def trains(self, name: str) -> bool:
        """Whether the optimizer has the parameter `name`."""
        return self._host.trains(name)

    # ---- stepping

    def step(self, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Steps `parameters` (fp32, on the device) that have a gradient (the same) once."""
        values = tuple(map(self._values, hyper))
        if self._fused or self._host.native:
            self._host.step_part(self._part, parameters, gradients, values)
            return
        # One by one: torch's loops keep the last parameter's intermediate results while they compute the next one's.
        for name, gradient in gradients.items():
            self._host.step_part(self._part, parameters, {name: gradient}, values)

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Hyper-parameters as the optimizer on the device takes them."""
        if self._on_host:
            return dict(values)
        if self._replaced:
            defaults = self._part.defaults
            values = {**defaults, **{key: value for key, value in values.items() if key in defaults}}
        # Kernels for lists of tensors take memory for all of them at once, unless they are fused.
        flags: dict[str, Any] = {"foreach": False, "fused": self._fused}
        return {**values, **{key: flag for key, flag in flags.items() if key in values}}

    # ---- state, between host and device

    def was_replaced(self) -> bool:
        """Whether the host's state is another one than before."""
        return self._host.was_replaced()

    def copy_state_to_device(self, name: str, parameter: nn.Parameter) -> int:
        """Copies the host's state of `name`, if there is any, beside `parameter`; returns the bytes moved."""
        known = self._host.state_of(name)
        self.state.pop(parameter, None)
        if not known:
            if self._replaced:
                self.state[parameter] = _first_state(self._part, parameter)
            return 0
        read = {key: value for key, value in known.items() if self._kept_as.get(key, key)}
        self.state[parameter] = {
            self._kept_as.get(key, key): self._on_device(key, value, parameter) for key, value in read.items()
        }
        return sum(_bytes(value) for value in read.values())

    def state_as_on_host(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        """The state beside `parameter` as the host's of `name` would be, but with the device's own tensors."""
        values = {
            key: int(value) if self._replaced and key == "step" else value
            for key, value in self._named_as_on_host(self.state.get(parameter) or {}).items()
        }
        return {**(self._host.state_of(name) or {}), **values} if self._replaced else values

    def _named_as_on_host(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {self._kept_back.get(key, key): value for key, value in state.items()}

    def copy_state_to_host(self, name: str, parameter: nn.Parameter) -> int:
        """Copies the state beside `parameter` into the host's state of `name`; returns the bytes moved."""
        state = self.state.get(parameter)
        if not state:
            return 0
        known = self._host.state_of(name) or {}
        values = self.state_as_on_host(name, parameter)
        own = self._named_as_on_host(state)
        self._host.put_state(
            name, {key: _into(known.get(key), value) if key in own else value for key, value in values.items()}
        )
        return sum(_bytes(value) for value in state.values())

    def forget(self, parameter: nn.Parameter) -> None:
        """Drops the state beside `parameter`."""
        self.state.pop(parameter, None)

    def _on_device(self, key: str, value: Any, parameter: nn.Parameter) -> Any:
        if self._replaced and key == "step" and not isinstance(self._part, Lion):
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0 and not self._fused:
            return value.clone()  # counters stay where the optimizer reads them
        return torch.empty_like(value, device=parameter.device).copy_(value, non_blocking=True)

    # ---- memory

    def footprint(self, name: str, shape: torch.Size) -> Footprint:
        """Bytes of the update of a parameter of `shape`, found by stepping one that has no memory.

        Raises:
            OptimizerError: the optimizer cannot be asked.
        """
        key = (shape, self._host.group_of(name))
        if key not in self._known:
            try:
                self._known[key] = self._footprint(name, shape, "meta")
            except Exception:  # noqa: BLE001 - an optimizer that looks at values needs some
                try:
                    self._known[key] = self._footprint(name, shape, "cpu")
                except Exception as failure:
                    raise OptimizerError(
                        f"the memory that {type(self._host.optimizer).__name__} takes on the device cannot be found out: "
                        f"{failure!r}"
                    ) from failure
        return self._known[key]

    def _footprint(self, name: str, shape: torch.Size, place: str) -> Footprint:
        parameter = nn.Parameter(torch.zeros(shape, device=place))
        parameter.grad = torch.ones(shape, device=place)
        part = part_of(self._asked)
        part.state = defaultdict(dict)
        if not self._host.native:
            part.state[parameter] = {
                key: torch.empty_like(value, device=place).copy_(value)
                if isinstance(value, Tensor) and value.dim()
                else deepcopy(value)
                for key, value in (self._host.state_of(name) or {}).items()
            }
        else:
            part.state[parameter] = _first_state(part, parameter)
        values = self._host.hyper()[self._host.group_of(name)]
        known = {**part.defaults, **{k: v for k, v in values.items() if not self._host.native or k in part.defaults}}
        flags: dict[str, Any] = {key: False for key in ("foreach", "fused") if key in known}
        part.param_groups = [{**known, **flags, "params": [parameter]}]
        working = 0
        with LiveBytes(place) as probe:
            for _ in range(_STEPS):
                probe.reset()
                type(part).step(part)
                working = max(working, probe.peak_bytes() - probe.live_bytes())
        state = [value for value in part.state[parameter].values() if isinstance(value, Tensor)]
        # A scalar is on the device only where a fused kernel reads it there.
        return Footprint(sum(_rounded(value) for value in state), 0 if self._fused else working)


def stand_in_of(row: OptimizerRow, parameters: Iterable[Any], coupled: bool = False) -> torch.optim.Optimizer:
    """An optimizer over `parameters`, or groups of them, with the formula of DeepSpeed's compiled one in `row`, that an
    accelerator can run. `coupled`: weight decay is Adam's, not AdamW's.
    """
    name = "Adam" if coupled and row.on_device == "AdamW" else row.on_device
    cls: Any = Lion if name == "Lion" else getattr(torch.optim, name)
    stand_in: torch.optim.Optimizer = cls(parameters)
    return stand_in


def _first_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """What torch's Adagrad makes when it is constructed; others make theirs at the first step."""
    adagrad = isinstance(optimizer, torch.optim.Adagrad)
    return {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)} if adagrad else {}


def _into(known: Any, value: Any) -> Any:
    """A copy of `value` on the host, in the memory of `known` if that has its form."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(known, Tensor) or known.shape != value.shape or known.dtype != value.dtype:
        known = torch.empty_like(value, device="cpu")
    return known.copy_(value, non_blocking=True)


def _bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) and value.dim() else 0


def _rounded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _GRAIN) * _GRAIN
