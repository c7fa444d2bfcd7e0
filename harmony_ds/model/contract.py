"""What a forward pass depends on besides its arguments: modes, switches of torch, attributes of modules (docs/contract.md).

A micro-batch runs later than the program calls the model, so its call's state is recorded, and found again when it runs:

    read_state at the call: record its modes, and the plain attributes of the model's modules
    check      before its micro-batch runs: those attributes must be unchanged
    entered    around all that runs for the call: set its modes
    running    around the engine's runs: attributes that change meanwhile were set by forward
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from harmony_ds.decomposer.find import Layer
from harmony_ds.errors import ModelError
from harmony_ds.model.configurations import Configuration, is_configuration
from harmony_ds.model.dict_record import DictRecord
from harmony_ds.model.own_settings import (
    CONTAINERS,
    NOT_PLAIN,
    SET_ONCE,
    Key,
    ModuleSettings,
    are_equal,
    ignored_attributes,
    is_small_container,
    refill,
)
from harmony_ds.model.settings_digest import HOOKS, SettingsDigest
from harmony_ds.model.trees import LIBRARIES
from harmony_ds.offload.host_store import bypass_hooks

_logger = logging.getLogger(__name__)

_STRUCTURE = ("_parameters", "_buffers", "_modules")
_HOOK = "forward hook "
_COPIED_BYTES = 1 << 20  # of a tensor that measuring may write into

Attributes = dict[Key, tuple[Any, Any]]
"""The attributes, buffers and submodules of all modules at one time, and the plain entries of their configurations.

