"""Settings that the code of a micro-batch makes on modules for itself: attributes, small containers, `requires_grad`.

`previous = model.active_adapter; model.set_adapter("ref"); ...; model.set_adapter(previous)` around some layer calls, or
`layer.scaling[name] *= scale` for the time of a forward pass: in plain PyTorch no other micro-batch sees it. Here others
run meanwhile, and layers are recomputed later. So

    found        what differs at a layer call from what it was when the pass began, other than by layers' own doing: in the
                 passes that measure, and (raising UnseenError, for the step to run again) in each step
    exchanged    it comes with a lane that goes on, and goes with one that is suspended, which leaves modules as they were
    recorded     with each layer call, to be there again when the call is recomputed
    left         what a lane has set when it ends: set for good when the engine has run

Shared by all micro-batches are attributes that layers set in their calls, and numbers and tensors that a forward pass
leaves otherwise than it found them (counters, averages).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.dict_record import DictRecord
from harmony_ds.offload.host_store import bypass_hooks

Key = tuple[int, str]
"""The number of a module, and the name of an attribute."""
TrainedFlags = Mapping[int, bool]
"""By id of a parameter: its `requires_grad`, where that is not the engine's."""

ABSENT: Any = object()
SET_ONCE = "_output_capturing_hooks_installed"  # by transformers, when hidden states are first asked for
NOT_PLAIN = frozenset(nn.Module().__dict__) | {"forward", "_flat_weights", "_flat_weight_refs", "_current_fx_name"}
"""Attributes that are not compared: parameters, hooks, modes, and those that engines, wrappers and Lightning put there."""
SCALARS = (bool, int, float, complex, str, bytes)
FLAGS = (bool, Enum)
SWITCHES = (*FLAGS, str)
"""Plain values that decide how code computes, where numbers are data."""
NUMBERS = (int, float)
"""Plain values that are data, but for whether they are zero: a coefficient that is not brings something in."""
MOST_WORDS = 16
"""Words that an argument or an attribute may be in turn and still name a mode; where there are more, they are data."""
CONTAINERS = (list, dict, set, OrderedDict)
_AS_ENGINE: TrainedFlags = {}
_NOTHING_TO_SET = nullcontext()  # one for all: each layer call enters it
_NOT_READ_BY_FORWARD = frozenset(
    "_is_hf_initialized _tp_plan _ep_plan _pp_plan _fsdp_plan all_tied_weights_keys _keep_in_fp32_modules "
    "_keep_in_fp32_modules_strict _no_split_modules _skip_keys_device_placement _keys_to_ignore_on_load_unexpected "
    "_keys_to_ignore_on_load_missing _keys_to_ignore_on_save".split()
)
"""Attributes that transformers puts on modules, for loading and saving: a third of all, and compared at each call."""
_IGNORED = (NOT_PLAIN | _NOT_READ_BY_FORWARD | {SET_ONCE}) - {"training"}
_IGNORED_IN_LINEAR = _IGNORED | {"in_features", "out_features"}
"""In torch's own linear layers, the most numerous modules: the shape of the weight, which forward does not read."""
_SMALL = 64  # elements of a container whose contents are compared
_ROUNDING = 1e-9  # what is multiplied and divided again differs by


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an attribute, and what it holds if it is a small container of plain values."""

    value: Any
    contents: Any = None

    @staticmethod
    def capture(value: Any) -> Setting:
        return Setting(value, value.copy() if is_small_container(value) else None)

    def is_same(self, other: Setting) -> bool:
        """Return whether nothing tells them apart."""
        if self.value is not other.value and not are_equal(self.value, other.value):
            return False
        return self.contents is other.contents or bool(self.contents == other.contents)

    def is_restored_by(self, later: Setting) -> bool:
        """Return whether `later` is this one again, up to the rounding of numbers and in equal containers."""
        if (self.contents is None) is not (later.contents is None):
            return False  # what is not plain, such as a tensor, has been put into the container, or taken out
        if self.contents is None:
            return self.value is later.value or _are_close(self.value, later.value)
        return type(self.value) is type(later.value) and _are_close_containers(self.contents, later.contents)


@dataclass(frozen=True, slots=True, eq=False)
class LaneSettings:
    """Settings that the code of one lane has made on modules, and other lanes do not see.

    Attributes:
        settings: of all keys that are exchanged.
        trained: `requires_grad` of parameters for which it has set that otherwise than the engine.
    """

    settings: Mapping[Key, Setting]
    trained: TrainedFlags
    _modules: ModuleSettings

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Set its attributes, not `requires_grad`, while open."""
        before = self._modules.read()
        self._modules.write(self.settings)
        try:
            yield
        finally:
            self._modules.write(before)

    @property
    def is_engines(self) -> bool:
        """Whether the engine's settings are known to be the same now."""
        return self is self._modules.engines

    @property
    def signature(self) -> object:
        """A key that lanes with the same settings share."""
        values = [id(one.value) if one.contents is None else repr(one.contents) for one in self.settings.values()]
        return tuple(values), tuple(self.trained.items())


