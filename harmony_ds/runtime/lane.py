"""One micro-batch's forward pass, suspended at layer calls.

A lane is a greenlet: the model's own forward with a stack of its own, on the engine's thread. The engine resumes one lane
at a time, and runs on when that lane comes to a layer call or to its end. Context variables are kept apart by greenlets
themselves; what torch keeps for the thread (grad mode, autocast, modes, ...) is exchanged here (`thread_state`).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from harmony_ds.calls.intercept import Autocast, Request, handled_by
from harmony_ds.device.base import Device
from harmony_ds.runtime.thread_state import Own, ThreadState


class LaneAborted(BaseException):
    """Unwinds a suspended forward pass whose step has failed elsewhere."""


class Lane:
    """Runs `function` up to its next layer call, again and again, on the thread that made the lane."""

    def __init__(
        self,
        function: Callable[[], Any],
        grad: bool,
        autocast: Autocast | None,
        device: Device,
        context: contextvars.Context | None = None,
    ) -> None:
        """A lane that has not begun.

        Args:
            context: to run in; None: a copy of the caller's.
        """
        self.device_type = device.torch_device.type
        self._device = device
        self.request: Request | None = None
        self.result: Any = None
        self._function = function
        self._grad = grad
        self._autocast = autocast
        self._began: ThreadState | None = None
        self._own: Own | None = None  # what it has set, while it is suspended
        self._aborted = False
        self._greenlet = greenlet(_run)
        self._greenlet.gr_context = context or contextvars.copy_context()

    @property
    def finished(self) -> bool:
        """Whether it has come to its end, or was ended."""
        return bool(self._greenlet.dead)

    def resume(self, reply: Any = None) -> None:
        """Runs on, with `reply` as the outputs of the layer call it waits at, until the next one or the end.

        Raises:
            BaseException: what `function` raised.
        """
        self.request = None
        self._go_on(self._greenlet.switch, reply if self._greenlet else self)

    def hand_over(self, error: Exception) -> None:
        """As `resume`, where `error` came up in the layer call that it waits at: the model's code may know what to do about
        what the layer has raised. Whatever else came up is raised here.
        """
        request, self.request = self.request, None
        if request is None or id(error) not in request.raised:
            raise error
        self._go_on(self._greenlet.throw, error)

    def take_result(self) -> Any:
        """What `function` returned, which is kept no longer."""
        result, self.result = self.result, None
        return result

    def close(self) -> None:
        """Ends it wherever it is: what is open in the model's code is unwound."""
        self._aborted = True
        self.request = None
        if self._greenlet:
            self._go_on(self._greenlet.throw, LaneAborted)

    def _go_on(self, switch: Callable[[Any], Any], value: Any) -> None:
        engines = ThreadState(self._device)
        self._began = self._began or engines
        self._greenlet.parent = getcurrent()
        try:
            with handled_by(self):
                if self._own is not None:
                    self._own.again()
                switch(value)
        finally:
            if self.finished:
                engines.follow(self._began)
            own = self._own = engines.restore()
        if own is not None and self.request is not None:
            self.request.around = own.around_layer

    # ---- in the greenlet

    def call(self, request: Request) -> Any:
        """Suspends at a layer call and returns what the engine made of it."""
        if self._aborted:
            raise LaneAborted
        self.request = request
        return self._greenlet.parent.switch()


def _run(lane: Lane) -> None:
    try:
        with torch.set_grad_enabled(lane._grad), Autocast.entered(lane._autocast):
            lane.result = lane._function()
    except BaseException:
        if not lane._aborted:
            raise
