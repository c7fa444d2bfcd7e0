"""How long operations on meta tensors would take on a device, by the roofline model.

    time of an operation = max(FLOPs / (peak * share reached), bytes touched / memory bandwidth, issuing it)

(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.) The operations are those that eager PyTorch issues, one
kernel each: FLOPs by the formulas of `torch.utils.flop_counter`, which know matrix products, convolutions and fused
attention; bytes are the operands' and results', each once. Views and allocations take nothing.

On the meta device two things differ from a real one, and `on_meta` makes up for them: torch decomposes attention into
matrix products (the fused kernel's own meta version takes their place), and there are no values to ask about ("is any
token padded?" is answered as for data without padding).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from harmony_ds.device.live_bytes import EagerDispatchMode, tensors_among
from harmony_ds.errors import ModelError
from harmony_ds.profiling.hardware import KernelRates

_aten = torch.ops.aten

_FREE = frozenset([_aten.detach, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.lift_fresh])
_FREE |= {_aten.new_empty, _aten.new_empty_strided, _aten._reshape_alias, _aten._unsafe_view}
"""Beside views: what launches no kernel."""

_GATHERING = frozenset([_aten.embedding, _aten.gather, _aten.index, _aten.index_select])
"""These read as much of their first operand as they write."""

_FUSED_ATTENTION = frozenset(
    [
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_efficient_attention_backward,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_backward,
    ]
)
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
"""The largest head that CUDA's flash attention takes."""


class RooflineClock(EagerDispatchMode):
    """Counts what every operation issued inside the context would take.

    Attributes:
        ms, issued_ms: so far.
        flops: of the operations that were run.
    """

    def __init__(self, rates: KernelRates) -> None:
        super().__init__()
        self._rates = rates
        self.ms = 0.0
        self.issued_ms = 0.0
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet is _aten._local_scalar_dense and args[0].device.type == "meta":
            return _answer(args[0])
        result = func(*args, **kwargs)
        if packet in (_aten.any, _aten.all):
            result.harmony_answer = packet is _aten.all
        if not func.is_view and packet not in _FREE:
            self._pass(packet, args, kwargs, result)
        return result

    def _pass(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        rates = self._rates
        written = [*tensors_among(result)]
        if not any(t.device.type == "meta" for t in written):
            return
        read = [*tensors_among((args, kwargs))]
        touched = sum(map(_nbytes, written))
        touched += touched + sum(map(_nbytes, read[1:])) if packet in _GATHERING else sum(map(_nbytes, read))
        time = max(touched / rates.bytes_per_ms, rates.kernel_ms)
        formula = flop_registry.get(packet)
        if formula is not None:
            if packet in _FUSED_ATTENTION:  # torch before 2.13 counts no grouped heads
                args = tuple(_with_heads(argument, read[0].shape[1]) for argument in args)
            flops = formula(*args, **kwargs, out_val=result)
            half = read[0].dtype in _HALF
            share = rates.matmul_share
            if packet in _FUSED_ATTENTION:
                share = rates.attention_share
                flops = flops // 2 if _is_causal(packet, args, kwargs) else flops
            self.flops += flops
            peak = rates.half_flops_per_ms if half else rates.fp32_flops_per_ms
            time = max(time, flops / (peak * share))
        self.ms += time
        self.issued_ms += rates.kernel_ms


@contextmanager
def on_meta(rates: KernelRates) -> Iterator[RooflineClock]:
    """Return a clock that runs while the context is open, and the kernels that a CUDA device would choose."""
    with _FusedAttention(), RooflineClock(rates) as clock:
        yield clock


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of memory of `tensor`; less than its elements where it is expanded."""
    elements = tensor.numel() * tensor.element_size()
    if tensor.layout is torch.strided and 0 in tensor.stride():
        return min(elements, tensor.untyped_storage().nbytes())
    return elements


def _with_heads(argument: Any, heads: int) -> Any:
    is_operand = isinstance(argument, Tensor) and argument.dim() == 4
    return argument[:, :1].expand(-1, heads, -1, -1) if is_operand else argument


def _is_causal(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the kernel skips what lies above the diagonal: half of all scores."""
    names = [argument.name for argument in packet.default._schema.arguments]
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _answer(value: Tensor) -> bool:
    """To what a model's code asks about values: all are as usual, none is unusual (padded, infinite, of a new document).

    Raises:
        ModelError: the question is no yes or no.
    """
    if value.dtype is not torch.bool:
        raise ModelError(
            "the model's own code computes with values (Tensor.item()) to decide what to run: profile it with data."
        )
    return bool(getattr(value, "harmony_answer", True))


class _FusedAttention(TorchFunctionMode):
    """Attention by the kernel that `F.scaled_dot_product_attention` chooses on a CUDA device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            fused = Attention(*args, **kwargs).run()
            if fused is not None:
                return fused
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Attention:
    """The arguments of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run(self) -> Tensor | None:
        """(B, H, T, E) attention, or None where no fused kernel takes it: then torch multiplies matrices."""
        if self.query.dim() != 4 or self.query.device.type != "meta":
            return None
        if not self.enable_gqa and any(t.shape[:2] != self.query.shape[:2] for t in (self.key, self.value)):
            return None  # multi-query attention, say: no fused kernel broadcasts heads or batches
        return self.fused()

    def fused(self) -> Tensor | None:
        """Flash attention in half precision without a mask, else the memory-efficient kernel."""
        query, key, value, mask = self.query, self.key, self.value, self.attn_mask
        fits_flash = query.dtype in _HALF and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD
        if mask is None and fits_flash:
            flash: Tensor = _aten._scaled_dot_product_flash_attention(
                query, key, value, self.dropout_p, self.is_causal, False, scale=self.scale
            )[0]
            return flash
        if key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if mask is not None:
            mask = additive(mask, query.dtype).expand(*query.shape[:-1], key.shape[-2])
        efficient: Tensor = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, self.dropout_p, self.is_causal, scale=self.scale
        )[0]
        return efficient


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), float("-inf"))
