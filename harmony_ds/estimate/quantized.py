"""Quantize the linear layers of a model on the meta device: what exists of a weight is the bytes that it is stored in.

    nf4    4 bits a number, one scale for 64, scales in 8 bits with one fp32 scale for 256: 0.516 bytes a number
           (Dettmers et al.: QLoRA, NeurIPS 2023; bitsandbytes' NF4 with double quantization)
    int8   8 bits a number, one fp32 scale for a row

A layer's product dequantizes its weight first, into the dtype of its input, in forward and in backward: one operation that
reads the stored bytes and writes the weight. Neither kind has gradients.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds.estimate.lora import linear_layers

_NF4_BLOCK, _NF4_SCALES_BLOCK = 64, 256
_NF4_TABLES_BYTES = 4 * 16 + 4 * 256 + 4
"""fp32: the values of the codes of weights and of scales, and the mean of the scales."""


class Quantization(Enum):
    """How a frozen weight is stored."""

    NF4 = "nf4"
    INT8 = "int8"

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight of shape [rows, columns]."""
        numel = rows * columns
        if self is Quantization.INT8:
            return numel + 4 * rows
        scales = -(-numel // _NF4_BLOCK)
        return -(-numel // 2) + scales + 4 * -(-scales // _NF4_SCALES_BLOCK) + _NF4_TABLES_BYTES


def quantize_linear_layers(model: nn.Module, how: Quantization) -> None:
    """Replace the weights of all linear layers of `model` but its head, on the meta device, by quantized ones, in place.

    Raises:
        ConfigError: there are none.
    """
    for layer in linear_layers(model).values():
        rows, columns = layer.weight.shape
        stored = torch.empty(how.stored_bytes(rows, columns), dtype=torch.uint8, device=layer.weight.device)
        layer.weight = nn.Parameter(
            QuantizedWeight(stored, layer.weight.shape, layer.weight.dtype), requires_grad=False
        )


class QuantizedWeight(Tensor):
    """A weight that `torch.nn.functional.linear` can multiply by; `stored`, uint8 [bytes], is all that there is of it."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, shape: torch.Size, dtype: torch.dtype) -> QuantizedWeight:
        """Make the weight of this shape and dtype, as it looks from outside."""
        made: QuantizedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=stored.device)
        made.stored = stored
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """Return the names of the inner tensors, and what else the weight is made of."""
        return ["stored"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], dtype: torch.dtype, shape: torch.Size, strides: Any
    ) -> QuantizedWeight:
        """Make a weight of other inner tensors."""
        return cls(inner["stored"], shape, dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply by `linear`; do everything else as for any tensor."""
        if func is F.linear:
            return _multiply(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make an alias; refuse what would have to know the values."""
        if func is torch.ops.aten.detach.default:
            weight = args[0]
            return cls(weight.stored, weight.shape, weight.dtype)
        raise NotImplementedError(f"{func} of a quantized weight, which linear layers alone can use")


def _multiply(operand: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    product: Tensor = _Product.apply(operand, weight.stored, weight.shape)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias


class _Product(torch.autograd.Function):
    """Product of an operand [..., columns] and a weight [rows, columns]; the graph keeps the stored bytes."""

    @staticmethod
    def forward(ctx: Any, operand: Tensor, stored: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(stored)
        ctx.shape = shape
        return F.linear(operand, _dequantize(stored, *shape, operand.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (stored,) = ctx.saved_tensors
        return gradient @ _dequantize(stored, *ctx.shape, gradient.dtype), None, None


@torch.library.custom_op("harmony_ds::dequantize", mutates_args=())
def _dequantize(stored: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a weight of shape [rows, columns] on the meta device."""
    return stored.new_empty(rows, columns, dtype=dtype)


@_dequantize.register_fake
def _(stored: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return stored.new_empty(rows, columns, dtype=dtype)