Each with its version if it is a tensor, with a copy if it is a small container of plain values.
"""
_ABSENT = object(), 0
_NOTHING_TO_SET = nullcontext()  # one for all: each task enters it


class UnseenError(ModelError):
    """A forward pass did something that measuring had not seen; it is noted, and the step can be run again."""


@dataclass(frozen=True, slots=True)
class CallModes:
    """The modes of a call: `training` of every module, `requires_grad` of every parameter, torch's switches.

    Attributes:
        settings: a digest of what modules hold and decides how forward computes (`settings_digest`).
    """

    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    switches: tuple[Any, ...]
    settings: bytes

    @property
    def flags(self) -> bytes:
        """The modes that measurements depend on."""
        return bytes((*self.training, *self.trained)) + self.settings


@dataclass(frozen=True, slots=True, eq=False)
class CallState:
    """State of the model when the program called it.

    Attributes:
        attributes: of all modules; calls between which nothing has changed share one object.
        trained_now: reads `requires_grad` of all parameters as it is now.
        model_attributes: the `vars` of the model itself.
        settings: those of its modules that the code of a lane may make.
    """

    modes: CallModes
    attributes: Attributes
    trained_now: Callable[[], tuple[bool, ...]]
    model_attributes: dict[str, Any]
    settings: ModuleSettings

    def at_backward(self) -> CallState:
        """Return the state for a backward pass that is asked for now: parameters frozen since get no gradient."""
        trained = tuple(map(min, self.modes.trained, self.trained_now()))
        return self if trained == self.modes.trained else replace(self, modes=replace(self.modes, trained=trained))


class Contract:
    """Recorder of one model's state at each call, which is checked and set again when the call's micro-batch runs."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer] = ()) -> None:
        self._model, self._layers = model, layers
        # All modules that the model has had, by number: those that are gone keep theirs.
        self._names: list[str] = []
        self._modules: list[nn.Module] = []
        self._held: list[dict[str, Any]] = []
        self._ignored: list[frozenset[str]] = []
        self._inner: set[int] = set()  # numbers of modules inside layers
        self._configurations: list[Configuration] = []  # all that modules have held: the last one has the lowest number
        self._parameters = list(model.parameters())
        self._digest = SettingsDigest()
        self._written: set[Key] = set()  # by forward
        self._with_graphs: set[Key] = set()  # those of them that hold tensors with a graph
        self._stands_for: dict[bytes, bytes] = {}  # digest of settings to an earlier one that stands for it
        self._is_said = False
        self.is_running = False  # by the engine
        self._observers: list[Callable[[], None]] = []
        self._find_modules()
        self._structure = list(map(_structure_of, self._modules))
        self.settings = ModuleSettings(self._modules, layers)
        self._record()
        self.modes = self._modes()  # in force

    def when_structure_changes(self, observer: Callable[[], None]) -> None:
        """Call `observer` from now on when the program has exchanged modules, or given them other buffers."""
        self._observers.append(observer)

    def read_state(self) -> CallState:
        """Return the state now; its `modes` and `attributes` are the same objects as long as nothing changes."""
        if not self.is_running:
            if not self._is_unchanged():
                self._record()
            modes = self._modes()
            self.modes = self.modes if modes == self.modes else modes
        return CallState(self.modes, self._attributes, self._trained, self._held[0], self.settings)

    def trained_since(self, state: CallState) -> set[nn.Module]:
        """Return the modules with buffers that are in training mode now, and were not when the call of `state` came."""
        training = zip(self._modules, state.modes.training, strict=False)
        return {module for module, before in training if module.training and not before and module._buffers}

    def check(self, states: Sequence[CallState]) -> None:
        """Raise ModelError if the program has changed attributes since calls in `states` that run now."""
        now = self.read_state().attributes
        for seen in [state.attributes for state in states if state.attributes is not now]:
            changed = {key for key in _changed(seen, now) - self._written if key[1] != SET_ONCE}
            if changed:
                raise ModelError(
                    f"{self._name(min(changed))} was changed between the calls of a step, whose micro-batches run later "
                    "than they are called and would all see it as it is now. Change it before the first micro-batch of a "
                    "step, or look at the loss of those that wait (loss.item()), and put it back before engine.step()."
                )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attribute changes to forward, which the engine runs while the context is open; warn once that it sets them."""
        outer, before = self.is_running, self.read_state().attributes
        settings = self._settings  # as `read_state` has found them
        self.is_running = True
        if not outer:
            self.settings.begin()
        try:
            yield
            if not outer:
                self.settings.apply_left()
        finally:
            self.is_running = outer
            if not outer and not self._is_unchanged():
                self._record()
                self._note_written(_changed(before, self._attributes), settings)

    def is_current(self, state: CallState) -> bool:
        """Return whether the modes of `state` are set already."""
        return state.modes is self.modes

    def entered(self, state: CallState) -> AbstractContextManager[None]:
        """Return a context in which the modes of `state` are set."""
        return _NOTHING_TO_SET if self.is_current(state) else self._with_modes(state)

    @contextmanager
    def _with_modes(self, state: CallState) -> Iterator[None]:
        before, self.modes = self.modes, state.modes
        self._set_modes(state.modes)
        self.settings.begin()
        try:
            yield
        finally:
            self.modes = before
            self._set_modes(before)
            self.settings.begin()

    @contextmanager
    def reverting(self) -> Iterator[None]:
        """Undo changes of attributes, their containers (hooks too) and tensors, and of modes when the context closes.

        Modes change since a Trainer's training_step, which is run to be measured, calls `model.train()`.
        """
        modes, before = self._modes(), self._snapshot()
        values = [value for held in self._held for key, value in held.items() if key not in _STRUCTURE]
        contents = [(value, value.copy()) for value in values if type(value) in CONTAINERS]
        for _, content in contents:
            values += content.values() if isinstance(content, dict) else content
        small = [one for one in values if type(one) is Tensor and one.numel() * one.element_size() <= _COPIED_BYTES]
        tensors = [(one, one._version, one.detach().clone()) for one in small if not one.is_inference()]
        try:
            yield
        finally:
            changed = _changed(before, self._snapshot())
            self._note_written(changed, modes.settings)
            for number, key in changed:
                held = self._holder(number)
                if (number, key) not in before:
                    held.pop(key, None)
                elif not isinstance(value := before[number, key][0], nn.Module) and key not in held.get("_buffers", ()):
                    held[key] = value
            for container, content in contents:
                refill(container, content)
            for tensor, version, copy in tensors:
                if tensor._version != version:
                    tensor.detach().copy_(copy)
            self._set_modes(modes)

    def written(self) -> str:
        """Return the attributes that forward has been seen to set, in words."""
        return ", ".join(map(self._name, sorted(self._written))) or "none that was seen"

    @property
    def leaves_side_tensors(self) -> frozenset[Key]:
        """Keys of attributes with graphs, and of forward hooks: a loss may use them beside forward's results.

        The key of a hook is the number of its module, and the number of the hook.
        """
        found = set(self._with_graphs)
        for number, held in enumerate(self._held):
            if not held["_forward_hooks"]:  # as in most modules
                continue
            for handle, hook in held["_forward_hooks"].items():
                # Libraries' own make inputs require gradients, or put hidden states into the results.
                library = (getattr(hook, "__module__", None) or "").partition(".")[0]
                if library not in LIBRARIES:
                    found.add((number, f"{_HOOK}{handle}"))
        return frozenset(found)

    def name_all(self, keys: Iterable[Key]) -> str:
        """Return the names of attributes or hooks."""
        names = sorted(map(self._name, keys))
        return ", ".join([*names[:4], "..."] if len(names) > 4 else names)

    def _modes(self) -> CallModes:
        training = tuple([module.training for module in self._modules])
        return CallModes(training, self._trained(), read_switches(), self._settings)

    def _trained(self) -> tuple[bool, ...]:
        with bypass_hooks():
            return tuple(map(attrgetter("requires_grad"), self._parameters))

    def _set_modes(self, modes: CallModes) -> None:
        for module, training in zip(self._modules, modes.training, strict=False):  # those that are new have no mode yet
            if module.training is not training:
                module.training = training
        with bypass_hooks():
            for parameter, trained in zip(self._parameters, modes.trained, strict=True):
                if parameter.requires_grad is not trained:
                    parameter.requires_grad_(trained)
        set_switches(modes.switches)

    def _find_modules(self) -> None:
        """Give numbers to modules that are new."""
        known = set(map(id, self._modules))
        inner = {id(one) for layer in self._layers for one in layer.module.modules() if one is not layer.module}
        for name, module in self._model.named_modules():
            if id(module) not in known:
                if id(module) in inner:
                    self._inner.add(len(self._modules))
                self._names.append(name)
                self._modules.append(module)
                self._held.append(module.__dict__)
                self._ignored.append(ignored_attributes(module))

    def _follow_structure(self) -> None:
        """Note the modules and buffers that there are now, if they are others than before, and tell who must know."""
        if self._structure == list(map(_structure_of, self._modules)):
            return
        self._find_modules()
        self._structure = list(map(_structure_of, self._modules))
        self.settings.compare(self._modules)
        for observer in self._observers:
            observer()

    def _record(self) -> None:
        self._follow_structure()
        self._compared = [
            (held, [name for name in held if name not in ignored and name != "training"])  # modes are read apart
            for held, ignored in zip(self._held, self._ignored, strict=True)
        ]
        tables = [held[kind] for kind in ("_buffers", "_modules") for held in self._held]
        tables += [self._held[number][kind] for kind in HOOKS for number in self._inner]
        self._find_configurations()
        configured = [(one.entries, list(one.plain_entries())) for one in self._configurations]
        forwards = [(held, ["forward"]) for held in self._held if "forward" in held]
        recorded = self._compared + configured + forwards + [(table, list(table)) for table in tables]
        self._recorded = DictRecord(recorded, is_small_container)
        self._attributes = self._snapshot()
        digest = self._digest_of_settings()
        self._settings = self._stands_for.get(digest, digest)
        self._tensors = [value for value in self._recorded.values if isinstance(value, Tensor)]
        self._versions = list(map(_version, self._tensors))

    def _find_configurations(self) -> None:
        """Note the configurations that modules hold now, under negative numbers."""
        known = {id(one.value) for one in self._configurations}
        for number, held in enumerate(self._held):
            for name, value in held.items():
                if id(value) not in known and is_configuration(value):
                    known.add(id(value))
                    at = -1 - len(self._configurations)
                    self._configurations.append(Configuration(at, self._name((number, name)), value))

    def _holder(self, number: int) -> dict[str, Any]:
        """Return what holds the attributes of one number: a module's, or a configuration's."""
        return self._held[number] if number >= 0 else self._configurations[-1 - number].entries

    def _digest_of_settings(self) -> bytes:
        """Return the digest of settings, but for those that forward sets."""
        attributes = [
            ((number, name), held[name])
            for number, (held, names) in enumerate(self._compared)
            for name in names
            if (number, name) not in self._written and name in held  # forward may have deleted it
        ]
        for one in self._configurations:
            entries = [((one.number, name), value) for name, value in one.plain_entries().items()]
            attributes += [(key, value) for key, value in entries if key not in self._written]
        return self._digest.of(attributes, self._modules, self._inner)

    def _is_unchanged(self) -> bool:
        """Compare with the last record. Every call does: it is quick, and may report changes that are none."""
        return self._recorded.is_unchanged() and self._versions == list(map(_version, self._tensors))

    def _snapshot(self) -> Attributes:
        attributes = {
            (number, key): (value, _state_of(value))
            for number, held in enumerate(self._held)
            for key, value in (*held.items(), *held["_buffers"].items(), *held["_modules"].items())
            if key not in NOT_PLAIN
        }
        for one in self._configurations:
            attributes |= {(one.number, name): (value, None) for name, value in one.plain_entries().items()}
        return attributes

    def _note_written(self, keys: set[Key], settings: bytes) -> None:
        """Note that forward has written `keys`; `settings`: the digest before it did."""
        # Of configurations nothing is said: transformers' forward passes fill in what theirs leave open.
        of_modules = {key for key in keys - self._written if key[0] >= 0}
        told = {key for key in of_modules if key[1] not in (SET_ONCE, *self._held[key[0]]["_buffers"])}
        if told and not self._is_said:
            self._is_said = True
            _logger.warning(
                "the model's forward sets %s: since micro-batches run later than they are called, what it has set is "
                "there when engine.step() or a look at a loss has run them.",
                self.name_all(told),
            )
        if not keys <= self._written:
            self._written |= keys
            # Without what forward sets, settings are as they were: nothing is to be measured anew.
            self._stands_for[self._digest_of_settings()] = self._settings = settings
        for number, name in keys:
            value = self._holder(number).get(name)
            if any(isinstance(one, Tensor) and one.requires_grad for one in tree_iter(value)):
                self._with_graphs.add((number, name))

    def _name(self, key: Key) -> str:
        number, name = key
        holder = self._names[number] if number >= 0 else self._configurations[-1 - number].name
        return ".".join(filter(None, (holder, name)))


def is_hook(key: Key) -> bool:
    """Return whether a key of `Contract.leaves_side_tensors` is that of a forward hook."""
    return key[1].startswith(_HOOK)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _structure_of(module: nn.Module) -> tuple[list[int], list[str]]:
    """Return which submodules it has, and the names of its buffers."""
    return list(map(id, module._modules.values())), list(module._buffers)


def _state_of(value: Any) -> Any:
    """Return what tells of a write into `value`; None: nothing does."""
    if isinstance(value, Tensor):
        return _version(value)
    return value.copy() if is_small_container(value) else None


def _changed(before: Attributes, now: Attributes) -> set[Key]:
    """Return the keys whose values are neither the same object nor equal plain values, or were written to.

    A container that has more or fewer entries is none of them: a list of results, say.
    """
    return {key for key in before.keys() | now.keys() if not _same(before.get(key, _ABSENT), now.get(key, _ABSENT))}


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[0] is not other[0]:
        return are_equal(one[0], other[0])
    before, now = one[1], other[1]
    if type(before) is not type(now) or isinstance(before, set):
        return True  # what is not plain has come or gone: something is collected there
    if isinstance(before, dict):
        return all(before[key] is now[key] or before[key] == now[key] for key in before.keys() & now.keys())
    if isinstance(before, list):
        return all(a is b or a == b for a, b in zip(before, now, strict=False))
    return bool(before == now)


_C: Any = torch._C  # whose functions are read at every layer call
_cuda = torch.backends.cuda
_read_fp32, _write_fp32 = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter


def _set_deterministic(mode: int) -> None:
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    # torch.get_float32_matmul_precision() fails where the precision was set otherwise (transformers' tf32=True).
    *((partial(_read_fp32, place, "matmul"), partial(_write_fp32, place, "matmul")) for place in ("cuda", "mkldnn")),
    (torch.get_deterministic_debug_mode, _set_deterministic),
    (_C._get_math_sdp_enabled, _cuda.enable_math_sdp),
    (_C._get_flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_C._get_mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_C._get_cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
]
"""Reader and writer of each switch."""

_read = [read for read, _ in _SWITCHES]


def read_switches() -> tuple[Any, ...]:
    return tuple([read() for read in _read])


def set_switches(values: tuple[Any, ...]) -> None:
    """Set the switches whose current values differ."""
    for (_, write), value, now in zip(_SWITCHES, values, read_switches(), strict=True):
        if value != now:
            write(value)
