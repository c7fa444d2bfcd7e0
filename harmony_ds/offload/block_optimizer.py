"""Optimizer steps block by block, over masters that are nowhere whole in fp32: split ones, or those on a disk.

A block's values become a parameter of its length, whose state are the block's parts of the optimizer's state; both are put
back after the step.

    split     weights, low bits ──join──> values ──step──> split ──> weights, low bits          state: views of memory
    disk      file ──read early──> values, state ──step──> written later ──> file, weights     state: in the file, too
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harmony_ds.config.optimizers import state_numbers
from harmony_ds.errors import UnsupportedError
from harmony_ds.offload.disk import DiskMasters, submit
from harmony_ds.offload.host_optimizer import HostOptimizer, Hyper, partial_optimizer
from harmony_ds.offload.layout import blocks_of
from harmony_ds.offload.native import GilFreeOp, gil_free_op
from harmony_ds.offload.piece_optimizer import check_elementwise, is_kept_for_each
from harmony_ds.offload.split_masters import SplitMasters
from harmony_ds.offload.synced_state import plain_state

Tensors = dict[str, Tensor]
Parameters = Mapping[str, nn.Parameter]
_AHEAD = 2
"""Blocks that are read while one is stepped; as many may still be written."""


class BlockOptimizer(HostOptimizer):
    """`HostOptimizer` that steps block by block, with state in host memory."""

    def __init__(
        self, optimizer: Optimizer, masters: Parameters, blocks: SplitMasters | DiskMasters, apart: Iterable[str] = ()
    ) -> None:
        """Raise OptimizerError if the step of `optimizer` is not elementwise."""
        super().__init__(optimizer, masters, apart)
        check_elementwise(self, f"{blocks.where}, which are stepped block by block")
        self._blocks = blocks
        self._buffer = torch.empty(blocks.block)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of a block's values."""
        return torch.float32

    def hyper(self) -> Hyper:
        """Return the current hyper-parameters; raise UnsupportedError if the optimizer has got hooks on its step."""
        if self.steps_whole:
            raise UnsupportedError(f"hooks on the optimizer's step see no masters {self._blocks.where}.")
        return super().hyper()

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        before = {name: dict(self._state(name)) for name in filter(self.trains, gradients)}
        whole = {n: {k: v for k, v in state.items() if self._is_numbered(n, k, v)} for n, state in before.items()}
        once = {name: {k: v for k, v in state.items() if k not in whole[name]} for name, state in before.items()}
        after: dict[str, dict[str, Any]] = {name: {} for name in before}
        for name, block, values, parts in self._read(whole):
            piece = nn.Parameter(values)
            known = {**parts, **{k: v.clone() if isinstance(v, Tensor) else v for k, v in once[name].items()}}
            self.part.state.clear()
            if known:
                self.part.state[piece] = known
            self.step_part(self.part, {name: piece}, {name: gradients[name].reshape(-1)[block].contiguous()}, hyper)
            numbered: dict[str, Tensor] = {}
            for key, value in self.part.state[piece].items():
                (numbered if is_kept_for_each(key, value, piece.shape) else after[name])[key] = value
            self._write(name, block, values, numbered)
        self.part.state.clear()
        for name, values_once in after.items():
            self._state(name).update(values_once)

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = plain_state(self.optimizer.state)[self._masters[name]]
        return state

    def _is_numbered(self, name: str, key: str, value: Any) -> bool:
        return is_kept_for_each(key, value, self._masters[name].shape)

    def _place(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        """Return the memory of a state of a whole parameter, flat; allocate it at its first step."""
        state = self._state(name)
        if not self._is_numbered(name, key, state.get(key)):
            state[key] = torch.empty(self._masters[name].shape, dtype=dtype)
        place: Tensor = state[key].view(-1)
        return place

    def _read(self, whole: Mapping[str, Tensors]) -> Iterator[tuple[str, slice, Tensor, Tensors]]:
        """Yield every block of the parameters in `whole`, which has their states, with its values and parts of these."""
        for name, states in whole.items():
            for block in blocks_of(self._masters[name].numel(), self._blocks.block):
                parts = {key: value.view(-1)[block] for key, value in states.items()}
                yield name, block, self._blocks.read_block(name, block, self._buffer), parts

    def _write(self, name: str, block: slice, values: Tensor, numbered: Mapping[str, Tensor]) -> None:
        self._blocks.write_block(name, block, values)
        for key, value in numbered.items():
            part = self._place(name, key, value.dtype)[block]
            if part.data_ptr() != value.data_ptr():
                part.copy_(value)


class SplitOptimizer(BlockOptimizer):
    """`BlockOptimizer` of split masters, which DeepSpeed's compiled optimizers step a whole parameter at a time."""

    def __init__(self, optimizer: Optimizer, masters: Parameters, split: SplitMasters) -> None:
        super().__init__(optimizer, masters, split)
        self._split, self._whole = split, partial_optimizer(self.part)
        attribute, self._op = gil_free_op(optimizer) if self.native else ("", None)
        if isinstance(self._op, GilFreeOp):
            self._op.add_twins(optimizer, torch.get_num_threads())
            setattr(self._whole, attribute, self._op)

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        if not isinstance(self._op, GilFreeOp):
            super()._step(gradients, hyper)
            return
        for name in filter(self.trains, gradients):
            gradient = gradients[name].contiguous()
            piece = nn.Parameter(gradient)  # of the master's shape, for states like it; its values are not used
            self._whole.state = defaultdict(dict, {piece: self._state(name)})
            self._op.run = partial(self._split.step, name, self._op)
            self.step_part(self._whole, {name: piece}, {name: gradient}, hyper)
        self._whole.state.clear()


class DiskOptimizer(BlockOptimizer):
    """`BlockOptimizer` with masters and state in a file, which threads read before a block's step and write after it."""

    def __init__(self, optimizer: Optimizer, masters: Parameters, disk: DiskMasters, apart: Iterable[str] = ()) -> None:
        """Raise OptimizerError if the step of `optimizer` is not elementwise."""
        super().__init__(optimizer, masters, disk, apart)
        self._disk = disk
        self._reader = ThreadPoolExecutor(1, "harmony-disk-read")
        self._writer = ThreadPoolExecutor(1, "harmony-disk-write")
        self._written: deque[Future[None]] = deque()
        self._places: Tensors = {}  # regions of the file
        numbers = state_numbers(type(optimizer).__name__, optimizer.defaults) or 0
        self.moved_bytes = 8.0 * (numbers + disk.holds_masters)

    def put_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Copy the state of `name` into the file; None: remove it."""
        super().put_state(name, state)
        self._move_in(name)

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        for name in filter(self.trains, gradients):
            self._move_in(name)
        super()._step(gradients, hyper)

    def _move_in(self, name: str) -> None:
        """Copy states of `name` that do not lie in the file (handed over, or loaded) to their places there."""
        for key, value in tuple(self._state(name).items()):
            if self._is_numbered(name, key, value):
                self._place(name, key, value.dtype)

    def _place(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        where, state = f"{key} of {name}", self._state(name)
        if where not in self._places or self._places[where].dtype != dtype:
            self._places[where] = self._disk.file.empty(self._masters[name].shape, dtype)
        place = self._places[where]
        known = state.get(key)
        if known is not place:
            if isinstance(known, Tensor) and self._is_numbered(name, key, known):
                place.copy_(known)
            state[key] = place
        return place.view(-1)

    def state_bytes(self) -> int:
        """Return 0: the state is on the disk."""
        return 0

    def unallocated_bytes(self) -> int:
        return 0

    def _read(self, whole: Mapping[str, Tensors]) -> Iterator[tuple[str, slice, Tensor, Tensors]]:
        work = [(name, block) for name in whole for block in blocks_of(self._masters[name].numel(), self._blocks.block)]
        coming = iter(work)
        ahead: deque[Future[tuple[Tensor, Tensors]]] = deque()
        try:
            for name, block in work:
                for one, part in islice(coming, 1 + _AHEAD - len(ahead)):
                    ahead.append(submit(self._reader, partial(self._load, one, part, whole[one])))
                values, parts = ahead.popleft().result()
                yield name, block, values, parts
                while len(self._written) > _AHEAD:
                    self._written.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
            for write in self._written:
                write.exception()  # waits
        while self._written:
            self._written.popleft().result()

    def close(self) -> None:
        """End the threads, and close the file."""
        self._reader.shutdown()
        self._writer.shutdown()
        self._disk.file.close()

    def _load(self, name: str, block: slice, states: Tensors) -> tuple[Tensor, Tensors]:
        values = self._blocks.read_block(name, block, torch.empty(block.stop - block.start))
        parts = {key: torch.empty(block.stop - block.start, dtype=value.dtype) for key, value in states.items()}
        for key, part in parts.items():
            self._disk.file.read(states[key].view(-1)[block], part)
        return values, parts

    def _write(self, name: str, block: slice, values: Tensor, numbered: Mapping[str, Tensor]) -> None:
        places = {key: self._place(name, key, value.dtype)[block] for key, value in numbered.items()}

        @torch.no_grad()
        def write() -> None:
            self._blocks.write_block(name, block, values)
            for key, value in numbered.items():
                self._disk.file.write(value, places[key])

        self._written.append(submit(self._writer, write))
