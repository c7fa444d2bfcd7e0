"""One micro-batch's forward pass, suspended at layer calls.

A lane is a thread that runs the model's own forward; exactly one of all threads (the lanes and the engine's) runs at
any time. Python, torch and the user keep per-thread and per-context state (autocast, grad mode, context variables):
threads keep it apart by construction, which coroutines on one thread do not.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from harmony_ds.calls.intercept import Autocast, Request, handled_by
from harmony_ds.device.base import Device

_POLL_S = 0.01


class LaneAborted(BaseException):
    """Unwinds a suspended forward pass whose step has failed elsewhere."""


class Lane:
    """Runs `function` up to its next layer call, again and again."""

    def __init__(
        self,
        function: Callable[[], Any],
        grad: bool,
        autocast: Autocast | None,
        device: Device,
        context: contextvars.Context | None = None,
        of_threads: Iterable[threading.local] = (),
    ) -> None:
        """A lane that has not begun.

        Args:
            context: to run in; None: a copy of the calling thread's.
            of_threads: they hold for the lane what they hold for the calling thread.
        """
        self.device_type = device.torch_device.type
        self.request: Request | None = None
        self.result: Any = None
        self._inherited = device.inherited()
        self._grad = grad
        self._autocast = autocast
        self._of_threads = [(one, dict(vars(one))) for one in of_threads]
        self._failure: BaseException | None = None
        self._reply: Any = None
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._aborted = False
        self.finished = False
        self._thread = threading.Thread(
            target=(context or contextvars.copy_context()).run,
            args=(self._run, function),
            name="harmony-lane",
            daemon=True,
        )
        self._thread.start()

    def resume(self, reply: Any = None) -> None:
        """Runs on, with `reply` as the outputs of the layer call it waits at, until the next one or the end.

        Raises:
            BaseException: what `function` raised.
        """
        self.request = None
        self._reply = reply
        self._go.release()
        self._back.acquire()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def take_result(self) -> Any:
        """What `function` returned, which is kept no longer."""
        result, self.result = self.result, None
        return result

    def close(self) -> None:
        """Ends the thread wherever it is: at its next layer call, if the engine's thread was interrupted in `resume`."""
        self._aborted = True
        self.request = self._reply = None
        while self._thread.is_alive():
            if self._go.locked():  # an interrupt leaves no trace of whose turn it was
                self._go.release()
            self._thread.join(_POLL_S)

    # ---- on the lane's thread

    def call(self, request: Request) -> Any:
        """Suspends at a layer call and returns what the engine made of it."""
        if not self._aborted:
            self.request = request
            self._back.release()
            self._go.acquire()
        if self._aborted:
            raise LaneAborted
        reply, self._reply = self._reply, None
        return reply

    def _run(self, function: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            if not self._aborted:
                for one, held in self._of_threads:
                    vars(one).update(held)
                with (
                    self._inherited,
                    torch.set_grad_enabled(self._grad),
                    Autocast.entered(self._autocast),
                    handled_by(self),
                ):
                    self.result = function()
        except LaneAborted:
            pass
        except BaseException as failure:  # noqa: BLE001 - surfaces in `resume`
            self._failure = failure
        finally:
            self.finished = True
            if not self._aborted:
                self._back.release()
