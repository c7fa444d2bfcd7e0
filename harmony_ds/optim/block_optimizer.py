"""Host optimizers that step each parameter block by block, where its fp32 master is not one tensor of this process alone.

Each process of a server updates its own piece of every parameter, and reads whole parameters. A piece is stepped in blocks:
a block's values become a parameter of the block's length, and the block's slices of the optimizer's state become its state.
After the step, both are written back.

    SharedMasters   the piece itself ──step──> the piece itself                                  state: in shared memory
    SplitMasters    weights, low bits ──join──> values ──step──> split ──> weights, low bits     state: in memory
    DiskMasters     file ──read early──> values, state ──step──> written later ──> file, weights state: in the file
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess, World
from harmony_ds.distributed.shared_memory import SharedMemory
from harmony_ds.errors import OptimizerError, UnsupportedError
from harmony_ds.offload.disk import DiskFile, DiskMasters
from harmony_ds.offload.host_store import bypass_hooks
from harmony_ds.offload.layout import blocks_of
from harmony_ds.offload.native import GilFreeOp, gil_free_op
from harmony_ds.offload.split_masters import SplitMasters, SplitStep
from harmony_ds.optim.host_optimizer import HostOptimizer, Hyper, partial_optimizer

StateTensors = dict[str, Tensor]
"""By name of a value of the optimizer's state (`exp_avg`): its tensor."""
Parameters = Mapping[str, nn.Parameter]
_ELEMENTWISE = frozenset(
    "SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop DeepSpeedCPUAdam DeepSpeedCPUAdagrad "
    "DeepSpeedCPULion".split()
)
"""Optimizers of torch and DeepSpeed whose step of a part of a parameter gives that part of a step of the whole."""
_KEPT_ONCE = frozenset("step mu_product eta mu".split())
"""States of these that are one number for a whole parameter. A scalar parameter's shape would not tell."""
_MOST_STATES = 5
"""The most states that any of these keeps for each element of a parameter."""
_STATE_BYTES = 4


class SharedMasters:
    """Masters in memory that several processes share; their pieces are stepped in place."""

    block = sys.maxsize
    where = "by several processes, each of which has a piece of every parameter"

    def __init__(self, masters: Parameters) -> None:
        self._masters = masters

    def read_block(self, name: str, block: slice) -> Tensor:
        return self._masters[name].detach().view(-1)[block]

    def write_block(self, name: str, block: slice, values: Tensor) -> None:
        """Do nothing: `values` are the master's own memory."""


