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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import OptimizerError
from harmony_ds.offload.layout import blocks_of
from harmony_ds.offload.native import GilFreeOp, compiling


@functools.cache
def _compiled() -> ctypes.CDLL:
    """Return the compiled loops; OptimizerError: they cannot be compiled here."""
    name, sources = "harmony_split_masters", [str(Path(__file__).with_suffix(".cpp"))]
    flags = ["-O3", "-march=native", "-fopenmp"]
    try:
        with compiling(name):
            path = cpp_extension.load(name, sources, flags, extra_ldflags=flags[2:], is_python_module=False)
    except (RuntimeError, OSError) as error:
        raise OptimizerError(
            f"harmony.split_masters is compiled on first use, and that failed ({error}). Install a C++ compiler, or leave "
            "it out."
        ) from error
    return ctypes.CDLL(path)


class SplitMasters:
    """The low halves of a model's masters; joins them with the weights to fp32 values, and splits such values again."""

    block = 2**19
    """Elements that are joined, stepped and split at a time: few enough for a processor's last cache."""
    where = "where masters are split (harmony.split_masters), block by block"

    def __init__(self, world: SingleProcess) -> None:
        self._loops = _compiled()
        self._world = world
        self._weights: dict[str, Tensor] = {}  # flat, the weights' own memory
        self._low: dict[str, Tensor] = {}
        self.versions: Counter[str] = Counter()  # how often each parameter has been written
        # Parameter -> for each process's piece, how many ties there are, followed by their indices in order.
        self._ties: dict[str, list[Tensor]] = {}

    @property
    def host_bytes(self) -> int:
        """Bytes of the low halves, and of the ties' indices."""
        ties = sum(int(of_piece[0]) for of_pieces in self._ties.values() for of_piece in of_pieces)
        return sum(low.nbytes for low in self._low.values()) + 8 * ties

    def add(self, name: str, weight: Tensor) -> None:
        """Make room for the low half of `weight` (bf16, contiguous), which `write` fills."""
        self._weights[name], self._low[name] = weight.view(-1), self._world.host_empty_like(weight, torch.int16)
        self._ties[name] = self._world.piece_lists(weight.numel())

    def read_block(self, name: str, block: slice) -> Tensor:
        """Return the fp32 values of a block of one process's piece."""
        values = torch.empty(block.stop - block.start)
        self._loops.harmony_join(self._at(name, block, self._rank_of(name, block)), ctypes.c_void_p(values.data_ptr()))
        return values

    def write_block(self, name: str, block: slice, values: Tensor) -> None:
        """Replace the values of a block by `values` (fp32, contiguous), and its weights by these, rounded."""
        self._write(name, block, self._loops.harmony_split, ctypes.c_void_p(values.data_ptr()))

    def step(
        self,
        name: str,
        block: slice,
        op: GilFreeOp,
        ids: ctypes.Array[ctypes.c_int],
        numbers: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """Join a block, step it as `op` would, and split it again.

        Args:
            ids: of an object of the compiled optimizer for each thread.
            numbers: arguments of the op's function before its tensors.
            tensors: gradient and states of the block's length.
        """
        places = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        typed = [c_type(number) for c_type, number in zip(op.types, numbers, strict=True)]
        loop, threads = getattr(self._loops, f"harmony_{op.kind}_step"), min(len(ids), torch.get_num_threads())
        self._write(name, block, loop, places, ids, threads, op.function, *typed[1:])

    def _write(self, name: str, block: slice, loop: Callable[..., int], *arguments: Any) -> None:
        """Let a compiled loop write a block, and store the ties that the parameter has afterwards."""
        ties, rank = self._ties[name], self._rank_of(name, block)
        count = loop(self._at(name, block, rank), *arguments)
        if count >= len(ties[rank]):
            ties[rank] = torch.empty(1 + count, dtype=torch.int64)
        ties[rank][0] = count
        self._loops.harmony_ties(ctypes.c_void_p(ties[rank][1:].data_ptr()))

    def _at(self, name: str, block: slice, rank: int) -> ctypes.Array[ctypes.c_int64]:
        """Return the C struct `Block` for a block of the piece of process `rank`."""
        ties = self._ties[name][rank]
        places = (self._weights[name].data_ptr(), self._low[name].data_ptr(), ties[1:].data_ptr())
        return (ctypes.c_int64 * 6)(*places, int(ties[0]), block.start, block.stop - block.start)

    def _rank_of(self, name: str, block: slice) -> int:
        pieces = self._world.pieces(self._weights[name].numel())
        return next(rank for rank, piece in enumerate(pieces) if piece.start <= block.start < piece.stop)

    def _blocks(self, name: str, only: int | None = None) -> Iterator[slice]:
        """Yield the blocks of the pieces of all processes, or of one."""
        pieces = self._world.pieces(self._weights[name].numel())
        for piece in pieces if only is None else [pieces[only]]:
            yield from blocks_of(piece, self.block)

    def read(self, name: str) -> Tensor:
        """Return a copy of the fp32 values of a parameter, flat."""
        values = torch.empty(self._weights[name].numel())
        for block in self._blocks(name):
            values[block] = self.read_block(name, block)
        return values

    def write(self, name: str, values: Tensor, everywhere: bool = False) -> None:
        """Replace the values of this process's piece, or `everywhere` of all pieces, by those of a tensor of any dtype."""
        flat = values.detach().expand(self._low[name].shape).reshape(-1)
        for block in self._blocks(name, None if everywhere else self._world.local_rank):
            self.write_block(name, block, flat[block].to("cpu", torch.float32, copy=True))
        self.versions[name] += 1

    def round(self, name: str, changed: Tensor) -> None:
        """Replace masters by their weights where `changed`, a mask of the parameter's shape, is set."""
        flat = changed.reshape(-1)
        for block in self._blocks(name):
            where = flat[block]
            if where.any():
                weights = self._weights[name][block].to(torch.float32)
                self.write_block(name, block, torch.where(where, weights, self.read_block(name, block)))


class SplitStep:
    """Stand-in for the compiled op of DeepSpeed's optimizer: its update steps a block of split masters.

    The optimizer hands it a weight as to its own op; the weight's values are not used, and the block that `aim` named is
    stepped instead.
    """

    def __init__(self, split: SplitMasters, op: GilFreeOp, optimizer: torch.optim.Optimizer) -> None:
        self._split, self._op = split, op
        self._ids = op.make_objects(optimizer, torch.get_num_threads())
        self._name, self._block = "", slice(0, 0)
        setattr(self, f"{op.kind}_update", self.update)

    def aim(self, name: str, block: slice) -> None:
        """Let the next update step `block` of the parameter `name`."""
        self._name, self._block = name, block

    def update(self, *arguments: Any) -> None:
        numbers, (_, *tensors) = self._op.check_arguments(arguments)
        self._split.step(self._name, self._block, self._op, self._ids, numbers, tensors)
