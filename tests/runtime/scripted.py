"""A device whose clock stands still but for what a script spends on it, and the parts of an engine on that device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.assembly.assemble import assemble
from harmony_ds.config import load_config
from harmony_ds.device import CpuDevice
from harmony_ds.device.base import Stream
from harmony_ds.step.engine_state import EngineState


class ScriptedDevice(CpuDevice):
    """The CPU device, on a clock of its own.

    Attributes:
        clock_ms: what the clock shows.
        stream_ms: what everything that is issued on a stream takes.
        log: buffers as they come ("in 8": a swap-in into 8 elements) and go ("out 8"), and what a test adds.
    """

    def __init__(self, budget_bytes: int | None = None, name: str = "scripted") -> None:
        super().__init__(budget_bytes)
        self.name = name
        self.clock_ms = 0.0
        self.stream_ms: dict[Stream, float] = {}
        self.log: list[str] = []

    def now_ms(self) -> float:
        return self.clock_ms

    def spend(self, ms: float) -> None:
        self.clock_ms += ms

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return self._issuing(stream)

    @contextmanager
    def _issuing(self, stream: Stream) -> Iterator[None]:
        yield
        self.spend(self.stream_ms.get(stream, 0.0))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if numel:
            self.log.append(f"in {numel}")
        return super().empty(numel, dtype)

    def free(self, buffer: Tensor) -> None:
        if buffer.numel():
            self.log.append(f"out {buffer.numel()}")
        super().free(buffer)


@contextmanager
def assembled(model: nn.Module, device: CpuDevice, optimizer: bool = False, **harmony: Any) -> Iterator[EngineState]:
    """The parts of an engine that trains `model` on `device`."""
    config = load_config({"train_micro_batch_size_per_gpu": 2, "harmony": {"device": "cpu", "seed": 5, **harmony}})
    made = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    parts = assemble(model, config, made, None, device)
    try:
        yield parts
    finally:
        parts.destroy()


class _Spending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: ScriptedDevice, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.device, ctx.ms = device, backward_ms
        device.spend(forward_ms)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.device.spend(ctx.ms)
        return gradient, None, None, None


def spending(x: Tensor, device: ScriptedDevice, forward_ms: float, backward_ms: float = 0.0) -> Tensor:
    """`x`, after so long; its gradient takes as long as that."""
    spent: Tensor = _Spending.apply(x, device, forward_ms, backward_ms)  # type: ignore[no-untyped-call]
    return spent
