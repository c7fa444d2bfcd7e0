"""Steps an optimizer for some of its parameters at a time, on the host.

An elementwise optimizer gives the same result whether its parameters are stepped together or one layer after another.
What enters is the user's optimizer (any of torch's that treats parameters one by one, or DeepSpeed's compiled ones) and
the masters; hyper-parameters are passed in as they were when the user called `step()`. Knows no thread and no device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from harmony_ds.errors import OptimizerError
from harmony_ds.offload.native import gil_free_op, is_native

Hyper = tuple[dict[str, Any], ...]
"""The hyper-parameters of every parameter group at one moment, without their parameters."""

_NOT_ELEMENTWISE = ("LBFGS", "SparseAdam")


class HostOptimizer:
    """Shares the state of `optimizer` and steps subsets of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """Args:
            optimizer: already over the masters.
            masters: by canonical name; those that `optimizer` does not have are not trained.

        Raises:
            OptimizerError: `optimizer` needs all parameters at once, or knows one that is not the model's.
        """
        if any(base.__name__ in _NOT_ELEMENTWISE for base in type(optimizer).__mro__):
            raise OptimizerError(
                f"{type(optimizer).__name__} does not treat parameters one by one, so it cannot be stepped layer by "
                "layer on the host. Use an elementwise optimizer such as torch.optim.AdamW, or name one in the ds_config."
            )
        self.optimizer = optimizer
        names = {id(master): name for name, master in masters.items()}
        self._masters = masters
        self._group_of: dict[str, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise OptimizerError(
                        f"the optimizer's parameter group {index} holds a parameter of shape {tuple(parameter.shape)} "
                        "that is not one of the model's trainable parameters: build it from model.parameters()."
                    )
                self._group_of[names[id(parameter)]] = index
        self._native = is_native(optimizer)
        self._part = _part_of(optimizer)
        if self._native:
            setattr(self._part, *gil_free_op(optimizer))

    def trains(self, name: str) -> bool:
        """Whether the optimizer has the parameter `name`."""
        return name in self._group_of

    def hyper(self) -> Hyper:
        """The hyper-parameters as they are now."""
        return tuple(
            {key: _frozen(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        )

    def step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Steps the masters of `gradients` (fp32, host) once."""
        parameters: list[list[nn.Parameter]] = [[] for _ in hyper]
        for name, gradient in gradients.items():
            group = self._group_of.get(name)
            if group is None:
                continue
            master = self._masters[name]
            if self._native:
                # DeepSpeed's op reads a gradient of another dtype as garbage, and skips what is not contiguous.
                assert gradient.dtype == master.dtype and gradient.is_contiguous() and master.is_contiguous(), name
            master.grad = gradient
            parameters[group].append(master)
        self._part.state = self.optimizer.state  # load_state_dict puts another one there
        self._part.param_groups = [
            {**values, "params": chosen} for values, chosen in zip(hyper, parameters, strict=True) if chosen
        ]
        try:
            type(self._part).step(self._part)
        finally:
            self._part.param_groups = []
            for chosen in parameters:
                for master in chosen:
                    master.grad = None

    def for_scratch(self, master: nn.Parameter) -> torch.optim.Optimizer:
        """An optimizer of the same kind over `master` alone, with state of its own: for measuring what a step takes."""
        scratch = _part_of(self.optimizer)
        if self._native:
            setattr(scratch, *gil_free_op(self.optimizer))
        scratch.state = defaultdict(dict)
        scratch.param_groups = [{**self.hyper()[0], "params": [master]}]
        return scratch

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state tensors."""
        tensors: Iterable[Any] = (value for state in list(self.optimizer.state.values()) for value in state.values())
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _part_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class that shares `optimizer`'s state but has parameter groups of its own.

    Its class is a subclass without a destructor: DeepSpeed's would destroy the compiled object that both share.
    """
    cls = type(optimizer)
    part = cast(torch.optim.Optimizer, object.__new__(type(cls.__name__, (cls,), {"__del__": lambda self: None})))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # a learning-rate scheduler's wrapper, bound to the user's object
    part.param_groups = []
    return part


def _frozen(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
