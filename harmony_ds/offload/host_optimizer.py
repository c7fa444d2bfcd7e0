"""Steps an optimizer for some of its parameters at a time, on the host.

An elementwise optimizer gives the same result whether its parameters are stepped together or one layer after another.
torch's and DeepSpeed's are; a `step` of somebody else's may do anything, so it is called once, with all gradients there,
unless its class says `elementwise = True`.

What enters is the user's optimizer (any of torch's that treats parameters one by one, or DeepSpeed's compiled ones) and
the masters; hyper-parameters are passed in as they were when the user called `step()`. Knows no thread and no device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from harmony_ds.config.optimizers import of_class, state_numbers
from harmony_ds.errors import OptimizerError
from harmony_ds.offload.host_store import ungated
from harmony_ds.offload.native import gil_free_op, native_of
from harmony_ds.offload.watched_state import WatchedState, plain

_KNOWN = ("torch", "deepspeed", "harmony_ds")
Hyper = tuple[dict[str, Any], ...]
"""The hyper-parameters of every parameter group at one moment, without their parameters."""


class HostOptimizer:
    """Shares the state of `optimizer` and steps subsets of its parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter], apart: Iterable[str] = ()
    ) -> None:
        """Args:
            optimizer: already over the masters.
            masters: by canonical name; those that `optimizer` does not have are not trained.
            apart: the names of those that are not the model's own parameters.

        Raises:
            OptimizerError: `optimizer` needs all parameters at once, or knows one that is not the model's.
        """
        _check_elementwise(optimizer)
        self.optimizer = optimizer
        self._names = names = {id(master): name for name, master in masters.items()}
        self._look: Callable[[], None] | None = None
        self._masters = masters
        # Where the master is not the model's parameter, which notices what is done to its gradient, one over the same
        # memory is stepped that nobody else has: else `zero_grad()` behind a step drops what an update steps with.
        self._stepped = {name: nn.Parameter(masters[name].detach()) for name in apart}
        self._group_of = _groups(optimizer, names)
        self._members = _members(optimizer)
        self.native = native_of(optimizer) is not None
        self._lock = threading.Lock()  # DeepSpeed's compiled object keeps the hyper-parameters of a call in itself
        self.part = part_of(optimizer)
        beside = {key: value for key, value in plain(optimizer.state).items() if id(key) not in names}
        self.part.state = defaultdict(dict, beside)
        if self.native:
            setattr(self.part, *gil_free_op(optimizer))

    @property
    def steps_whole(self) -> bool:
        """Whether the optimizer's own `step` has to be called, once and with all gradients there."""
        hooks = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        return not _is_elementwise(self.optimizer) or any(hooks)

    def step_whole(self, gradients: Mapping[str, Tensor], follow: Callable[[], None]) -> None:
        """Calls the optimizer's own `step`, hooks included, with `gradients` on its parameters.

        Args:
            follow: makes weights follow the masters, as soon as these have been stepped: what hooks and overriding steps
                do behind that may be to the weights.
        """
        followed = False

        def follow_once(*_: Any) -> None:
            nonlocal followed
            if not followed:
                followed = True
                follow()

        hook = self.optimizer.register_step_post_hook(follow_once)
        self.optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
        with ungated():
            for name, gradient in gradients.items():
                self._masters[name].grad = gradient.to(self._masters[name].dtype)
        try:
            type(self.optimizer).step(self.optimizer)
        finally:
            hook.remove()
            follow_once()
            with ungated():
                for name in gradients:
                    self._masters[name].grad = None

    @property
    def trained(self) -> Iterable[str]:
        """The names of its parameters."""
        return self._group_of

    @property
    def trained_elements(self) -> int:
        """Of its parameters, in all."""
        return sum(self._masters[name].numel() for name in self._group_of)

    def trains(self, name: str) -> bool:
        """Whether the optimizer has the parameter `name`."""
        return name in self._group_of

    def group_of(self, name: str) -> int:
        """The parameter group of `name`."""
        return self._group_of[name]

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of each parameter group's parameters."""
        return tuple(tuple(self._names[id(p)] for p in group["params"]) for group in self.optimizer.param_groups)

    def watch(self, look: Callable[[], None]) -> None:
        """Lets the user's optimizer call `look` before its state is read."""
        self._look = look
        self.optimizer.state = WatchedState(plain(self.optimizer.state), look)  # type: ignore[assignment]

    def unwatch(self) -> None:
        """Gives the user's optimizer its plain state back."""
        self._look = None
        self.optimizer.state = plain(self.optimizer.state)  # type: ignore[assignment]

    def give_back(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The user's optimizer has the model's own `parameters` again in the place of masters; its state stays, in fp32."""
        for group in self.optimizer.param_groups:
            group["params"] = [parameters[self._names[id(p)]] if id(p) in self._names else p for p in group["params"]]
        state = plain(self.optimizer.state)
        for name in self._stepped:
            if self._masters[name] in state:
                state[parameters[name]] = state.pop(self._masters[name])

    def was_replaced(self) -> bool:
        """Whether the user's optimizer has got another state (load_state_dict), which is watched from now on."""
        if self._look is None or isinstance(self.optimizer.state, WatchedState):
            return False
        self.watch(self._look)
        return True

    def state_of(self, name: str) -> dict[str, Any] | None:
        """The optimizer's state of `name`; None before its first step. Does not look on the device."""
        known: dict[str, Any] | None = plain(self.optimizer.state).get(self._masters[name])
        return known

    def put_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Replaces the optimizer's state of `name`; None: there is none yet."""
        if state is None:
            plain(self.optimizer.state).pop(self._masters[name], None)
        else:
            plain(self.optimizer.state)[self._masters[name]] = state

    def hyper(self) -> Hyper:
        """The hyper-parameters as they are now.

        Raises:
            OptimizerError: the optimizer has other parameters than when the engine was made.
        """
        self._check_members()
        return tuple(
            {key: _frozen(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        )

    def _check_members(self) -> None:
        now = _members(self.optimizer)
        if now != self._members:
            raise OptimizerError(
                f"the optimizer's parameter groups hold {[len(group) for group in now]} parameters, and held "
                f"{[len(group) for group in self._members]} when the engine was made: what has been added would not be "
                "trained, and what has gone would be. Put every parameter that will ever be trained into the optimizer "
                "before initialize (lr 0 keeps one still), or initialize again."
            )

    def step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Step the masters of `gradients` (of the masters' dtype, host) once."""
        with ungated():
            self._step(gradients, hyper)

    def _step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        trained = {name: gradient for name, gradient in gradients.items() if name in self._group_of}
        known = plain(self.optimizer.state)  # load_state_dict puts another one there
        stepped = {name: self._parameter_to_step(name) for name in trained}
        for name, parameter in stepped.items():
            self.part.state.pop(parameter, None)
            if self._masters[name] in known:
                self.part.state[parameter] = known[self._masters[name]]
        self.step_part(self.part, stepped, trained, hyper)
        for name, parameter in stepped.items():
            if parameter in self.part.state:
                known[self._masters[name]] = self.part.state[parameter]

    def _parameter_to_step(self, name: str) -> nn.Parameter:
        stepped = self._stepped.get(name)
        if stepped is None:
            return self._masters[name]
        stepped.data = self._masters[name].detach()
        return stepped

    def step_part(
        self,
        part: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        gradients: Mapping[str, Tensor],
        hyper: Hyper,
    ) -> None:
        """Steps those of `parameters` that have a gradient once, by `part`, whose groups are empty between steps."""
        chosen: list[list[nn.Parameter]] = [[] for _ in hyper]
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
            chosen[self._group_of[name]].append(parameters[name])
        part.param_groups = [
            {**values, "params": members} for values, members in zip(hyper, chosen, strict=True) if members
        ]
        try:
            with self._lock if native_of(part) else nullcontext():
                type(part).step(part)
        finally:
            part.param_groups = []
            for name in gradients:
                parameters[name].grad = None

    def for_scratch(self, master: nn.Parameter) -> torch.optim.Optimizer:
        """An optimizer of the same kind over `master` alone, with state of its own: for measuring what a step takes."""
        if not _is_elementwise(self.optimizer):  # its step may do anything, to anybody
            return torch.optim.AdamW([master])
        scratch = part_of(self.part)
        scratch.state = defaultdict(dict)
        scratch.param_groups = [{**self.hyper()[0], "params": [master]}]
        return scratch

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the parameters that it steps, and of the gradients that it takes."""
        return next((master.dtype for master in self._masters.values()), torch.float32)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state tensors."""
        states = list(plain(self.optimizer.state).values())
        tensors: Iterable[Any] = (value for state in states for value in state.values())
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))

    def coming_bytes(self) -> int:
        """Bytes of state that it is still to make, at the first updates; 0 where nothing is known of it."""
        numbers = state_numbers(type(self.optimizer).__name__, self.optimizer.defaults) or 0
        wide = getattr(self.optimizer, "fp32_optimizer_states", False)
        dtype = torch.float32 if wide else self.master_dtype
        return max(0, dtype.itemsize * numbers * self.trained_elements - self.state_bytes())


def part_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class that shares `optimizer`'s state but has parameter groups of its own.

    Its class is a subclass without a destructor: DeepSpeed's would destroy the compiled object that both share.
    """
    cls = type(optimizer)
    part = cast(torch.optim.Optimizer, object.__new__(type(cls.__name__, (cls,), {"__del__": lambda self: None})))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # a learning-rate scheduler's wrapper, bound to the user's object
    part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    part.param_groups = []
    return part


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    says: bool | None = getattr(optimizer, "elementwise", None)
    if says is not None:
        return says
    stepping = next(cls for cls in type(optimizer).__mro__ if "step" in cls.__dict__)
    return all(
        module.split(".")[0] in _KNOWN for module in (stepping.__module__, *_modules_of(stepping.__dict__["step"]))
    )


def _modules_of(function: Any) -> Iterator[str]:
    """The modules of a function and of what it is wrapped around: somebody may have put another on a class."""
    while function is not None:
        yield getattr(function, "__globals__", {}).get("__name__", function.__module__)
        function = getattr(function, "__wrapped__", None)


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _frozen(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError if `optimizer` is known to need all parameters at once."""
    row = of_class(type(optimizer).__mro__)
    if row is not None and row.whole:
        raise OptimizerError(
            f"{type(optimizer).__name__} does not treat parameters one by one, so it cannot be stepped layer by "
            "layer on the host. Use an elementwise optimizer such as torch.optim.AdamW, or name one in the ds_config."
        )


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, int]:
    """Return the parameter group of each parameter of `optimizer`, by its name; OptimizerError: one has none."""
    found: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise OptimizerError(
                    f"the optimizer's parameter group {index} holds a parameter of shape {tuple(parameter.shape)} "
                    "that is not one of the model's trainable parameters: build it from model.parameters()."
                )
            found[names[id(parameter)]] = index
    return found
