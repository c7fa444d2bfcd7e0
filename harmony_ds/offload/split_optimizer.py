"""Optimizer steps over split masters: block by block, so that no parameter is ever whole in fp32.

The optimizer's groups and state are those of the model's bf16 parameters. A step joins the fp32 values of a block, steps
them as a parameter whose state consists of views, and splits them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.errors import UnsupportedError
from harmony_ds.offload.host_optimizer import HostOptimizer, Hyper
from harmony_ds.offload.piece_optimizer import check_elementwise
from harmony_ds.offload.split_masters import BLOCK, SplitMasters
from harmony_ds.offload.synced_state import plain_state


class SplitOptimizer(HostOptimizer):
    """`HostOptimizer` whose masters are split."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], split: SplitMasters
    ) -> None:
        """Raise OptimizerError if the step of `optimizer` is not elementwise."""
        super().__init__(optimizer, parameters)
        check_elementwise(self, "over split masters (harmony.split_masters), which are stepped block by block")
        self._split = split
        self._values = torch.empty(BLOCK)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of joined blocks."""
        return torch.float32

    def hyper(self) -> Hyper:
        """Return the current hyper-parameters; raise UnsupportedError if the optimizer has got hooks on its step."""
        if self.steps_whole:
            raise UnsupportedError(
                "hooks on the optimizer's step see no masters that are split (harmony.split_masters)."
            )
        return super().hyper()

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        for name, gradient in gradients.items():
            if self.trains(name):
                self._step_parameter(name, gradient.reshape(-1), hyper)

    def _step_parameter(self, name: str, gradient: Tensor, hyper: Hyper) -> None:
        parameter = self._masters[name]
        states: dict[str, Any] = plain_state(self.optimizer.state)[parameter]
        before, after = dict(states), dict[str, Any]()
        for block in self._split.blocks(name):
            values = self._values[: block.stop - block.start]
            self._split.read_block(name, block, values)
            piece = nn.Parameter(values)
            known = {key: _part(value, parameter.shape, block) for key, value in before.items()}
            self.part.state.clear()
            if known:
                self.part.state[piece] = known
            self.step_part(self.part, {name: piece}, {name: gradient[block].contiguous()}, hyper)
            self._split.write_block(name, block, values)
            for key, value in self.part.state[piece].items():
                if not (isinstance(value, Tensor) and value.dim() and value.shape == piece.shape):
                    after[key] = value
                    continue
                if key not in states:
                    states[key] = torch.empty(parameter.shape, dtype=value.dtype)
                there = states[key].view(-1)[block]
                if there.data_ptr() != value.data_ptr():
                    there.copy_(value)
        self.part.state.clear()
        states.update(after)


def _part(value: Any, shape: torch.Size, block: slice) -> Any:
    """Return the part of an optimizer's state that belongs to a block: a view, or a copy of a per-parameter value."""
    if not isinstance(value, Tensor):
        return value
    return value.view(-1)[block] if value.dim() and value.shape == shape else value.clone()
