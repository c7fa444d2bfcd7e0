"""The optimizer on the device, which steps parameters that stay there with their state.

On the CPU device the user's own optimizer steps them: the same code on the same kind of memory gives the same bits. On an
accelerator, torch's optimizers do, by their kernels; DeepSpeed's compiled optimizers, which work on host memory only, are
replaced by torch's of the same formula. Parameters and states share no memory with the host's. Knows no packs.

    configured             on the CPU device      on an accelerator
    torch.optim            itself                 itself, fused or parameter by parameter
    DeepSpeedCPUAdam       itself                 torch.optim.AdamW or Adam
    DeepSpeedCPUAdagrad    itself                 torch.optim.Adagrad
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _get_scalar_dtype

from harmony_ds.config.optimizers import OptimizerRow, state_numbers
from harmony_ds.offload.native import native_of
from harmony_ds.optim.block_optimizer import BlockOptimizer
from harmony_ds.optim.host_optimizer import HostOptimizer, Hyper, partial_optimizer

_TEMPORARIES = {"AdamW": 2, "Adam": 2, "Adagrad": 1, "SGD": 0}
"""How many temporary tensors torch's step of one parameter makes, for the optimizers for which this is known."""
_GRAIN = 512
"""Bytes that allocators round up to."""


class DeviceOptimizer:
    """Step of the user's optimizer for some of the parameters that are on the device.

    Attributes:
        state: the optimizer's state of the device's parameters.
    """

    def __init__(self, host: HostOptimizer, device: torch.device) -> None:
        self._host = host
        self._on_host = device.type == "cpu"
        row = native_of(host.optimizer)
        coupled = not getattr(host.optimizer, "adam_w_mode", True)
        stand_in = None if row is None else torch_equivalent(row, [nn.Parameter(torch.empty(0))], coupled)
        self._replaced = stand_in is not None and not self._on_host
        self._torch_class = _torch_class_of(stand_in or host.optimizer)
        self._fused = device.type == "cuda" and self._torch_class in ("AdamW", "Adam", "SGD")
        self._state_names = row.kept_as if row is not None and self._replaced else {}
        self._deepspeed_names = {torchs: deepspeeds for deepspeeds, torchs in self._state_names.items()}
        self._part = partial_optimizer(stand_in if stand_in is not None and self._replaced else host.part)
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._part.state = self.state

    @property
    def refusal(self) -> str | None:
        """The reason why this optimizer cannot step parameters on the device; None: it can."""
        if self._host.steps_whole:
            return f"the step of {type(self._host.optimizer).__name__} has to be called as a whole"
        if self._host.master_dtype != torch.float32:
            return f"masters are {self._host.master_dtype} (bf16.bf16_master_weights_and_grads)"
        if isinstance(self._host, BlockOptimizer):
            return "it steps masters block by block"
        if not self._torch_class:
            return f"what {type(self._host.optimizer).__name__} takes is not known (Adam, AdamW, SGD and Adagrad are)"
        if self._replaced and not all(
            group.get("bias_correction", True) for group in self._host.optimizer.param_groups
        ):
            return "bias_correction is off, which torch's Adam does not know"
        return None

    def trains(self, name: str) -> bool:
        """Return whether the optimizer has the parameter `name`."""
        return self._host.trains(name)

    def step(self, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Step those of `parameters` once that have a gradient (both fp32, on the device)."""
        values = tuple(map(self._values, hyper))
        for batch in self._batches(parameters, gradients):
            with self._host.filled(self._part, parameters, batch, values):
                self._part.step()

    def _batches(
        self, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
    ) -> Iterator[Mapping[str, Tensor]]:
        """Yield the gradients of the parameters that one call of torch's optimizer steps."""
        if not self._fused:
            # One by one: torch's loops keep a parameter's intermediate results while they compute the next one's.
            for name, gradient in gradients.items():
                yield {name: gradient}
            return
        # In one call, fused SGD begins the momentum of all parameters or of none.
        begun: dict[str, Tensor] = {}
        fresh: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            batch = begun if self.state.get(parameters[name]) else fresh
            batch[name] = _laid_out(gradient)
        for batch in (begun, fresh):
            if batch:
                yield batch

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._on_host:
            return dict(values)
        if self._replaced:
            defaults = self._part.defaults
            values = {**defaults, **{key: value for key, value in values.items() if key in defaults}}
        # foreach kernels take memory for all tensors at once.
        flags: dict[str, Any] = {"foreach": False, "fused": self._fused}
        return {**values, **{key: flag for key, flag in flags.items() if key in values}}

    def watch_replaced_state(self) -> bool:
        """Return whether the program has replaced the host's state since the last call."""
        return self._host.watch_replaced_state()

    def copy_state_to_device(self, name: str, parameter: nn.Parameter) -> int:
        """Copy the host's state of `name` to that of `parameter`, or make it where there is none yet.

        Returns:
            The bytes copied.
        """
        known = self._host.state_of(name)
        self.state.pop(parameter, None)
        if known:
            copied = {key: self._on_device(key, value, parameter) for key, value in known.items()}
            self.state[parameter] = {self._state_names.get(key, key): value for key, value in copied.items()}
        elif not self._on_host:
            state = self._first_state(name, parameter)
            if state:
                self.state[parameter] = state
        return sum(map(_bytes, (known or {}).values()))

    def _first_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what torch's optimizer begins with, as far as that is zeros, which its first step would make.

        That step runs among activations: what it made would stay between them when they are freed, and the allocator could
        not use the gaps for larger tensors.
        """
        if self._torch_class == "Adagrad" and self._replaced:
            return {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}
        if self._torch_class not in ("Adam", "AdamW"):
            return {}
        step_device = parameter.device if self._fused else "cpu"
        state = {"step": torch.zeros((), dtype=_get_scalar_dtype(self._fused), device=step_device)}
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
        if self._options(name).get("amsgrad"):
            state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def copy_state_to_host(self, name: str, parameter: nn.Parameter) -> int:
        """Copy the state of `parameter` to the host's state of `name`; return the bytes copied."""
        state = {self._deepspeed_names.get(key, key): value for key, value in (self.state.get(parameter) or {}).items()}
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
            return value.clone()  # counters stay on the host, where the optimizer reads them
        return torch.empty_like(value, device=parameter.device).copy_(value, non_blocking=True)

    def state_bytes(self, name: str, numel: int) -> int:
        """Return the device bytes of the state of a parameter of `numel`."""
        options = self._options(name)
        numbers = (state_numbers(self._torch_class, options) or 0) + bool(options.get("amsgrad"))
        return numbers * _rounded(numel) + (0 if self._torch_class == "SGD" else _GRAIN)

    def working_bytes(self, name: str, numel: int) -> int:
        """Return the temporary device bytes of a step of a parameter of `numel`."""
        options = self._options(name)
        coupled = options.get("weight_decay") if self._torch_class != "AdamW" else 0
        temporaries = _TEMPORARIES[self._torch_class]
        for option in (coupled, options.get("maximize"), options.get("nesterov")):
            temporaries += bool(option)  # each option makes one more
        return 0 if self._fused else temporaries * numel * torch.float32.itemsize

    def _options(self, name: str) -> dict[str, Any]:
        return self._host.optimizer.param_groups[self._host.group_of(name)]


def is_stepped_on_device(name: str) -> bool:
    """Return whether the optimizer of this name in a ds_config is one that can step parameters on the device.

    Its options, the masters and the program's hooks may still forbid it (`refusal`).
    """
    return name.lower() in {known.lower() for known in _TEMPORARIES}


def _laid_out(gradient: Tensor) -> Tensor:
    """Return a gradient with a parameter's strides, which fused kernels insist on, in dimensions of size 1 as well.

    A convolution of 1 x 1 may give others there, for which nothing is copied; a gradient that is not contiguous is.
    """
    return gradient.contiguous().view(-1).view(gradient.shape)


def _torch_class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the torch class whose step `optimizer` uses; "": the memory of its step is not known."""
    classes = type(optimizer).__mro__
    stepping = next(cls for cls in classes if "step" in cls.__dict__)
    torchs = [cls.__name__ for cls in classes if cls.__module__.startswith("torch.optim.")]
    kinds = [name for name in torchs if name in _TEMPORARIES]
    return kinds[0] if kinds and stepping.__module__.startswith("torch.optim.") else ""


def torch_equivalent(row: OptimizerRow, parameters: Iterable[Any], coupled: bool = False) -> torch.optim.Optimizer:
    """Return torch's optimizer with the formula of DeepSpeed's in `row` (for Lion, one with as much state)."""
    cls: Any = getattr(torch.optim, "Adam" if coupled and row.on_device == "AdamW" else row.on_device)
    optimizer: torch.optim.Optimizer = cls(parameters)
    return optimizer


def _into(known: Any, value: Any) -> Any:
    """Copy `value` to the host, into `known` if that has its shape and dtype."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(known, Tensor) or known.shape != value.shape or known.dtype != value.dtype:
        known = torch.empty_like(value, device="cpu")
    return known.copy_(value, non_blocking=True)


def _bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) and value.dim() else 0


def _rounded(numel: int) -> int:
    return -(-numel * torch.float32.itemsize // _GRAIN) * _GRAIN