def in_force(own: LaneSettings | None) -> AbstractContextManager[None]:
    """Return a context in which the attributes of `own` are set; None: there are none to set."""
    return _NOTHING_TO_SET if own is None or own.is_engines else own.in_force()


@dataclass(slots=True, eq=False)
class OutsideSettings:
    """Settings that modules have outside of lanes, to be set again when a lane is suspended; `trained`: of parameters."""

    settings: Mapping[Key, Setting]
    trained: dict[int, bool]


class ModuleSettings:
    """Settings of one model's modules, each of which is in one of these conditions:

        compared    as all are at first: a change is looked for at each layer call
        noted       a pass that measures has set it (`_noted`); `end_pass` decides: exchanged or shared
        unseen      a step has set it, and no pass that measures had (`_unseen`): it is undone, the model is measured again,
                    and the setting is doubtful (`_doubtful`); found again, it is exchanged
        left        a mode that a lane has set after its last layer call (`_left_modes`): as unseen ones
        exchanged   each lane has its own (`_exchanged`); not compared any more (`_skipped`)
        shared      all lanes have one, such as what layers set in their own calls; not compared any more (`_skipped`)

    Attributes:
        engines: the settings outside of lanes, for lanes that have made none of their own; None: they are not known.
        left: what the last lane that has ended has left.
        no_lane_sets_any: whether no lane has been seen to make settings of its own, as with most models: then nothing is
            exchanged, and modules are compared at layer calls alone. The first setting that is found there ends that.
    """

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[Layer]) -> None:
        self._modules_of_layers = [layer.module for layer in layers]
        self._skipped: set[Key] = set()
        """Keys that are not compared any more: they are exchanged or shared."""
        self._exchanged: list[Key] = []
        self.compare(modules)
        self._noted: dict[Key, Setting] = {}  # set in this pass, and what was there before
        self._unseen: dict[Key, Setting] = {}  # the same of a lane, until it is undone
        # Set by lanes after their last layer calls, and what was there before:
        self._left_modes: dict[Key, Setting] = {}
        self._doubtful: set[Key] = set()  # seen in a step, and not by measuring
        self._parameters: dict[int, nn.Parameter] = {}  # of which lanes have set requires_grad, by id
        self._trained_set: dict[int, tuple[nn.Parameter, bool]] = {}  # since a lane went on, and what it was before
        self.engines: LaneSettings | None = None
        self.left: LaneSettings | None = None
        self.no_lane_sets_any = True

    # ---- finding out

    def compare(self, modules: Sequence[nn.Module]) -> None:
        """Compare `modules` from now on, each by its place as its number; those that are known stand where they stood."""
        self._held = [module.__dict__ for module in modules]
        numbers = {id(module): number for number, module in enumerate(modules)}
        inside: set[int] = set()
        self._layers: list[_ComparedModules] = []
        for layer in self._modules_of_layers:
            own = [numbers[id(module)] for module in layer.modules()]
            inside.update(own)
            self._layers.append(_ComparedModules({number: modules[number] for number in own}, self._skipped))
        outside = {number: module for number, module in enumerate(modules) if number not in inside}
        self._outside = _ComparedModules(outside, self._skipped)

    def begin(self) -> None:
        """Compare with what is there now from now on."""
        self.engines = None
        for group in (self._outside, *self._layers):
            group.record_changes()

    def note_arrival(self, layer: int) -> None:
        """Note, in a pass that runs by itself, what its code has set since the last call, before `layer` is run."""
        for key, before in self._changes(layer).items():
            self._noted.setdefault(key, before)

    def find_unseen(self, layer: int) -> set[Key]:
        """Return the keys that the code of a lane has set before a call of `layer`, and that are not exchanged.

        The model is to be measured again. A key that is found again after that is exchanged from then on.
        """
        is_unchanged = self._layers[layer].recorded.is_unchanged() and self._outside.recorded.is_unchanged()
        if is_unchanged:  # as at nearly every call
            return set()
        return self._note_unseen(self._changes(layer))

    def find_left(self) -> set[Key]:
        """Return the keys of modes that lanes have set after their last layer calls, and that are not exchanged.

        Layers that run again would run in them: as with `find_unseen`, the model is to be measured again.
        """
        left, self._left_modes = self._left_modes, {}
        if self.no_lane_sets_any:
            left |= self._changed_modes(self._layers)
        return self._note_unseen(left)

    def _note_unseen(self, found: Mapping[Key, Setting]) -> set[Key]:
        """Exchange those of `found` that are found again; return them all."""
        if found:
            self.no_lane_sets_any = False
        for key, before in found.items():
            self._unseen.setdefault(key, before)
        self._exchange([key for key in found if key in self._doubtful])
        self._doubtful.update(found)
        return set(found)

    def note_return(self, layer: int) -> None:
        """Let what a call of `layer` has set on its own modules be shared."""
        group = self._layers[layer]
        if not group.recorded.is_unchanged():
            self._skip(group.changes())

    def end_pass(self) -> None:
        """Decide, after a pass by itself, which of the settings that it has made are to be exchanged."""
        self._note_after_last_call()
        noted, self._noted = self._noted, {}
        shared: set[Key] = set()
        for (number, name), before in noted.items():
            now = Setting.capture(self._held[number].get(name, ABSENT))
            has_grown = before.value is now.value  # a container
            if not before.is_restored_by(now) and (has_grown or isinstance(now.value, Tensor) or _is_number(now.value)):
                shared.add((number, name))
        self._exchange([key for key in noted if key not in shared])
        self._skip(shared)

    def _note_after_last_call(self) -> None:
        """Note what the pass has set since its last layer call: modes that the next forward pass sets otherwise.

        Other values (a result, a cache) are left for the program, and stay shared: to exchange them would keep them alive.
        """
        for key, before in self._changed_modes((self._outside, *self._layers)).items():
            self._noted.setdefault(key, before)

    def _changed_modes(self, groups: Iterable[_ComparedModules]) -> dict[Key, Setting]:
        """Return the modes of modules that have changed since they were compared last, with what was there before."""
        found: dict[Key, Setting] = {}
        for group in groups:
            if not group.recorded.is_unchanged():
                found |= group.changes()
        held = self._held
        return {
            (number, name): before
            for (number, name), before in found.items()
            if _is_mode(before.value) and _is_mode(held[number].get(name, ABSENT))
        }

    def undo(self) -> None:
        """Set again what lanes of a step that has failed have set, as far as it is not exchanged."""
        found, self._unseen = self._unseen, {}
        self._left_modes = {}
        for group in (self._outside, *self._layers):
            if not group.recorded.is_unchanged():
                for key, before in group.changes().items():
                    found.setdefault(key, before)
        self.left = None
        self.write(found)
        self.begin()

    def _changes(self, layer: int) -> dict[Key, Setting]:
        """Return what has changed since it was compared last, with what was there before."""
        found: dict[Key, Setting] = {}
        for group in (self._outside, self._layers[layer]):
            if not group.recorded.is_unchanged():
                found |= group.changes()
        return found

    def _exchange(self, keys: Iterable[Key]) -> None:
        new = [key for key in keys if key not in self._skipped]
        self._exchanged += new
        if new:
            self.no_lane_sets_any = False
        self._skip(new)

    def _skip(self, keys: Iterable[Key]) -> None:
        before = len(self._skipped)
        self._skipped.update(keys)
        if len(self._skipped) > before:
            for group in (self._outside, *self._layers):
                group.record()

    # ---- exchanging

    def note_trained(self, parameter: nn.Parameter, before: bool) -> None:
        """Note that the code of a lane sets `requires_grad`, which was so `before`, of a parameter."""
        self._trained_set.setdefault(id(parameter), (parameter, before))
        self.no_lane_sets_any = False

    @property
    def exchanged_count(self) -> int:
        """How many settings are exchanged."""
        return len(self._exchanged)

    def completed(self, own: LaneSettings | None) -> LaneSettings:
        """Return `own` with the engine's values of what was not yet exchanged when it was read."""
        return LaneSettings({**self.read(), **({} if own is None else own.settings)}, trained_by(own), self)

    def read(self) -> dict[Key, Setting]:
        """Return the settings that are exchanged, as they are now."""
        held = self._held
        return {key: Setting.capture(held[key[0]].get(key[1], ABSENT)) for key in self._exchanged}

    def write(self, settings: Mapping[Key, Setting]) -> None:
        """Set attributes and contents of containers so."""
        for (number, name), setting in settings.items():
            held = self._held[number]
            if setting.value is ABSENT:
                held.pop(name, None)
            else:
                held[name] = setting.value
            if setting.contents is not None and setting.value != setting.contents:
                refill(setting.value, setting.contents)

    def enter_lane(self, own: LaneSettings | None) -> OutsideSettings:
        """Set the settings of a lane that goes on; return those of the engine, for `leave_lane`."""
        engines = OutsideSettings({}, {})
        if self.no_lane_sets_any:
            return engines
        self._trained_set.clear()
        self._outside.record_changes()  # what code other than lanes' has set
        engines.settings = self.read()
        if self._parameters:
            with bypass_hooks():
                engines.trained = {key: one.requires_grad for key, one in self._parameters.items()}
        if own is not None:
            self.write(own.settings)
            self._train(own.trained)
        return engines

    def read_lane(self, engines: OutsideSettings, before: LaneSettings | None) -> LaneSettings | None:
        """Return the settings of the lane that runs, as they are now: `before` again, if nothing has changed."""
        if self._trained_set:
            for key, (parameter, flag) in self._trained_set.items():
                self._parameters[key] = parameter
                engines.trained.setdefault(key, flag)
            self._trained_set.clear()
        if not (engines.settings or engines.trained):
            return None
        changed: dict[int, bool] = {}
        with bypass_hooks():
            for key, flag in engines.trained.items():
                now = self._parameters[key].requires_grad
                if now is not flag:
                    changed[key] = now
        settings = self.read()
        if not changed and _are_same(settings, engines.settings):
            # Named, since the engine's may be others when layers run again: those that a lane has left.
            if self.engines is None:
                self.engines = LaneSettings(settings, _AS_ENGINE, self)
            return self.engines
        if before is None or before.trained != changed:
            return LaneSettings(settings, changed, self)
        if _are_same(settings, before.settings):
            return before
        return LaneSettings(settings, before.trained, self)  # the same object: device copies are set so already

    def leave_lane(self, engines: OutsideSettings) -> None:
        """Set the settings of the engine again, when a lane is suspended."""
        self.write(engines.settings)
        self._train(engines.trained)

    def end_lane(self, own: LaneSettings | None, waited_at: int | None) -> None:
        """Note that a lane has ended, with `own`: what it has set since its last call is no other lane's doing.

        Args:
            waited_at: the layer that it waited at before it came to its end, and that other lanes may wait at; None: it
                did not wait.
        """
        if self.no_lane_sets_any:
            self._outside.record_changes()
            if waited_at is not None:
                self._left_modes.update(self._changed_modes((self._layers[waited_at],)))
        else:
            self._left_modes.update(self._changed_modes(self._layers))
            self.begin()
        self.left = own

    def apply_left(self) -> None:
        """Set, for good, the settings that the last lane had when it ended."""
        left, self.left = self.left, None
        self.engines = None
        if left is not None:
            self.write(left.settings)
            self._train(left.trained)

    def _train(self, trained: TrainedFlags) -> None:
        if trained:
            with bypass_hooks():
                for key, flag in trained.items():
                    self._parameters[key].requires_grad_(flag)


