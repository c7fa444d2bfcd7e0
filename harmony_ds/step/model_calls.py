"""Calls of the model with arguments on the device, as the ds_config wants them: under autocast, inputs cast to half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.trees import map_tensors
from harmony_ds.offload.ledger import Ledger, TrafficKind
from harmony_ds.step.inputs import CallInputs


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """Calls the model, or the function that a program has put in its place, with arguments moved to the device."""

    device: Device
    ledger: Ledger
    autocast: Autocast | None = None  # the ds_config's, around every call
    casts: bool = False  # positional arguments to fp16, as `fp16.auto_cast` says (DeepSpeed leaves keywords alone, too)

    def run(self, call: Callable[..., Any], arguments: CallInputs) -> Any:
        """Return what `call` makes of copies of `arguments`, into which it may write."""
        args, kwargs = arguments.mapped(self._to_device)
        with Autocast.entered(self.autocast):
            return call(*(map_tensors(_half, args) if self.casts else args), **kwargs)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad or tensor.device.type != "cpu":
            return tensor.to(self.device.torch_device, copy=True)
        self.ledger.book_in(TrafficKind.DATA, tensor.numel() * tensor.element_size())
        return self.device.upload(tensor)


def _half(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16) if tensor.is_floating_point() else tensor
