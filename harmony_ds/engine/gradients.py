"""What parameters ask of their engine: true values, gradients before the step, that nothing queued is overtaken."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from harmony_ds.parameters import Owner

if TYPE_CHECKING:
    from harmony_ds.engine.core import HarmonyEngine


class EngineOwner(Owner):
    """Asks one engine, as long as that is there: a model's parameters must not keep its engine alive."""

    def __init__(self, engine: HarmonyEngine) -> None:
        self._engine = weakref.ref(engine)

    def finish(self) -> None:
        """Makes every weight, master and state on the host true."""
        engine = self._engine()
        if engine is not None:
            engine.finish_updates()

    def look(self, name: str) -> None:
        """Makes the weight `name` on the host true."""
        engine = self._engine()
        if engine is not None:
            engine._assembly.looks.at_weights((name,))

    def run_queued(self, why: str) -> None:
        """Runs what is queued and propagated from, since `why` is about to happen.

        Raises:
            UsageError: a micro-batch is queued that has not been propagated back from.
        """
        engine = self._engine()
        if engine is not None:
            engine._run_queued(why)

    @property
    def is_shared(self) -> bool:
        """Whether several processes have one copy of weights, masters and state."""
        engine = self._engine()
        return engine is not None and engine._world.size > 1

    def refuse_shared(self, what: str) -> None:
        """Raises UnsupportedError for `what` if so."""
        engine = self._engine()
        if engine is not None:
            engine._world.refuse(what)

    def has_queued(self) -> bool:
        """Whether micro-batches are queued that have not run to their end."""
        engine = self._engine()
        return engine is not None and not engine._running and engine._group.is_open

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name`, itself, not scaled: what has gathered since the last step, or was used by it."""
        engine = self._engine()
        if engine is None:
            return None
        if engine._propagate():
            return engine._gradients.show(name)
        return engine._gradients.used.show(name, engine._assembly.store.parameters[name])

    def is_updating(self, name: str) -> bool:
        """Whether an update of `name` is pending, whose gradient is on it."""
        engine = self._engine()
        return engine is not None and engine._assembly.parts.own.is_updating(name)

    def drop(self, name: str) -> None:
        """The gradient of `name` is not wanted."""
        engine = self._engine()
        if engine is None:
            return
        engine._gradients.used.drop(name)
        if engine._propagate():
            engine._runner.executor.gathered.drop((name,))
