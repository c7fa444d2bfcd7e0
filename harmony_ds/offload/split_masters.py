"""Split masters: fp32 masters stored as the bf16 weight and the 16 bits below it.

A master rounds to its weight (to the nearest, ties to even), so weight and low bits determine it, except for ties above an
even weight, about one of 131,072 values, whose indices are stored. That makes 4 bytes a parameter for weight and master
together, instead of 6.

    master    sign exponent fraction | rest     32 bits
    weight    sign exponent fraction, one more if the rest is at least half
    low                                rest

The loops are compiled at first use, as DeepSpeed's optimizers are, in some seconds. They call the steps of these
optimizers themselves, for so few values at a time that a core's cache holds them from joining to splitting.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from harmony_ds.errors import OptimizerError
from harmony_ds.offload.layout import blocks_of
from harmony_ds.offload.native import GilFreeOp


@functools.cache
def _compiled() -> ctypes.CDLL:
    """Return the compiled loops; OptimizerError: they cannot be compiled here."""
    sources = [str(Path(__file__).with_suffix(".cpp"))]
    flags = ["-O3", "-march=native", "-fopenmp"]
    try:
        path = cpp_extension.load(
            "harmony_split_masters", sources, extra_cflags=flags, extra_ldflags=["-fopenmp"], is_python_module=False
        )
    except (RuntimeError, OSError) as error:
        raise OptimizerError(
            f"harmony.split_masters is compiled on first use, and that failed ({error}). Install a C++ compiler and ninja, "
            "or leave it out."
        ) from error
    return ctypes.CDLL(path)


class SplitMasters:
    """Low halves of a model's masters, by parameter; joins them with the weights to fp32 values, and splits these."""

    block = 2**19
    """Numbers that are joined, stepped and split at a time. A processor's last cache holds them."""
    where = "that are split (harmony.split_masters)"

    def __init__(self) -> None:
        self._loops = _compiled()
        self._weights: dict[str, Tensor] = {}  # flat, the weights' own memory
        self._low: dict[str, Tensor] = {}
        self.versions: Counter[str] = Counter()  # how often a block of each parameter has been written
        self._ties: dict[str, Tensor] = {}  # indices, in order

    @property
    def host_bytes(self) -> int:
        """Bytes of the low halves, and of the ties' indices."""
        return sum(tensor.nbytes for tensors in (self._low, self._ties) for tensor in tensors.values())

    def add(self, name: str, weight: Tensor, values: Tensor) -> None:
        """Split `values`, of any dtype, into `weight` (bf16, contiguous) and its low half."""
        self._weights[name], self._low[name] = weight.view(-1), torch.empty(weight.shape, dtype=torch.int16)
        self._ties[name] = torch.empty(0, dtype=torch.int64)
        self.write(name, values)

    def read_block(self, name: str, block: slice, buffer: Tensor) -> Tensor:
        """Write the fp32 values of a block to the begin of `buffer`, and return them."""
        self._loops.harmony_join(self._at(name, block), ctypes.c_void_p(buffer.data_ptr()))
        return buffer[: block.stop - block.start]

    def write_block(self, name: str, block: slice, values: Tensor) -> None:
        """Make `values` (fp32, contiguous) a block's, and round its weights from them."""
        self._write(name, block, self._loops.harmony_split, ctypes.c_void_p(values.data_ptr()))

    def step(self, name: str, op: GilFreeOp, numbers: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Step a parameter as `op` would, given `tensors` of its shape; the first one's values are not used."""
        places = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors[1:]))
        typed = [one(number) for one, number in zip(op.types, numbers, strict=True)]
        loop, threads = getattr(self._loops, f"harmony_{op.kind}_step"), min(len(op.twins), torch.get_num_threads())
        self._write(name, slice(0, tensors[0].numel()), loop, places, op.twins, threads, op.step, *typed[1:])

    def _write(self, name: str, block: slice, loop: Callable[..., int], *arguments: Any) -> None:
        """Let a compiled loop write a block, and keep the ties that there are then."""
        ties = torch.empty(loop(self._at(name, block), *arguments), dtype=torch.int64)
        self._loops.harmony_ties(ctypes.c_void_p(ties.data_ptr()))
        self._ties[name] = ties
        self.versions[name] += 1

    def _at(self, name: str, block: slice) -> ctypes.Array[ctypes.c_int64]:
        """Return what the loops call a block."""
        ties = self._ties[name]
        places = (self._weights[name].data_ptr(), self._low[name].data_ptr(), ties.data_ptr())
        return (ctypes.c_int64 * 6)(*places, ties.numel(), block.start, block.stop - block.start)

    def read(self, name: str) -> Tensor:
        """Return a copy of the fp32 values of a parameter, flat."""
        values = torch.empty(self._weights[name].numel())
        return self.read_block(name, slice(0, values.numel()), values)

    def write(self, name: str, values: Tensor) -> None:
        """Make `values`, of the parameter's shape and any dtype, the parameter's."""
        flat = values.detach().expand(self._low[name].shape).reshape(-1)
        for block in blocks_of(flat.numel(), self.block):
            self.write_block(name, block, flat[block].to("cpu", torch.float32, copy=True))

    def round(self, name: str, changed: Tensor) -> None:
        """Make masters equal to their weights where `changed` (a mask of the parameter's shape) says so."""
        flat = changed.reshape(-1)
        for block in blocks_of(flat.numel(), self.block):
            where = flat[block]
            if where.any():
                values = self.read_block(name, block, torch.empty(where.numel()))
                weights = self._weights[name][block].to(torch.float32)
                self.write_block(name, block, torch.where(where, weights, values))
