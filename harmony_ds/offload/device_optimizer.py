"""Steps parameters that live on the device, with optimizer state that lives there too.

On the CPU device the user's own optimizer steps them: the same code on the same kind of memory gives the same bits. On
an accelerator an optimizer of torch's does so through its own kernels; DeepSpeed's compiled ones, which know host memory
only, are replaced by torch's of the same formula. Parameters and states are this room's own: they share nothing with
the host's. Knows no packs.

    configured             on the CPU device      on an accelerator
    torch.optim            itself                 itself, fused or parameter by parameter
    DeepSpeedCPUAdam       itself                 torch.optim.AdamW or Adam
    DeepSpeedCPUAdagrad    itself                 torch.optim.Adagrad
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.config.optimizers import OptimizerRow, state_numbers
from harmony_ds.offload.host_optimizer import HostOptimizer, Hyper, part_of
from harmony_ds.offload.native import native_of

_TEMPORARIES = {"AdamW": 2, "Adam": 2, "Adagrad": 1, "SGD": 0}
"""Tensors of a parameter's size that torch's step of one parameter takes; those of other classes are not known."""
_GRAIN = 512
"""Allocators give memory in pieces of at least this many bytes."""


class DeviceOptimizer:
    """Steps subsets of the device's parameters with the hyper-parameters of the host's."""

    def __init__(self, host: HostOptimizer, device: torch.device) -> None:
        self._host = host
        self._on_host = device.type == "cpu"
        row = native_of(host.optimizer)
        stand_in = None if row is None else stand_in_of(row, [nn.Parameter(torch.empty(0))], _is_coupled(host))
        self._replaced = stand_in is not None and not self._on_host
        self._kind = _kind_of(stand_in or host.optimizer)
        self._fused = device.type == "cuda" and self._kind in ("AdamW", "Adam", "SGD")
        self._kept_as = row.kept_as if row is not None and self._replaced else {}
        self._kept_back = {there: here for here, there in self._kept_as.items()}
        self._part = part_of(stand_in if stand_in is not None and self._replaced else host.part)
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._part.state = self.state

    @property
    def refusal(self) -> str | None:
        """Why this optimizer cannot step anything on the device, if so."""
        if self._host.steps_whole:
            return f"the step of {type(self._host.optimizer).__name__} has to be called as a whole"
        if self._host.master_dtype != torch.float32:
            return f"masters are {self._host.master_dtype} (bf16.bf16_master_weights_and_grads)"
        if not self._kind:
            return (
                f"what {type(self._host.optimizer).__name__} takes is not known (of Adam, AdamW, SGD and Adagrad it is)"
            )
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
        if self._fused:
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
        if known:
            self.state[parameter] = {
                self._kept_as.get(key, key): self._on_device(key, value, parameter) for key, value in known.items()
            }
        elif self._replaced and self._kind == "Adagrad":  # which makes its state when it is constructed
            self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}
        return sum(map(_bytes, (known or {}).values()))

    def copy_state_to_host(self, name: str, parameter: nn.Parameter) -> int:
        """Copies the state beside `parameter` into the host's state of `name`; returns the bytes moved."""
        state = {self._kept_back.get(key, key): value for key, value in (self.state.get(parameter) or {}).items()}
        if not state:
            return 0
        if self._replaced:
            state["step"] = int(state["step"])
        known = self._host.state_of(name) or {}
        self._host.put_state(name, {key: _into(known.get(key), value) for key, value in state.items()})
        return sum(map(_bytes, state.values()))

    def _on_device(self, key: str, value: Any, parameter: nn.Parameter) -> Any:
        if self._replaced and key == "step":
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0 and not self._fused:
            return value.clone()  # counters stay where the optimizer reads them
        return torch.empty_like(value, device=parameter.device).copy_(value, non_blocking=True)

    # ---- memory

    def state_bytes(self, name: str, numel: int) -> int:
        """Of a parameter of `numel`, on the device between steps."""
        options = self._options(name)
        numbers = (state_numbers(self._kind, options) or 0) + bool(options.get("amsgrad"))
        return numbers * _rounded(numel) + (0 if self._kind == "SGD" else _GRAIN)

    def working_bytes(self, name: str, numel: int) -> int:
        """What a step of it takes beside that."""
        options = self._options(name)
        coupled = options.get("weight_decay") if self._kind != "AdamW" else 0
        more = sum(map(bool, (coupled, options.get("maximize"), options.get("nesterov"))))  # each takes one more
        return 0 if self._fused else (_TEMPORARIES[self._kind] + more) * numel * torch.float32.itemsize

    def _options(self, name: str) -> dict[str, Any]:
        return self._host.optimizer.param_groups[self._host.group_of(name)]


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of torch's that it is, step included; "": none whose memory is known."""
    classes = type(optimizer).__mro__
    stepping = next(cls for cls in classes if "step" in cls.__dict__)
    kinds = [
        cls.__name__ for cls in classes if cls.__module__.startswith("torch.optim.") and cls.__name__ in _TEMPORARIES
    ]
    return kinds[0] if kinds and stepping.__module__.startswith("torch.optim.") else ""


def _is_coupled(host: HostOptimizer) -> bool:
    """Whether weight decay is Adam's, not AdamW's."""
    return not getattr(host.optimizer, "adam_w_mode", True)


def stand_in_of(row: OptimizerRow, parameters: Iterable[Any], coupled: bool = False) -> torch.optim.Optimizer:
    """An optimizer over `parameters`, or groups of them, with the formula of DeepSpeed's compiled one in `row`, that an
    accelerator can run; of Lion, one that keeps as much. `coupled`: weight decay is Adam's, not AdamW's.
    """
    cls: Any = getattr(torch.optim, "Adam" if coupled and row.on_device == "AdamW" else row.on_device)
    stand_in: torch.optim.Optimizer = cls(parameters)
    return stand_in


def _into(known: Any, value: Any) -> Any:
    """A copy of `value` on the host, in the memory of `known` if that has its form."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(known, Tensor) or known.shape != value.shape or known.dtype != value.dtype:
        known = torch.empty_like(value, device="cpu")
    return known.copy_(value, non_blocking=True)


def _bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) and value.dim() else 0


def _rounded(numel: int) -> int:
    return -(-numel * torch.float32.itemsize // _GRAIN) * _GRAIN
