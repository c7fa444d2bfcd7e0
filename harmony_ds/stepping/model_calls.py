"""Calls of the model with arguments on the device, as the ds_config wants them: under autocast, inputs cast to half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.intercept import Autocast
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.device.base import Device
from harmony_ds.errors import BatchError
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.stepping.inputs import Arguments


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """Calls the model, or what stands for it.

    Attributes:
        autocast: the ds_config's, around every call.
        casts: whether positional floating-point arguments become fp16, as `fp16.auto_cast` says (in DeepSpeed, too, the
            caller's keyword arguments stay what they are).
    """

    device: Device
    ledger: Ledger
    autocast: Autocast | None = None
    casts: bool = False

    def now(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `call` returns, with tensors on the device, whatever they are in."""
        return self.run(call, Arguments(args, kwargs))[0]

    def run(self, call: Callable[..., Any], arguments: Arguments) -> tuple[Any, bool]:
        """The result, and whether something was written into the arguments' containers."""
        (args, kwargs), give_back = arguments.mapped(self._to_device)
        result = self._run(call, args, kwargs)
        return result, give_back()

    def run_later(self, call: Callable[..., Any], arguments: Arguments, name: str) -> Any:
        """The result of a call of the model `name` that was put off.

        Raises:
            BatchError: it wrote into a tensor that it was given.
        """
        (args, kwargs), give_back = arguments.mapped(self._to_device)
        tensors = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        outputs = self._run(call, args, kwargs)
        if [tensor._version for tensor in tensors] != versions:
            raise BatchError(
                f"the forward of {name} writes into a tensor that it was given. It runs later than it was called, on a "
                "copy, so that its caller does not see that: clone the tensor in forward."
            )
        give_back()
        return outputs

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with Autocast.entered(self.autocast):
            return call(*(map_tensors(_half, args) if self.casts else args), **kwargs)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad or tensor.device.type != "cpu":
            return tensor.to(self.device.torch_device)
        self.ledger.book_in(Kind.DATA, tensor.numel() * tensor.element_size())
        return self.device.upload(tensor)


def _half(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16) if tensor.is_floating_point() else tensor
