"""Learning-rate schedules: DeepSpeed's, torch's, or the user's."""

from __future__ import annotations

from typing import Any

import torch

from harmony_ds.config import Section
from harmony_ds.config.hints import check_params, nearest
from harmony_ds.errors import ConfigError


def build_scheduler(section: Section | None, client: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the user's scheduler (an object, or made by a callable from the optimizer), else the ds_config's, or None.

    Raises:
        ConfigError: the ds_config's scheduler is unknown, or does not take its params.
    """
    if client is not None:
        return client(optimizer) if callable(client) and not hasattr(client, "step") else client
    if section is None:
        return None
    if optimizer is None:
        raise ConfigError('the ds_config has a "scheduler" but no optimizer: name one or pass one.')
    from deepspeed.runtime import lr_schedules

    theirs = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    known = {name: one for name, one in vars(torch.optim.lr_scheduler).items() if isinstance(one, type)} | theirs
    cls = known.get(section.type)
    if cls is None:
        near = nearest(section.type, known) or ", ".join(theirs)
        raise ConfigError(f"DeepSpeed does not recognize LR scheduler {section.type}. Did you mean {near}?")
    check_params("scheduler.params", cls, section.params)
    try:
        return cls(optimizer, **section.params)
    except TypeError as error:
        raise ConfigError(f'scheduler "{section.type}" does not take these params: {error}') from None
