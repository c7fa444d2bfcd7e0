"""Optimizer steps of this process's pieces of parameters that several processes share.

Masters and state are in shared memory: each process updates its own piece of every parameter, and reads whole ones. An
optimizer makes the state of a piece at its first step; it is then moved to a reserved place in shared memory, where the
program finds the state of the whole parameter.

    shared     state[master]["exp_avg"]    rank 0's | rank 1's | rank 2's
    private    state[piece]["exp_avg"]                a view
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harmony_ds.errors import OptimizerError
from harmony_ds.offload.host_memory import trim_allocator
from harmony_ds.offload.host_optimizer import HostOptimizer, Hyper
from harmony_ds.offload.synced_state import plain_state
from harmony_ds.parallel import World

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


def check_elementwise(host: HostOptimizer, where: str) -> None:
    """Raise OptimizerError if the optimizer's step is not elementwise."""
    optimizer = host.optimizer
    stepping = next(cls for cls in type(optimizer).__mro__ if "step" in cls.__dict__)
    known = stepping.__module__.split(".")[0] in ("torch", "deepspeed") and stepping.__name__ in _ELEMENTWISE
    if not known or host.steps_whole:
        raise OptimizerError(
            f"{type(optimizer).__name__} (its step is {stepping.__module__}.{stepping.__name__}'s"
            f"{', with hooks or a step of its own' if known else ''}) cannot be stepped {where}. Those that can: "
            f"{', '.join(sorted(_ELEMENTWISE))}."
        )


def is_kept_for_each(key: str, value: object, shape: torch.Size) -> bool:
    """Return whether an optimizer's state has one value for each number of a parameter of `shape`."""
    return key not in _KEPT_ONCE and isinstance(value, Tensor) and value.shape == shape


class PieceOptimizer(HostOptimizer):
    """`HostOptimizer` of one of several processes."""

    def __init__(
        self, optimizer: Optimizer, masters: Mapping[str, nn.Parameter], world: World, apart: Iterable[str] = ()
    ) -> None:
        """Raise OptimizerError if the step of `optimizer` is not elementwise."""
        super().__init__(optimizer, masters, apart)
        check_elementwise(self, "by several processes, each of which has a piece of every parameter")
        self._world = world
        self._pieces: dict[str, nn.Parameter] = {}
        self._scratch: set[str] = set()  # parameters of which this process has no element
        self._states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._places: dict[str, int] = {}
        self._order: dict[str, list[str]] = {}  # of the states at a place
        self._shared: dict[tuple[str, str], Tensor] = {}
        for name, master in masters.items():
            self._places[name] = world.memory.reserve(_MOST_STATES * self._room(name))
            self._order[name] = []
            piece = master.data.view(-1)[world.piece(master.numel())]
            if not piece.numel():
                self._scratch.add(name)
                piece = torch.zeros(1, dtype=master.dtype)
            self._pieces[name] = nn.Parameter(piece)

    def hyper(self) -> Hyper:
        """Return the current hyper-parameters; raise UnsupportedError if steps are not elementwise any more."""
        if self.steps_whole:
            self._world.refuse("hooks on the optimizer's step, or a step of the program's own")
        return super().hyper()

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        mine: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            if self.trains(name):
                self._load(name)
                piece = self._pieces[name]
                mine[name] = torch.zeros_like(piece) if name in self._scratch else gradient.reshape(-1).contiguous()
        self.part.state = self._states
        self.step_part(self.part, self._pieces, mine, hyper)
        moved = [self._keep(name) for name in mine]
        if any(moved):
            trim_allocator()

    def put_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Replace the optimizer's state of `name`; see `HostOptimizer.put_state`. Elementwise state moves to its place."""
        super().put_state(name, state)
        if state is not None:
            self._load(name)

    def _load(self, name: str) -> None:
        """Make this process's part of the optimizer's state of `name` that of its piece."""
        piece, whole = self._pieces[name], self.state_of(name)
        if not whole:
            self._states.pop(piece, None)
            return
        mine: dict[str, Any] = {}
        for key, value in whole.items():
            if not is_kept_for_each(key, value, self._masters[name].shape):
                mine[key] = value
                continue
            shared = self._share(name, key, value.dtype)
            if value is not shared:
                part = self._world.piece(shared.numel())
                shared.view(-1)[part].copy_(value.detach().reshape(-1)[part])
                whole[key] = shared
            mine[key] = self._mine(name, shared)
        self._states[piece] = mine

    def _keep(self, name: str) -> bool:
        """Make the state of this process's piece part of that of `name`; return whether any was moved to its place."""
        piece, moved = self._pieces[name], False
        state = plain_state(self.optimizer.state)
        whole = state.get(self._masters[name]) or {}
        for key, value in self._states[piece].items():
            if isinstance(value, Tensor) and value.dim() and value.shape == piece.shape:
                shared = self._share(name, key, value.dtype)
                mine = self._mine(name, shared)
                if value.data_ptr() != mine.data_ptr():
                    mine.copy_(value)
                    self._states[piece][key] = mine
                    moved = True
                whole[key] = shared
            else:
                whole[key] = value
        state[self._masters[name]] = whole
        return moved

    def _mine(self, name: str, shared: Tensor) -> Tensor:
        if name in self._scratch:
            return torch.zeros(1, dtype=shared.dtype)
        return shared.view(-1)[self._world.piece(shared.numel())]

    def _share(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        """Return the shared tensor of the state `key`; all processes see the same states in the same order."""
        known = self._shared.get((name, key))
        if known is not None and known.dtype == dtype:
            return known
        order = self._order[name]
        if key not in order:
            order.append(key)
        if len(order) > _MOST_STATES or dtype.itemsize > _STATE_BYTES:
            raise OptimizerError(
                f"the optimizer keeps {order} of {name}, in {dtype}: at most {_MOST_STATES} states of {_STATE_BYTES} bytes "
                "can be shared."
            )
        place = self._places[name] + order.index(key) * self._room(name)
        shared = self._shared[name, key] = self._world.memory.at(place, self._masters[name].shape, dtype)
        return shared

    def _room(self, name: str) -> int:
        return -(-self._masters[name].numel() * _STATE_BYTES // 65536) * 65536
