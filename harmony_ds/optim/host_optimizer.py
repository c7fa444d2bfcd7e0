"""The user's optimizer, stepped on the host for the parameters of one pack at a time.

An elementwise optimizer gives the same result whether all parameters are stepped together or pack by pack. torch's and
DeepSpeed's optimizers are elementwise. torchao's and bitsandbytes' with state in 8 bits quantize blocks of one parameter,
and may be stepped so, too. The `step` of any other optimizer is called once, with all gradients, unless its class sets
`elementwise = True`.

Five classes step masters on the host:

    HostOptimizer         whole parameters, with torch's or DeepSpeed's step
    HostOptimizerChain    the same, for several optimizers over different parameters
    BlockOptimizer        this process's piece of each parameter, where several processes share them
    SplitOptimizer        the same, of masters that are stored as weights and low bits
    DiskOptimizer         the same, of masters and state in a file, which threads read and write

Hyper-parameters are passed in as they were when the user called `step()`. This file knows no thread and no device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from harmony_ds.config.optimizers import of_class, state_bytes, state_numbers
from harmony_ds.errors import OptimizerError
from harmony_ds.offload.host_store import bypass_hooks
from harmony_ds.offload.native import gil_free_op, native_of
from harmony_ds.offload.wrappers import stored_bytes
from harmony_ds.optim.synced_state import SyncedState, plain_state

_KNOWN = ("torch", "deepspeed", "harmony_ds", "torchao.optim.adam", "bitsandbytes.optim")
"""Packages and modules whose optimizers step every parameter by itself."""
Hyper = tuple[dict[str, Any], ...]
"""The hyper-parameters of every parameter group at one moment, without their parameters."""


class HostOptimizer:
    """Step of an optimizer for some of its parameters at a time, with the optimizer's own state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, nn.Parameter],
        separate_masters: Iterable[str] = (),
    ) -> None:
        """Check `optimizer`, and make a partial one (`part`) that shares its state.

        Args:
            optimizer: the user's; its parameters are the masters.
            masters: by canonical name; those that `optimizer` does not have are not trained.
            separate_masters: names of masters that are not the model's own parameters, but fp32 copies of them.

        Raises:
            OptimizerError: `optimizer` needs all parameters at once, or has one that is not the model's.
        """
        _check_class(type(optimizer))
        self.optimizer = optimizer
        self._names = names = {id(master): name for name, master in masters.items()}
        self._sync: Callable[[Iterable[str]], None] | None = None  # given to `watch_state`
        self._masters = masters
        # A separate master is stepped through a private parameter over the same memory: otherwise the user's `zero_grad()`
        # after a step would drop the gradient that a pending update still uses.
        self._private = {name: nn.Parameter(masters[name].detach()) for name in separate_masters}
        self._group_of = _groups(optimizer, names)
        self._members = _members(optimizer)
        self.native = native_of(optimizer) is not None
        self._lock = threading.Lock()  # DeepSpeed's compiled object keeps the hyper-parameters of a call in itself
        self.part = partial_optimizer(optimizer)
        # State of the whole optimizer, whose keys are not parameters, is shared; that of parameters is lent for their step.
        whole_state = {key: value for key, value in plain_state(optimizer.state).items() if id(key) not in names}
        self.part.state = defaultdict(dict, whole_state)
        # Updates that are under way go on in this one, though the program puts another in its place.
        self._stepped_state = plain_state(optimizer.state)
        if self.native:
            setattr(self.part, *gil_free_op(optimizer))

    @property
    def steps_whole(self) -> bool:
        """Whether the optimizer's own `step` has to be called, once and with all gradients."""
        hooks = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        return not _is_elementwise(self.optimizer) or any(hooks)

    def step_whole(
        self,
        gradients: Mapping[str, Tensor],
        coefficient: Tensor | None,
        note_update: Callable[[], None],
        sync_weights: Callable[[], None],
    ) -> None:
        """Call the optimizer's own `step`, hooks included, with `gradients`.

        Args:
            gradients: copies, which may be changed.
            coefficient: factor of every gradient, in the masters' dtype: 16-bit sums would round it; None: 1.
            note_update: called before the optimizer's arithmetic: as the last of its pre hooks, since the user's may raise
                errors before anything is updated; before `step`, if that is not torch's way to call hooks.
            sync_weights: copies masters to weights. It is called right after the optimizer's arithmetic, as the first of
                the optimizer's post hooks, since the user's hooks and an overriding `step` may read the weights.
        """
        synced = False

        def sync_once(*_: Any) -> None:
            nonlocal synced
            if not synced:
                synced = True
                sync_weights()

        if not hasattr(type(self.optimizer).step, "hooked"):  # by torch, which has it call hooks
            note_update()
        before = self.optimizer.register_step_pre_hook(lambda *_: note_update())
        after = self.optimizer.register_step_post_hook(sync_once)
        self.optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        with bypass_hooks():
            for name, total in gradients.items():
                gradient = total.to(self._masters[name].dtype)
                self._masters[name].grad = gradient if coefficient is None else gradient.mul_(coefficient)
        try:
            type(self.optimizer).step(self.optimizer)
        finally:
            before.remove()
            after.remove()
            sync_once()
            with bypass_hooks():
                for name in gradients:
                    self._masters[name].grad = None

    @property
    def trained(self) -> Iterable[str]:
        """Names of the parameters that the optimizer has."""
        return self._group_of

    @property
    def trained_elements(self) -> int:
        return sum(self.trained_numels())

    def trained_numels(self) -> list[int]:
        """Return the number of elements of each trained parameter."""
        return [self._masters[name].numel() for name in self.trained]

    def trains(self, name: str) -> bool:
        """Return whether the optimizer has the parameter `name`."""
        return name in self._group_of

    def group_of(self, name: str) -> int:
        """Return the index of the parameter group that `name` is in."""
        return self._group_of[name]

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters in each parameter group."""
        return tuple(tuple(self._names[id(p)] for p in group["params"]) for group in self.optimizer.param_groups)

    def watch_state(self, sync: Callable[[Iterable[str]], None]) -> None:
        """Call `sync`, with names of parameters, before their state in the user's optimizer is read or written."""
        self._sync = sync

        def sync_key(key: object) -> None:
            if key is None:
                sync(self.trained)
            elif id(key) in self._names:
                sync((self._names[id(key)],))

        self.optimizer.state = SyncedState(plain_state(self.optimizer.state), sync_key)  # type: ignore[assignment]

    def unwatch_state(self) -> None:
        """Give the user's optimizer its plain state back."""
        self._sync = None
        self.optimizer.state = plain_state(self.optimizer.state)  # type: ignore[assignment]

    def restore_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace masters by the model's own `parameters` in the user's optimizer; its state stays, in fp32."""
        for group in self.optimizer.param_groups:
            group["params"] = [parameters[self._names[id(p)]] if id(p) in self._names else p for p in group["params"]]
        state = plain_state(self.optimizer.state)
        for name in self._private:
            if self._masters[name] in state:
                state[parameters[name]] = state.pop(self._masters[name])

    def watch_replaced_state(self) -> bool:
        """Watch the state again, and step it from now on, if the program has replaced it; return whether it has."""
        if self._sync is None or isinstance(cast(Any, self.optimizer.state), SyncedState):
            return False
        self.watch_state(self._sync)
        self._sync(())  # waits for updates of the one that was replaced
        self._stepped_state = plain_state(self.optimizer.state)
        return True

    def state_of(self, name: str) -> dict[str, Any] | None:
        """Return the host's optimizer state of `name`, without a sync; None before its first step."""
        known: dict[str, Any] | None = plain_state(self.optimizer.state).get(self._masters[name])
        return known

    def put_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Replace the optimizer's state of `name`; None: remove it."""
        if state is None:
            plain_state(self.optimizer.state).pop(self._masters[name], None)
        else:
            plain_state(self.optimizer.state)[self._masters[name]] = state

    def hyper(self) -> Hyper:
        """Return the current hyper-parameters; raise OptimizerError if the optimizer has other parameters than before."""
        self._check_members()
        groups = self.optimizer.param_groups
        return tuple({key: _frozen(value) for key, value in group.items() if key != "params"} for group in groups)

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
        """Step the masters of `gradients` once; gradients are on the host, in the masters' dtype."""
        trained = {name: gradient for name, gradient in gradients.items() if name in self._group_of}
        all_state = self._stepped_state
        with bypass_hooks():
            parameters = {name: self._parameter_to_step(name) for name in trained}
            for name, parameter in parameters.items():
                self.part.state.pop(parameter, None)
                if self._masters[name] in all_state:
                    self.part.state[parameter] = all_state[self._masters[name]]
            with self.filled(self.part, parameters, trained, hyper):
                self.part.step()
            for name, parameter in parameters.items():
                if parameter in self.part.state:
                    all_state[self._masters[name]] = self.part.state[parameter]

    def _parameter_to_step(self, name: str) -> nn.Parameter:
        private = self._private.get(name)
        if private is None:
            return self._masters[name]
        private.data = self._masters[name].detach()
        return private

    @contextmanager
    def filled(
        self,
        part: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        gradients: Mapping[str, Tensor],
        hyper: Hyper,
    ) -> Iterator[None]:
        """Fill the parameter groups of `part` with those of `parameters` that have a gradient, while open.

        Call `part.step()` in the context. Before and after it, a partial optimizer has no parameters.
        """
        row = native_of(part)
        members: list[list[nn.Parameter]] = [[] for _ in hyper]
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
            members[self._group_of[name]].append(parameters[name])
        groups = []
        for values, group_members in zip(hyper, members, strict=True):
            if group_members:
                groups.append({**values, "params": group_members})
        part.param_groups = groups
        try:
            with nullcontext() if row is None else self._lock:
                yield
        finally:
            part.param_groups = []
            for name in gradients:
                parameters[name].grad = None
        if row is not None:  # DeepSpeed's Lion makes a state that it never uses
            for name in gradients:
                state = part.state[parameters[name]]
                for key in state.keys() - {"step", *row.keeps}:
                    del state[key]

    def scratch_optimizer(self, master: nn.Parameter) -> torch.optim.Optimizer:
        """Return an optimizer of the same kind over `master` alone, with its own state, for measuring steps."""
        if not _is_elementwise(self.optimizer):  # its step may have side effects
            return torch.optim.AdamW([master])
        scratch = partial_optimizer(self.part)
        scratch.state = defaultdict(dict)
        scratch.param_groups = [{**self.hyper()[0], "params": [master]}]
        return scratch

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the masters, and of the gradients that `step` takes."""
        return next((master.dtype for master in self._masters.values()), torch.float32)

    @property
    def state_dtype(self) -> torch.dtype | None:
        """The dtype of the state of one of DeepSpeed's optimizers; None: another optimizer, which chooses it by itself."""
        if not self.native:
            return None
        return torch.float32 if getattr(self.optimizer, "fp32_optimizer_states", True) else self.master_dtype

    moved_bytes = 0.0
    """Bytes that an update moves to and from a disk, for each element of a parameter."""

    def close(self) -> None:
        """End threads and close files, if there are any; the optimizer's state stays."""

    def state_bytes(self) -> int:
        """Return the bytes of host memory that the optimizer's state takes now."""
        states = list(plain_state(self.optimizer.state).values())
        return sum(stored_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor))

    def unallocated_bytes(self) -> int:
        """Return the bytes of optimizer state not yet allocated, which the first updates allocate; 0: not known."""
        name = kind_of(self.optimizer)
        numbers = state_numbers(name, self.optimizer.defaults) or 0
        wide = getattr(self.optimizer, "fp32_optimizer_states", False)
        dtype = torch.float32 if wide else self.master_dtype
        return max(0, int(state_bytes(name, dtype.itemsize) * numbers * self.trained_elements) - self.state_bytes())


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of its class; of bitsandbytes' with `optim_bits=8`, that of the class that always has 8 bits."""
    name = type(optimizer).__name__
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return f"{name}8bit" if bits == 8 and not name.endswith("8bit") else name


