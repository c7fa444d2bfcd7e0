"""Run a training script as it is, with harmony_ds in DeepSpeed's place and in every Trainer that the script makes."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmony_ds.integrations.as_deepspeed import install_as_deepspeed

if TYPE_CHECKING:
    from transformers import Trainer


def run_script(command: Sequence[str]) -> dict[str, Any]:
    """Run a script, or a module after `-m`, as `python` runs it, and return its global names and their values.

    `deepspeed.initialize` is `harmony_ds.initialize` (`install_as_deepspeed`). If transformers is installed, every Trainer
    is made as if `HarmonyMixin` stood first among its bases (`install_in_trainers`). `sys.argv` holds the script's own
    arguments.

    Args:
        command: the script's path and its arguments; or `-m`, a module's name and its arguments.
    """
    install_as_deepspeed()
    if find_spec("transformers") is not None and find_spec("accelerate") is not None:
        install_in_trainers()
        # One process has a process group, as with DeepSpeed, and transformers would advise to launch it for DDP.
        logging.getLogger("transformers.training_args").addFilter(_is_not_about_ddp)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        return runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    return runpy.run_path(command[0], run_name="__main__")


def _is_not_about_ddp(record: logging.LogRecord) -> bool:
    return "parallel_mode != ParallelMode.DISTRIBUTED" not in str(record.msg)


def install_in_trainers() -> None:
    """Make every `transformers.Trainer`, and every subclass of it, train by harmony_ds for the rest of this process.

    What `AnyTrainer(...)` returns is of a subclass of AnyTrainer whose first base is `HarmonyMixin`.
    """
    from transformers import Trainer

    def new(cls: type[Trainer], *_: Any, **__: Any) -> Any:
        return object.__new__(_with_mixin(cls))

    Trainer.__new__ = new


_classes_with_mixin: dict[type[Trainer], type[Trainer]] = {}


def _with_mixin(trainer: type[Trainer]) -> type[Trainer]:
    """Return a subclass of the same name whose first base is `HarmonyMixin`; the class itself, if it has the mixin."""
    from harmony_ds.integrations.transformers import HarmonyMixin

    if issubclass(trainer, HarmonyMixin):
        return trainer
    if trainer not in _classes_with_mixin:
        names = {"__module__": trainer.__module__, "__doc__": trainer.__doc__}
        _classes_with_mixin[trainer] = type(trainer.__name__, (HarmonyMixin, trainer), names)
    return _classes_with_mixin[trainer]
