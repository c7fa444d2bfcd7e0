"""Train with several optimizers as if they were one: Muon for matrices and AdamW for the other parameters, say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harmony_ds.errors import OptimizerError
from harmony_ds.optim.host_optimizer import HostOptimizer, Hyper


class OptimizerChain(Optimizer):
    """An optimizer that steps several others, one after the other. Its parameter groups are theirs.

    Attributes:
        parts: the optimizers.
        around: the program's own object that holds them, whose `step` is called instead of theirs; None: there is none.
    """

    def __init__(self, parts: Sequence[Optimizer], around: Any = None) -> None:
        self.parts, self.around = tuple(parts), around
        self.__setstate__({"defaults": {}, "param_groups": []})  # what `Optimizer.__init__` makes beside the groups
        self.follow_parts()

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all parameters, to be read only."""
        return {key: value for part in self.parts for key, value in part.state.items()}

    def follow_parts(self) -> None:
        """Use the present parameter groups of the parts, which make new ones when they load a state."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step all parts."""
        if closure is not None:
            raise OptimizerError("a chain of optimizers takes no closure, which each of them would evaluate.")
        if self.around is not None:
            self.around.step()
            return
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, where the parameters of all parts are numbered through."""
        groups, states = list(state_dict["param_groups"]), state_dict["state"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, and the optimizers of this chain {len(self.param_groups)}"
            )
        for part in self.parts:
            part_groups, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            numbers = {number for group in part_groups for number in group["params"]}
            state = {number: value for number, value in states.items() if number in numbers}
            type(part).load_state_dict(part, {"state": state, "param_groups": part_groups})
        self.follow_parts()

    def __reduce__(self) -> tuple[Any, ...]:
        return chained, (self.parts, self.around)


def chained(parts: Sequence[Optimizer], around: Any = None) -> OptimizerChain:
    """Return the chain of `parts`. Its class is named after theirs, since checkpoints note the class of their optimizer."""
    name = "And".join(type(part).__name__ for part in parts)
    made: OptimizerChain = type(name, (OptimizerChain,), {})(parts, around)
    return made


def as_one_optimizer(optimizer: Any) -> Any:
    """Return a chain for a sequence of optimizers, or for an object that holds several; return anything else as it is.

    Raises:
        OptimizerError: a sequence holds something else, or nothing.
    """
    if isinstance(optimizer, (list, tuple)):
        wrong = [type(item).__name__ for item in optimizer if not isinstance(item, Optimizer)]
        if wrong or not optimizer:
            raise OptimizerError(
                f"optimizer is a sequence of {len(optimizer)}{f', with {wrong[0]} in it' if wrong else ''}: give one torch "
                "optimizer, or several over different parameters."
            )
        return chained(optimizer) if len(optimizer) > 1 else optimizer[0]
    held = [] if optimizer is None or isinstance(optimizer, (OptimizerChain, type)) else _held_by(optimizer)
    return chained(held, around=optimizer) if held else optimizer


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain; for any other optimizer, itself."""
    return optimizer.parts if isinstance(optimizer, OptimizerChain) else (optimizer,)


def _held_by(holder: Any) -> list[Optimizer]:
    """Return the optimizers that an object with a `step` holds in its attributes, if there are several.

    Return none if the object is an optimizer with parameters that they do not have: it steps those by itself.
    """
    if not hasattr(holder, "step") or not hasattr(holder, "__dict__"):
        return []
    optimizers: dict[int, Optimizer] = {}
    for value in vars(holder).values():
        items: Iterable[Any] = [value]
        if isinstance(value, (list, tuple)):
            items = value
        elif isinstance(value, Mapping):
            items = value.values()
        for item in items:
            if isinstance(item, Optimizer):
                optimizers[id(item)] = item
    if len(optimizers) < 2:
        return []
    if isinstance(holder, Optimizer):
        theirs: set[int] = set()
        for optimizer in optimizers.values():
            theirs.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if any(id(parameter) not in theirs for group in holder.param_groups for parameter in group["params"]):
            return []
    return list(optimizers.values())


