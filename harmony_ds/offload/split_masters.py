"""Split masters: fp32 masters stored as the bf16 weight and the 16 bits below it.

A master rounds to its weight (to the nearest, ties to even), so weight and low bits determine it, except for ties above an
even weight, about one of 131,072 values, whose indices are stored. That makes 4 bytes a parameter for weight and master
together, instead of 6.

    master    sign exponent fraction | rest     32 bits
    weight    sign exponent fraction, one more if the rest is at least half
    low                                rest

The loops are compiled at first use, as DeepSpeed's optimizers are, in about a second.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension

from harmony_ds.errors import OptimizerError
from harmony_ds.offload.layout import blocks_of

_ONE_WEIGHT_UP = 2**16
"""The distance of two neighbouring weights, as the bits of an fp32 number."""


@functools.cache
def _compiled() -> ctypes.CDLL:
    """Return the compiled loops; OptimizerError: they cannot be compiled here."""
    source = Path(__file__).with_suffix(".cpp")
    flags = ["-O3", "-march=native", "-fopenmp"]
    try:
        path = cpp_extension.load(
            "harmony_split_masters",
            [str(source)],
            extra_cflags=flags,
            extra_ldflags=["-fopenmp"],
            is_python_module=False,
        )
    except (RuntimeError, OSError) as error:
        raise OptimizerError(
            f"harmony.split_masters is compiled on first use, and that failed ({error}). Install a C++ compiler and ninja, "
            "or leave it out."
        ) from error
    loops = ctypes.CDLL(path)
    loops.harmony_join.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]
    loops.harmony_split.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_void_p]
    loops.harmony_split.restype = ctypes.c_int64
    return loops


class SplitMasters:
    """Low halves of a model's masters, by parameter; joins them with the weights to fp32 values, and splits these."""

    block = 2**19
    """Numbers that are joined, stepped and split at a time. A processor's last cache holds them."""
    where = "that are split (harmony.split_masters)"

    def __init__(self) -> None:
        self._loops = _compiled()
        self._shapes: dict[str, torch.Size] = {}
        self._weights: dict[str, Tensor] = {}  # flat, the weights' own memory
        self._low: dict[str, Tensor] = {}
        self.versions: Counter[str] = Counter()
        """How often a block of each parameter has been written."""
        self._ties: dict[str, dict[int, Tensor]] = {}  # by block, where there are any
        self._places = torch.empty(self.block, dtype=torch.int64)

    @property
    def host_bytes(self) -> int:
        """Bytes of the low halves, and of the ties' indices."""
        ties = sum(places.nbytes for blocks in self._ties.values() for places in blocks.values())
        return sum(low.nbytes for low in self._low.values()) + ties

    def add(self, name: str, weight: Tensor, values: Tensor) -> None:
        """Split `values`, of any dtype, into `weight` (bf16, contiguous) and its low half."""
        self._weights[name], self._shapes[name] = weight.view(-1), weight.shape
        self._low[name] = torch.empty(weight.numel(), dtype=torch.int16)
        self._ties[name] = {}
        self.write(name, values)

    def read_block(self, name: str, block: slice, buffer: Tensor) -> Tensor:
        """Write the fp32 values of a block to the begin of `buffer`, and return them."""
        weights, low, values = self._weights[name][block], self._low[name][block], buffer[: block.stop - block.start]
        self._loops.harmony_join(weights.data_ptr(), low.data_ptr(), values.data_ptr(), values.numel())
        ties = self._ties[name].get(block.start)
        if ties is not None:
            values.view(torch.int32)[ties] += _ONE_WEIGHT_UP
        return values

    def write_block(self, name: str, block: slice, values: Tensor) -> None:
        """Make `values` (fp32, contiguous) a block's, and round its weights from them."""
        places = (values, self._weights[name][block], self._low[name][block])
        found = self._loops.harmony_split(*(t.data_ptr() for t in places), values.numel(), self._places.data_ptr())
        self._ties[name].pop(block.start, None)
        if found:
            self._ties[name][block.start] = self._places[:found].clone()
        self.versions[name] += 1

    def read(self, name: str) -> Tensor:
        """Return a copy of the fp32 values of a parameter, flat."""
        values = torch.empty(self._weights[name].numel())
        for block in blocks_of(values.numel(), self.block):
            self.read_block(name, block, values[block])
        return values

    def write(self, name: str, values: Tensor) -> None:
        """Make `values`, of the parameter's shape and any dtype, the parameter's."""
        flat = values.detach().expand(self._shapes[name]).reshape(-1)
        for block in blocks_of(flat.numel(), self.block):
            self.write_block(name, block, flat[block].to("cpu", torch.float32, copy=True))

    def round(self, name: str, changed: Tensor) -> None:
        """Make masters equal to their weights where `changed` (a mask of the parameter's shape) says so."""
        flat = changed.reshape(-1)
        for block in blocks_of(flat.numel(), self.block):
            where = flat[block]
            if where.any():
                values = torch.empty(where.numel())
                self.read_block(name, block, values)
                weights = self._weights[name][block].to(torch.float32)
                self.write_block(name, block, torch.where(where, weights, values))
