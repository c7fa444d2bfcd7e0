"""The end of an engine: by `destroy`, or with its last reference."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.optimizer_override import OptimizerOverride
from harmony_ds.parameters import ParameterLinks


def release(links: ParameterLinks, override: OptimizerOverride | None, assembly: Assembly) -> None:
    """Finalize an engine, without a reference to it: give model and optimizer back, and end its threads."""
    links.remove()
    if override is not None:
        override.remove()
    if assembly.parts.updater.is_inside:  # garbage was collected there
        threading.Thread(target=assembly.destroy, name="harmony-destroy").start()
    else:
        assembly.destroy()


def while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `method` while its object lives, and does not keep it alive: a loss may outlive it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = reference()
        return None if living is None else living(*args)

    return call