@contextmanager
def _with_own_steps(parts: Sequence[Optimizer]) -> Iterator[None]:
    """Give `parts` the `step` of their class while open: `OptimizerOverride` has replaced it by one that refuses."""
    on_object = [(part, vars(part).pop("step")) for part in parts if "step" in vars(part)]
    try:
        yield
    finally:
        for part, step in on_object:
            vars(part)["step"] = step


class HostOptimizerChain(HostOptimizer):
    """`HostOptimizer` of a chain: each of its optimizers steps its own parameters."""

    def __init__(
        self, optimizer: OptimizerChain, masters: Mapping[str, nn.Parameter], separate_masters: Iterable[str]
    ) -> None:
        names = tuple(separate_masters)
        self.optimizer: OptimizerChain = optimizer
        self._masters = masters
        self._parts = [HostOptimizer(part, masters, names) for part in optimizer.parts]
        self._owner = {name: part for part in self._parts for name in part.trained}
        self._counts = [len(part.optimizer.param_groups) for part in self._parts]
        self.native = False
        self.part = self._parts[0].part

    @property
    def steps_whole(self) -> bool:
        chain = self.optimizer
        hooks = chain._optimizer_step_pre_hooks, chain._optimizer_step_post_hooks
        return chain.around is not None or any(hooks) or any(part.steps_whole for part in self._parts)

    def step_whole(
        self,
        gradients: Mapping[str, Tensor],
        coefficient: Tensor | None,
        note_update: Callable[[], None],
        sync_weights: Callable[[], None],
    ) -> None:
        """Call the step of every optimizer, or of the object around them, with `gradients`; see `HostOptimizer`."""
        chain = self.optimizer
        if chain.around is not None:
            with _with_own_steps(chain.parts):
                super().step_whole(gradients, coefficient, note_update, sync_weights)
            return
        for hook in list(chain._optimizer_step_pre_hooks.values()):
            hook(chain, (), {})
        for part in self._parts:
            part_gradients = {name: gradient for name, gradient in gradients.items() if part.trains(name)}
            part.step_whole(part_gradients, coefficient, note_update, sync_weights)
        for hook in list(chain._optimizer_step_post_hooks.values()):
            hook(chain, (), {})

    @property
    def trained(self) -> Iterable[str]:
        return self._owner

    def trains(self, name: str) -> bool:
        return name in self._owner

    def group_of(self, name: str) -> int:
        place = self._parts.index(self._owner[name])
        return sum(self._counts[:place]) + self._owner[name].group_of(name)

    def groups(self) -> tuple[tuple[str, ...], ...]:
        return tuple(names for part in self._parts for names in part.groups())

    def watch_state(self, sync: Callable[[Iterable[str]], None]) -> None:
        for part in self._parts:
            part.watch_state(sync)

    def unwatch_state(self) -> None:
        for part in self._parts:
            part.unwatch_state()

    def watch_replaced_state(self) -> bool:
        """Watch the states again that the program has replaced; return whether it has replaced any."""
        replaced = [part.watch_replaced_state() for part in self._parts]
        return any(replaced)

    def restore_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for part in self._parts:
            part.restore_parameters(parameters)

    def state_of(self, name: str) -> dict[str, Any] | None:
        return self._owner[name].state_of(name)

    def put_state(self, name: str, state: dict[str, Any] | None) -> None:
        self._owner[name].put_state(name, state)

    def hyper(self) -> Hyper:
        self.optimizer.follow_parts()
        return tuple(values for part in self._parts for values in part.hyper())

    def step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Step the masters of `gradients` once, each by the optimizer that has it."""
        begin = 0  # of an optimizer's parameter groups among all
        for part, count in zip(self._parts, self._counts, strict=True):
            own = {name: gradient for name, gradient in gradients.items() if part.trains(name)}
            part.step(own, hyper[begin : begin + count])
            begin += count

    def scratch_optimizer(self, master: nn.Parameter) -> torch.optim.Optimizer:
        """Return one like the optimizer with the most elements."""
        return max(self._parts, key=lambda part: part.trained_elements).scratch_optimizer(master)

    @property
    def state_dtype(self) -> torch.dtype | None:
        return None

    def state_bytes(self) -> int:
        return sum(part.state_bytes() for part in self._parts)

    def unallocated_bytes(self) -> int:
        return sum(part.unallocated_bytes() for part in self._parts)