class StateMemory:
    """Memory of an optimizer's state in a file or in shared memory, laid out alike in every process."""

    def __init__(self, file: SharedMemory | DiskFile, parameters: Parameters, most: int) -> None:
        """Reserve room for `most` states of each of `parameters`."""
        self._file, self._parameters, self._most = file, parameters, most
        self._free: dict[str, list[int]] = {}
        for name, parameter in parameters.items():
            self._free[name] = [file.reserve(parameter.numel() * _STATE_BYTES) for _ in range(most)]
        self._tensors: dict[str, StateTensors] = {name: {} for name in parameters}

    def tensor(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        """Return the tensor of the state `key` of the parameter `name`, uninitialised at first.

        All processes have to ask for the states of a parameter in the same order.
        """
        known, free = self._tensors[name], self._free[name]
        if key not in known:
            if not free or dtype.itemsize > _STATE_BYTES:
                raise OptimizerError(
                    f"the optimizer keeps {[*known, key]} of {name}, in {dtype}: there are places for {self._most} "
                    f"states of {_STATE_BYTES} bytes, which its class is known for."
                )
            known[key] = self._file.at(free.pop(), self._parameters[name].shape, dtype)
        return known[key]


class BlockOptimizer(HostOptimizer):
    """`HostOptimizer` that steps this process's piece of each parameter, block by block."""

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Parameters,
        blocks: SharedMasters | SplitMasters | DiskMasters,
        world: SingleProcess,
        separate_masters: Iterable[str] = (),
    ) -> None:
        """Make an optimizer that reads and writes values by `blocks`.

        Raises:
            OptimizerError: the step of `optimizer` is not known to be elementwise.
        """
        super().__init__(optimizer, masters, separate_masters)
        self._check_steps(blocks.where)
        self._blocks, self._world = blocks, world
        self._block_part = self.part  # steps the blocks
        self._memory: StateMemory | None = None  # of the state; None: this process's own
        if isinstance(blocks, DiskMasters):
            self._memory = StateMemory(blocks.file, {name: masters[name] for name in self.trained}, blocks.states)
        elif isinstance(world, World):
            self._memory = StateMemory(world.memory, masters, _MOST_STATES)

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
        """Return the current hyper-parameters; raise UnsupportedError if hooks on the optimizer's step were added."""
        if self.steps_whole:
            raise UnsupportedError(f"hooks on the optimizer's step cannot be called {self._blocks.where}.")
        return super().hyper()

    def put_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Replace the optimizer's state of `name`, and copy it to its memory; None: remove it."""
        super().put_state(name, state)
        if state is not None:
            self._move_to_memory(name)

    def step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Step this process's pieces of the masters of `gradients` once."""
        with bypass_hooks():
            names = [name for name in gradients if self.trains(name)]
            elementwise: dict[str, StateTensors] = {}  # by parameter, its states that have a value for each element
            scalar: dict[str, dict[str, Any]] = {}  # its other states, such as the step counter, before the step
            scalar_after: dict[str, dict[str, Any]] = {}
            for name in names:
                elementwise[name], scalar[name] = self._split_state(
                    self._move_to_memory(name), self._masters[name].shape
                )
                scalar_after[name] = {}
            for name, block, values, block_state in self._read_blocks(elementwise):
                piece = nn.Parameter(values)
                part = self._block_part if block.start < block.stop else self.part
                state = {**block_state}
                for key, value in scalar[name].items():  # each block begins with the counters from before the step
                    state[key] = value.clone() if isinstance(value, Tensor) else value
                if state:
                    part.state[piece] = state
                gradient = self._gradient_of_block(name, block, gradients[name], values)
                with self.filled(part, {name: piece}, {name: gradient}, hyper):
                    part.step()
                block_state_after, counters = self._split_state(part.state.pop(piece, {}), piece.shape)
                scalar_after[name].update(counters)
                self._write_block(name, block, values, block_state_after)
            for name in names:
                self._state(name).update(scalar_after[name])

    @staticmethod
    def _split_state(state: Mapping[str, Any], shape: torch.Size) -> tuple[StateTensors, dict[str, Any]]:
        """Return the states that have a value for each element of a parameter of `shape`, and the others."""
        elementwise: StateTensors = {}
        scalar: dict[str, Any] = {}
        for key, value in state.items():
            if _is_elementwise(key, value, shape):
                elementwise[key] = value
            else:
                scalar[key] = value
        return elementwise, scalar

    def _gradient_of_block(self, name: str, block: slice, gradient: Tensor, values: Tensor) -> Tensor:
        """Return a block's part of `gradient`, which is that of this process's piece of `name`."""
        if block.start == block.stop:
            return torch.zeros_like(values)
        begin = self._piece(name).start
        return gradient.reshape(-1)[block.start - begin : block.stop - begin].contiguous()

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self._stepped_state[self._masters[name]]
        return state

    def _piece(self, name: str) -> slice:
        return self._world.piece(self._masters[name].numel())

    def _move_to_memory(self, name: str) -> dict[str, Any]:
        """Return the state of `name`, after copying to its memory what was put or loaded elsewhere."""
        state = self._state(name)
        for key, value in tuple(state.items()):
            if self._memory is not None and _is_elementwise(key, value, self._masters[name].shape):
                state[key] = memory = self._memory.tensor(name, key, value.dtype)
                if memory is not value:
                    piece = self._piece(name)
                    memory.view(-1)[piece].copy_(value.detach().reshape(-1)[piece])
        return state

    def _blocks_of(self, names: Iterable[str]) -> Iterator[tuple[str, slice]]:
        """Yield the blocks of this process's pieces of `names`; of a piece without elements, one without elements."""
        for name in names:
            piece = self._piece(name)
            for block in [*blocks_of(piece, self._blocks.block)] or [piece]:
                yield name, block

    def _read_blocks(self, states: Mapping[str, StateTensors]) -> Iterator[tuple[str, slice, Tensor, StateTensors]]:
        """Yield every block of the parameters in `states`: name, block, its values, its slices of the states."""
        for name, block in self._blocks_of(states):
            values, block_state = self._read_block(name, block, states[name])
            yield name, block, values, block_state

    def _read_block(self, name: str, block: slice, states: StateTensors) -> tuple[Tensor, StateTensors]:
        """Return the values of a block, and its slices of `states`.

        For a block without elements, return one zero of each: it is stepped for the parameter's counters.
        """
        if block.start == block.stop:
            return torch.zeros(1, dtype=self.master_dtype), {key: v.new_zeros(1) for key, v in states.items()}
        return self._values_of_block(name, block), {key: value.view(-1)[block] for key, value in states.items()}

    def _values_of_block(self, name: str, block: slice) -> Tensor:
        return self._blocks.read_block(name, block)

    def _write_block(self, name: str, block: slice, values: Tensor, block_state: StateTensors) -> None:
        """Write the values of a block, and its slices of the states, after its step."""
        states: list[tuple[Tensor, Tensor]] = []  # from, to
        for key, value in block_state.items():
            states.append((value, self._memory_of_state(name, key, value)[block]))
        if block.start < block.stop:
            self._store_block(name, block, values, states)

    def _memory_of_state(self, name: str, key: str, value: Tensor) -> Tensor:
        """Return the whole state `key` of `name`, flat; made at its first step, which gave a block the state `value`."""
        state, shape = self._state(name), self._masters[name].shape
        if not _is_elementwise(key, state.get(key), shape):
            if self._memory is not None:
                state[key] = self._memory.tensor(name, key, value.dtype)
            elif value.numel() == shape.numel():
                state[key] = value.view(shape)
            else:
                state[key] = value.new_empty(shape)
        whole: Tensor = state[key].view(-1)
        return whole

    def _store_block(self, name: str, block: slice, values: Tensor, states: list[tuple[Tensor, Tensor]]) -> None:
        self._blocks.write_block(name, block, values)
        for value, memory in states:
            if memory.data_ptr() != value.data_ptr():
                memory.copy_(value)


