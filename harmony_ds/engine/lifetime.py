"""How an engine ends: with its last reference, or with `destroy`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

from harmony_ds.assembly import Assembly
from harmony_ds.engine.by_hand import OptimizerByHand
from harmony_ds.parameters import Owner, ParameterLinks


def let_go(links: ParameterLinks, by_hand: OptimizerByHand | None, assembly: Assembly) -> None:
    """What ends an engine, without it."""
    links.remove()
    if by_hand is not None:
        by_hand.remove()
    updater = assembly.parts.updater
    if updater is not None and updater.entered:  # garbage was collected there
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


class _WhileAlive:
    def __init__(self, owner: Owner) -> None:
        asked = (name for name in vars(Owner) if not name.startswith("_"))
        vars(self).update({name: while_alive(getattr(owner, name)) for name in asked})


def asked_while_alive(owner: Owner) -> Owner:
    """Asks `owner` while that lives: a model's parameters must not keep their engine alive."""
    return cast(Owner, _WhileAlive(owner))