def trained_by(own: LaneSettings | None) -> TrainedFlags:
    """Return `requires_grad` as a lane has set it otherwise than the engine."""
    return _AS_ENGINE if own is None else own.trained


def both_trained(at_call: LaneSettings | None, at_end: LaneSettings | None) -> TrainedFlags:
    """Return `requires_grad` for the backward pass of a call: a gradient reaches what is trained then and at the call."""
    one, other = trained_by(at_call), trained_by(at_end)
    if one is other:
        return one
    # Where only one of them differs from the engine's, one of them is False.
    return {key: one[key] if key in one and key in other else False for key in one.keys() | other.keys()}


def ignored_attributes(module: nn.Module) -> frozenset[str]:
    """Return the names of the attributes of `module` that are not compared."""
    return _IGNORED_IN_LINEAR if type(module) is nn.Linear else _IGNORED


class _ComparedModules:
    """Modules whose attributes are compared together; those of `skipped` are not.

    Attributes:
        recorded: the attributes and what small containers among them held, when `record` was called last.
    """

    def __init__(self, modules: Mapping[int, nn.Module], skipped: set[Key]) -> None:
        self._all = {number: module.__dict__ for number, module in modules.items()}
        self._ignored = {number: ignored_attributes(module) for number, module in modules.items()}
        self._skipped = skipped
        self.record()

    def record(self) -> None:
        """Compare with what is there now from now on."""
        self._keys: list[Key] = []
        compared: list[tuple[dict[str, Any], list[str]]] = []
        for number, held in self._all.items():
            ignored = self._ignored[number]
            names = [name for name in held if name not in ignored and (number, name) not in self._skipped]
            self._keys += [(number, name) for name in names]
            compared.append((held, names))
        self.recorded = DictRecord(compared, is_small_container)

    def record_changes(self) -> None:
        """Record the modules' attributes again if they have changed."""
        if not self.recorded.is_unchanged():
            self.record()

    def changes(self) -> dict[Key, Setting]:
        """Return what differs from the record, and what it was; record what is there."""
        before = self._settings()
        self.record()
        now = self._settings()
        nothing = Setting(ABSENT)
        found: dict[Key, Setting] = {}
        for key in before.keys() | now.keys():
            if key not in self._skipped and not before.get(key, nothing).is_same(now.get(key, nothing)):
                found[key] = before.get(key, nothing)
        return found

    def _settings(self) -> dict[Key, Setting]:
        before = self.recorded
        contents = {id(one): copy for one, copy in zip(before.containers, before.contents, strict=True)}
        pairs = zip(self._keys, before.values, strict=True)
        return {key: Setting(value, contents.get(id(value))) for key, value in pairs}


