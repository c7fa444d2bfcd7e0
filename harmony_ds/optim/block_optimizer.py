"""Optimizer steps block by block, over masters of which this process has a piece, or that are nowhere whole in fp32.

Several processes of a server update a piece each of every parameter, and read whole ones. A block's values become a
parameter of its length, whose state are the block's parts of the optimizer's state; both are put back after the step.

    shared     the piece itself ──step──> the piece itself                                      state: in shared memory
    split      weights, low bits ──join──> values ──step──> split ──> weights, low bits          state: views of memory
    disk       file ──read early──> values, state ──step──> written later ──> file, weights      state: in the file, too
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harmony_ds.distributed import ALONE, SingleProcess, World
from harmony_ds.distributed.shared_memory import SharedMemory
from harmony_ds.errors import OptimizerError, UnsupportedError
from harmony_ds.offload.disk import DiskFile, DiskMasters
from harmony_ds.offload.layout import blocks_of
from harmony_ds.offload.native import GilFreeOp, gil_free_op
from harmony_ds.offload.split_masters import SplitMasters
from harmony_ds.optim.host_optimizer import HostOptimizer, Hyper, partial_optimizer
from harmony_ds.optim.synced_state import plain_state

Tensors = dict[str, Tensor]
Parameters = Mapping[str, nn.Parameter]
_ELEMENTWISE = frozenset(
    "SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop DeepSpeedCPUAdam DeepSpeedCPUAdagrad "
    "DeepSpeedCPULion".split()
)
"""Classes of torch and DeepSpeed whose step of a part of a parameter equals that part of a step of the whole."""
_KEPT_ONCE = frozenset("step mu_product eta mu".split())
"""Their states that are one number for a parameter; for a scalar parameter the shape does not tell."""
_MOST_STATES = 5
"""The most numbers that any of them keeps for an element."""
_STATE_BYTES = 4


class SharedMasters:
    """Masters in memory that processes share, which are stepped where they are."""

    block = sys.maxsize
    where = "by several processes, each of which has a piece of every parameter"

    def __init__(self, masters: Parameters) -> None:
        self._masters = masters

    def read_block(self, name: str, block: slice) -> Tensor:
        return self._masters[name].detach().view(-1)[block]

    def write_block(self, name: str, block: slice, values: Tensor) -> None:
        """Do nothing: it is written."""


class _SplitSteps(SharedMasters):
    """Split masters, which a compiled loop joins, steps and splits."""

    where = SplitMasters.where

    def __init__(self, split: SplitMasters, op: GilFreeOp) -> None:
        self._split, self._op = split, op

    def read_block(self, name: str, block: slice) -> Tensor:
        """Let the next step be that of a block; return what is of its length, with values that are not used."""
        self._op.run = partial(self._split.step, name, block, self._op)
        return torch.empty(block.stop - block.start)


class StatePlaces:
    """Places of an optimizer's state in a file that processes may share, at which each finds the same."""

    def __init__(self, file: SharedMemory | DiskFile, parameters: Parameters, most: int) -> None:
        """Reserve places of `most` states for every number of `parameters`."""
        self._file, self._parameters, self._most = file, parameters, most
        self._free = {
            name: [file.reserve(p.numel() * _STATE_BYTES) for _ in range(most)] for name, p in parameters.items()
        }
        self._found: dict[str, Tensors] = {name: {} for name in parameters}

    def of(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        """Return the tensor of a state, uninitialised when new; all processes ask for those of a name in one order."""
        found, free = self._found[name], self._free[name]
        if key not in found:
            if not free or dtype.itemsize > _STATE_BYTES:
                raise OptimizerError(
                    f"the optimizer keeps {[*found, key]} of {name}, in {dtype}: there are places for {self._most} "
                    f"states of {_STATE_BYTES} bytes, which its class is known for."
                )
            found[key] = self._file.at(free.pop(), self._parameters[name].shape, dtype)
        return found[key]


class BlockOptimizer(HostOptimizer):
    """`HostOptimizer` that steps the pieces of this process, block by block."""

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Parameters,
        blocks: SharedMasters | SplitMasters | DiskMasters,
        world: SingleProcess = ALONE,
        apart: Iterable[str] = (),
    ) -> None:
        """Raise OptimizerError if the step of `optimizer` is not elementwise."""
        super().__init__(optimizer, masters, apart)
        self._check_steps(blocks.where)
        self._blocks, self._world, self._stepping = blocks, world, self.part
        self._places: StatePlaces | None = None
        if isinstance(blocks, DiskMasters):
            self._places = StatePlaces(blocks.file, {name: masters[name] for name in self.trained}, blocks.states)
        elif isinstance(world, World):
            self._places = StatePlaces(world.memory, masters, _MOST_STATES)

    def _check_steps(self, where: str) -> None:
        stepping = next(cls for cls in type(self.optimizer).__mro__ if "step" in cls.__dict__)
        known = stepping.__module__.split(".")[0] in ("torch", "deepspeed") and stepping.__name__ in _ELEMENTWISE
        if not known or self.steps_whole:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} (its step is {stepping.__module__}.{stepping.__name__}'s"
                f"{', with hooks or a step of its own' if known else ''}) cannot be stepped {where}. Those that can: "
                f"{', '.join(sorted(_ELEMENTWISE))}."
            )

    def hyper(self) -> Hyper:
        """Return the current hyper-parameters; raise UnsupportedError if the optimizer has got hooks on its step."""
        if self.steps_whole:
            raise UnsupportedError(f"hooks on the optimizer's step cannot be called {self._blocks.where}.")
        return super().hyper()

    def put_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Replace the optimizer's state of `name`, at its places; None: remove it."""
        super().put_state(name, state)
        if state is not None:
            self._move_in(name)

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        before = {name: self._move_in(name) for name in filter(self.trains, gradients)}
        whole = {n: {k: v for k, v in state.items() if self._is_numbered(n, k, v)} for n, state in before.items()}
        once = {name: {k: v for k, v in state.items() if k not in whole[name]} for name, state in before.items()}
        after: dict[str, dict[str, Any]] = {name: {} for name in before}
        for name, block, values, parts in self._read(whole):
            piece, stepping = nn.Parameter(values), self._stepping if block.start < block.stop else self.part
            known = {**parts, **{k: v.clone() if isinstance(v, Tensor) else v for k, v in once[name].items()}}
            if known:
                stepping.state[piece] = known
            self.step_part(stepping, {name: piece}, {name: self._part(name, block, gradients[name], values)}, hyper)
            numbered: Tensors = {}
            for key, value in stepping.state.pop(piece, {}).items():
                (numbered if _is_kept_for_each(key, value, piece.shape) else after[name])[key] = value
            self._write(name, block, values, numbered)
        for name, values_once in after.items():
            self._state(name).update(values_once)

    def _part(self, name: str, block: slice, gradient: Tensor, values: Tensor) -> Tensor:
        """Return the gradient of a block, of this process's piece of that of `name`."""
        if block.start == block.stop:
            return torch.zeros_like(values)
        begin = self._piece(name).start
        return gradient.reshape(-1)[block.start - begin : block.stop - begin].contiguous()

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = plain_state(self.optimizer.state)[self._masters[name]]
        return state

    def _is_numbered(self, name: str, key: str, value: Any) -> bool:
        return _is_kept_for_each(key, value, self._masters[name].shape)

    def _piece(self, name: str) -> slice:
        return self._world.piece(self._masters[name].numel())

    def _move_in(self, name: str) -> dict[str, Any]:
        """Copy states of `name` that are not at their places (handed over, or loaded) there; return all."""
        state = self._state(name)
        for key, value in tuple(state.items()):
            if self._places is not None and self._is_numbered(name, key, value):
                state[key] = place = self._places.of(name, key, value.dtype)
                if place is not value:
                    piece = self._piece(name)
                    place.view(-1)[piece].copy_(value.detach().reshape(-1)[piece])
        return state

    def _place(self, name: str, key: str, value: Tensor) -> Tensor:
        """Return the memory of a state of a whole parameter, flat; at its first step maybe a block's `value` itself."""
        state, shape = self._state(name), self._masters[name].shape
        if not self._is_numbered(name, key, state.get(key)):
            if self._places is not None:
                state[key] = self._places.of(name, key, value.dtype)
            else:
                state[key] = (value if value.numel() == shape.numel() else value.new_empty(shape)).view(shape)
        place: Tensor = state[key].view(-1)
        return place

    def _work(self, names: Iterable[str]) -> Iterator[tuple[str, slice]]:
        """Yield the blocks of this process's pieces of `names`; of a piece without elements one that has none."""
        for name in names:
            piece = self._piece(name)
            for block in [*blocks_of(piece, self._blocks.block)] or [piece]:
                yield name, block

    def _read(self, whole: Mapping[str, Tensors]) -> Iterator[tuple[str, slice, Tensor, Tensors]]:
        """Yield every block of the parameters in `whole`, which has their states, with its values and parts of these."""
        for name, block in self._work(whole):
            yield name, block, *self._load(name, block, whole[name])

    def _load(self, name: str, block: slice, states: Tensors) -> tuple[Tensor, Tensors]:
        """Return the values of a block, and its parts of `states`; one of no elements is stepped for what is kept once."""
        if block.start == block.stop:
            return torch.zeros(1, dtype=self.master_dtype), {key: v.new_zeros(1) for key, v in states.items()}
        return self._blocks.read_block(name, block), {key: value.view(-1)[block] for key, value in states.items()}

    def _write(self, name: str, block: slice, values: Tensor, numbered: Tensors) -> None:
        places = {key: self._place(name, key, value)[block] for key, value in numbered.items()}
        if block.start < block.stop:
            self._store(name, block, values, [(value, places[key]) for key, value in numbered.items()])

    def _store(self, name: str, block: slice, values: Tensor, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._blocks.write_block(name, block, values)
        for value, place in copies:
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)


def _is_kept_for_each(key: str, value: object, shape: torch.Size) -> bool:
    """Return whether an optimizer's state has one value for each number of a parameter of `shape`."""
    return key not in _KEPT_ONCE and isinstance(value, Tensor) and value.shape == shape


class SplitOptimizer(BlockOptimizer):
    """`BlockOptimizer` of split masters; DeepSpeed's compiled optimizers step this process's piece at once."""

    def __init__(
        self, optimizer: Optimizer, masters: Parameters, split: SplitMasters, world: SingleProcess = ALONE
    ) -> None:
        super().__init__(optimizer, masters, split, world)
        self._split = split
        attribute, op = gil_free_op(optimizer) if self.native else ("", None)
        if isinstance(op, GilFreeOp):
            op.add_twins(optimizer, torch.get_num_threads())
            self._stepping = partial_optimizer(self.part)
            self._stepping.state = defaultdict(dict)
            setattr(self._stepping, attribute, op)
            self._blocks = _SplitSteps(split, op)

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        super()._step(gradients, hyper)
        self._split.versions.update(filter(self.trains, gradients))

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of a block's values."""
        return torch.float32