def partial_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class that shares `optimizer`'s state, without its parameter groups.

    Its class is a subclass without a destructor: DeepSpeed's would destroy the compiled object that both share.
    """
    cls = type(optimizer)
    part = cast(torch.optim.Optimizer, object.__new__(type(cls.__name__, (cls,), {"__del__": lambda self: None})))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # a learning-rate scheduler's wrapper, bound to the user's object
    part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    part.param_groups = []
    if isinstance(getattr(optimizer, "aux_optimizer", None), torch.optim.Optimizer):  # Muon's, for other parameters
        part.aux_optimizer = partial_optimizer(optimizer.aux_optimizer)  # type: ignore[attr-defined]
    return part


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    says: bool | None = getattr(optimizer, "elementwise", None)
    if says is not None:
        return says
    stepping = next(cls for cls in type(optimizer).__mro__ if "step" in cls.__dict__)
    if _overrides_by_place(optimizer):
        return False
    modules = stepping.__module__, *_modules_of(stepping.__dict__["step"])
    return all(f"{module}.".startswith(tuple(f"{known}." for known in _KNOWN)) for module in modules)


def _overrides_by_place(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether bitsandbytes' options for single parameters are set: it finds those by their places in the groups."""
    manager = getattr(optimizer, "mng", None)
    names = ("index2config", "pid2config", "module_weight_config_triple")
    return any(getattr(manager, name, None) for name in names)