def _are_same(one: Mapping[Key, Setting], other: Mapping[Key, Setting]) -> bool:
    return one.keys() == other.keys() and all(one[key].is_same(other[key]) for key in one)


def is_small_container(value: Any) -> bool:
    """Return whether `value` is a container whose contents are compared: of few plain values."""
    if type(value) not in CONTAINERS or len(value) > _SMALL:
        return False
    elements = value.values() if isinstance(value, dict) else value
    return all(one is None or isinstance(one, SCALARS) for one in elements)


def is_switch(value: Any) -> bool:
    """Return whether a plain value may decide how code computes: a flag, a word, or zero."""
    return isinstance(value, SWITCHES) or (isinstance(value, NUMBERS) and value == 0)


def _is_mode(value: Any) -> bool:
    """Return whether `value` may tell how a layer is to run; `ABSENT` may."""
    return value is None or value is ABSENT or isinstance(value, bool | str) or is_small_container(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether both are equal plain values, or small containers of such."""
    if type(one) is not type(other):
        return False
    return (isinstance(one, SCALARS) or (is_small_container(one) and is_small_container(other))) and bool(one == other)


def _are_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return one is None is other or are_equal(one, other)


def _are_close_containers(one: Any, other: Any) -> bool:
    """Return whether small containers of a type hold the same, up to the rounding of numbers."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_close(one[key], other[key]) for key in one)
    return one == other if isinstance(one, set) else all(map(_are_close, one, other))


def refill(container: Any, contents: Any) -> None:
    """Give a list, dictionary or set other contents."""
    container.clear()
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)
