"""Build the learning-rate scheduler, DeepSpeed's, torch's or the user's, and step it so that the step can be undone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harmony_ds.config import Section
from harmony_ds.config.hints import check_params, nearest
from harmony_ds.errors import ConfigError, UsageError


def build_scheduler(section: Section | None, client: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the user's scheduler (an object, or a callable that makes one), else the ds_config's; None: there is none.

    Raises:
        ConfigError: the ds_config's scheduler is unknown, or does not take its params.
    """
    if isinstance(client, (list, tuple)):
        return ScheduleChain(client)
    if client is not None:
        return client(optimizer) if isinstance(client, type) or not hasattr(client, "step") else client
    if section is None:
        return None
    if optimizer is None:
        raise ConfigError('the ds_config has a "scheduler" but no optimizer: name one or pass one.')
    from deepspeed.runtime import lr_schedules

    theirs = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    torchs = torch.optim.lr_scheduler
    known = {name: getattr(torchs, name) for name in torchs.__all__ if name != "LRScheduler"} | theirs
    cls = known.get(section.type)
    if cls is None:
        near = nearest(section.type, known) or ", ".join(theirs)
        raise ConfigError(f"DeepSpeed does not recognize LR scheduler {section.type}. Did you mean {near}?")
    check_params("scheduler.params", cls, section.params)
    try:
        return cls(optimizer, **section.params)
    except TypeError as error:
        raise ConfigError(f'scheduler "{section.type}" does not take these params: {error}') from None


class ScheduleChain:
    """Scheduler that steps several others, those of several optimizers."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step all parts."""
        for part in self.parts:
            part.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of all parameter groups."""
        return [rate for part in self.parts for rate in part.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parts, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def check_schedule(scheduler: Any, schedule: dict[str, Any] | None) -> None:
    """Raise UsageError if `scheduler.step` does not take the arguments `schedule` (None: it will not be called)."""
    try:
        if scheduler is not None and schedule is not None:
            inspect.signature(scheduler.step).bind(**schedule)
    except TypeError as error:
        raise UsageError(
            f"the engine cannot step {type(scheduler).__name__}: {error}. Nothing was updated. Give engine.step() what it "
            'takes (lr_kwargs={"metrics": value}), or make it from engine.optimizer after initialize and step it yourself.'
        ) from None


def can_step_back(scheduler: Any) -> bool:
    """Return whether a step of `scheduler` can be undone: it needs `state_dict` and `load_state_dict`."""
    return all(hasattr(part, "state_dict") and hasattr(part, "load_state_dict") for part in _parts_of(scheduler))


def _parts_of(scheduler: Any) -> tuple[Any, ...]:
    return scheduler.parts if isinstance(scheduler, ScheduleChain) else (scheduler,)


class ScheduleStep:
    """A step of a scheduler that can be undone, as when the optimizer's step turns out to have been skipped."""

    def __init__(self, scheduler: Any, groups: Sequence[dict[str, Any]], schedule: dict[str, Any]) -> None:
        """Step `scheduler` with the arguments `schedule`; it sets values in the parameter `groups`."""
        self._scheduler, self._groups = scheduler, groups
        # The state of DeepSpeed's schedulers lacks the last learning rates, so that attributes are kept, too.
        self._attributes = [(part, dict(vars(part))) for part in _parts_of(scheduler)]
        self._state = copy.deepcopy(scheduler.state_dict())
        self._before = [_copy_values(group) for group in self._groups]
        scheduler.step(**schedule)
        self._after = [_copy_values(group) for group in self._groups]

    def undo(self) -> None:
        """Restore scheduler and parameter groups to before the step; values that the program has set since stay."""
        for part, attributes in self._attributes:
            vars(part).update(attributes)
        self._scheduler.load_state_dict(self._state)
        for group, before, after in zip(self._groups, self._before, self._after, strict=False):
            for key, value in before.items():
                if after.get(key) == value or group.get(key) != after.get(key):
                    continue
                if isinstance(group[key], Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _copy_values(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options, with copies of tensors, which schedulers write into."""
    held = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}
