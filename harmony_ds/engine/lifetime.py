"""The end of an engine: by `destroy`, or with its last reference."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from harmony_ds.engine.assembly import Assembly
from harmony_ds.model.engine_parameter import ParameterLinks, gate
from harmony_ds.optim.optimizer_override import OptimizerOverride


def release(links: ParameterLinks, override: OptimizerOverride | None, assembly: Assembly) -> None:
    """Finalize an engine, without a reference to it: give model and optimizer back, and end its threads."""

    def end() -> None:
        with gate(passed=True):
            try:
                assembly.destroy()
            finally:
                links.remove()

    if override is not None:
        override.remove()
    if assembly.runtime.updater.is_inside:  # garbage was collected there
        ending = threading.Thread(target=end, name="harmony-destroy")
        ending.start()
        links.hand_over(_Ending(ending, assembly.store.parameters))
    else:
        end()


class _Ending:
    """Owner of the parameters of an engine that ends on another thread: their uses wait for that."""

    def __init__(self, thread: threading.Thread, parameters: Mapping[str, nn.Parameter]) -> None:
        self._thread = thread
        self._parameters = parameters  # plain ones when it has ended

    def finish(self) -> None:
        self._thread.join()

    def before_write(self, name: str) -> None:
        self._thread.join()

    def gradient(self, name: str) -> Tensor | None:
        self._thread.join()
        return self._parameters[name].grad

    def put_gradient(self, name: str, value: Tensor | None) -> None:
        self._thread.join()
        self._parameters[name].grad = value


def while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `method` while its object lives, and does not keep it alive: a loss may outlive it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = reference()
        return None if living is None else living(*args)

    return call