def _is_elementwise(key: str, value: object, shape: torch.Size) -> bool:
    """Return whether a state of an optimizer has a value for each element of a parameter of `shape`."""
    return key not in _KEPT_ONCE and isinstance(value, Tensor) and value.shape == shape


class SplitOptimizer(BlockOptimizer):
    """`BlockOptimizer` of split masters. A compiled loop joins, steps and splits each block of DeepSpeed's optimizers."""

    def __init__(
        self, optimizer: Optimizer, masters: Parameters, split: SplitMasters, world: SingleProcess = SINGLE_PROCESS
    ) -> None:
        super().__init__(optimizer, masters, split, world)
        self._split = split
        self._split_step: SplitStep | None = None
        attribute, op = gil_free_op(optimizer) if self.native else ("", None)
        if isinstance(op, GilFreeOp):
            self._split_step = SplitStep(split, op, optimizer)
            self._block_part = partial_optimizer(self.part)
            self._block_part.state = defaultdict(dict)
            setattr(self._block_part, attribute, self._split_step)

    def step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Step this process's pieces of the masters of `gradients` once, and count them as written."""
        super().step(gradients, hyper)
        self._split.versions.update(name for name in gradients if self.trains(name))

    def _values_of_block(self, name: str, block: slice) -> Tensor:
        """Return a block's values; with the compiled loop a placeholder of its length, and aim the loop at the block."""
        if self._split_step is None:
            return super()._values_of_block(name, block)
        self._split_step.aim(name, block)
        return torch.empty(block.stop - block.start)

    def _store_block(self, name: str, block: slice, values: Tensor, states: list[tuple[Tensor, Tensor]]) -> None:
        if self._split_step is None:
            super()._store_block(name, block, values, states)
            return
        for value, memory in states:  # the loop has written the masters
            if memory.data_ptr() != value.data_ptr():
                memory.copy_(value)

    @property
    def master_dtype(self) -> torch.dtype:
        """Return fp32, the dtype of a block's values."""
        return torch.float32