def _modules_of(function: Any) -> Iterator[str]:
    """Yield the modules of a function and of the functions that it wraps."""
    while function is not None:
        yield getattr(function, "__globals__", {}).get("__name__", function.__module__)
        function = getattr(function, "__wrapped__", None)


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _frozen(value: object) -> object:
    """Return a hyper-parameter as it is now: lists and tensors may be written into before the update runs."""
    if isinstance(value, list):
        return [_frozen(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_frozen(one) for one in value)
    return value.clone() if isinstance(value, Tensor) else value


def _check_class(cls: type[torch.optim.Optimizer]) -> None:
    """Raise OptimizerError if optimizers of `cls` are known to need all parameters at once, or stand for another one."""
    if isinstance(getattr(cls, "param_groups", None), property):
        raise OptimizerError(
            f"{cls.__name__} shows the parameter groups of another optimizer: give initialize that one."
        )
    row = of_class(cls.__mro__)
    if row is not None and row.whole:
        raise OptimizerError(
            f"{cls.__name__} does not treat parameters one by one, so it cannot be stepped layer by "
            "layer on the host. Use an elementwise optimizer such as torch.optim.AdamW, or name one in the ds_config."
        )


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, int]:
    """Return the parameter group of each parameter of `optimizer`, by its name; OptimizerError: one has none."""
    places: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise OptimizerError(
                    f"the optimizer's parameter group {index} holds a parameter of shape {tuple(parameter.shape)} "
                    "that is not one of the model's trainable parameters: build it from model.parameters()."
                )
            places[names[id(parameter)]] = index
    return places
