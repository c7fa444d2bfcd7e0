"""How an engine ends: with its last reference, or with `destroy`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.by_hand import OptimizerByHand
from harmony_ds.parameters import ParameterLinks


def let_go(links: ParameterLinks, by_hand: OptimizerByHand | None, assembly: Assembly) -> None:
    """What ends an engine, without it."""
    links.remove()
    if by_hand is not None:
        by_hand.remove()
    updater = assembly.parts.updater
    if updater is not None and updater.is_inside:  # garbage was collected there
        threading.Thread(target=assembly.destroy, name="harmony-destroy").start()
    else:
        assembly.destroy()


def while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `method` while its object lives, and does not keep it alive: a loss may outlive its engine."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = reference()
        return None if living is None else living(*args)

    return call
