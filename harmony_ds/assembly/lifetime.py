"""The end of an engine, by `destroy` or with the last reference to it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor, nn

from harmony_ds.model.engine_parameter import ParameterLinks, gate
from harmony_ds.optim.optimizer_override import OptimizerOverride
from harmony_ds.step.engine_state import EngineState


def release(links: ParameterLinks, override: OptimizerOverride | None, state: EngineState) -> None:
    """Give model and optimizer back and end the threads of an engine. Its finalizer: holds no reference to the engine."""

    def end() -> None:
        with gate(passed=True):
            try:
                state.destroy()
            finally:
                links.remove()

    if override is not None:
        override.remove()
    if state.runtime.updater.is_inside:  # garbage was collected on the updater's own thread, which cannot end itself
        ending = threading.Thread(target=end, name="harmony-destroy")
        ending.start()
        links.hand_over(_EndingEngine(ending, state.store.parameters))
    else:
        end()


class _EndingEngine:
    """What parameters ask in the place of their engine while it ends on another thread: each use waits for the end."""

    def __init__(self, thread: threading.Thread, parameters: Mapping[str, nn.Parameter]) -> None:
        self._thread = thread
        self._parameters = parameters  # plain ones once the thread has ended

    def wait_for_updates(self) -> None:
        self._thread.join()

    def before_write(self, name: str) -> None:
        self._thread.join()

    def gradient(self, name: str) -> Tensor | None:
        self._thread.join()
        return self._parameters[name].grad

    def put_gradient(self, name: str, value: Tensor | None) -> None:
        self._thread.join()
        self._parameters[name].grad = value
