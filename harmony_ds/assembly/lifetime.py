"""The end of an engine: by `destroy`, or with its last reference."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor, nn

from harmony_ds.model.engine_parameter import ParameterLinks, gate
from harmony_ds.optim.optimizer_override import OptimizerOverride
from harmony_ds.step.engine_state import EngineState


def release(links: ParameterLinks, override: OptimizerOverride | None, state: EngineState) -> None:
    """Finalize an engine, without a reference to it: give model and optimizer back, and end its threads."""

    def end() -> None:
        with gate(passed=True):
            try:
                state.destroy()
            finally:
                links.remove()

    if override is not None:
        override.remove()
    if state.runtime.updater.is_inside:  # garbage was collected there
        ending = threading.Thread(target=end, name="harmony-destroy")
        ending.start()
        links.hand_over(_Ending(ending, state.store.parameters))
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
