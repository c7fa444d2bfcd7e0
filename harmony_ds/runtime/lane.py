"""One micro-batch's forward pass, suspended at layer calls that are not to run yet.

A lane is a greenlet: the model's own forward with a stack of its own, on the engine's thread. The engine resumes one lane
at a time, and runs on when that lane comes to a layer call that is not to run yet, or to its end. Layer calls whose turn
it is are answered where the model makes them. Context variables are kept apart by greenlets themselves; what torch keeps
for the thread (grad mode, autocast, modes, ...) is exchanged here (`thread_state`).
"""

from __future__ import annotations

import contextvars
import enum
from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from harmony_ds.calls.intercept import Autocast, Handler, Request, handled_by
from harmony_ds.device.base import Device
from harmony_ds.runtime.thread_state import Own, ThreadState


class Turn(enum.Enum):
    """What the engine may say of a layer call instead of its outputs."""

    LATER = enum.auto()


Answer = Callable[[Request], Any]
"""The outputs of a layer call, or `Turn.LATER`."""


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
        self._reply: Any = None  # to the call that it waits at; nobody else holds it while the lane runs on
        self._answer: Answer | None = None  # while it is the turn of its calls
        self._is_later = False  # what the answer to the call was that it waits at
        self._engines: ThreadState | None = None  # while it runs: what the engine goes on with
        self._outer: Handler | None = None  # likewise: who handles calls of the engine's own
        self._failed: BaseException | None = None  # what came up in an answer, and is the engine's
        self._aborted = False
        self._greenlet = greenlet(_run)
        self._greenlet.gr_context = context or contextvars.copy_context()

    @property
    def finished(self) -> bool:
        """Whether it has come to its end, or was ended."""
        return bool(self._greenlet.dead)

    def run_on(self, answer: Answer) -> None:
        """Runs on while `answer` answers its layer calls: to one that is to wait, or to its end.

        What a layer has raised, the model's code gets; what else comes up in an answer is raised here.

        Raises:
            BaseException: what `function` or `answer` raised.
        """
        self._answer, self._is_later = answer, False
        try:
            while self.request is not None and not self._is_later:
                try:
                    self._reply = answer(self.request)
                except BaseException as error:
                    if id(error) not in self.request.raised:
                        raise
                    self.request = None
                    self._go_on(self._greenlet.throw, error)  # the model's code may know what to do about it
                else:
                    if self._reply is Turn.LATER:
                        return
                    self._resume()
        finally:
            self._answer = None

    def resume(self, reply: Any = None) -> None:
        """Runs on, with `reply` as the outputs of the layer call it waits at, until the next one or the end.

        Raises:
            BaseException: what `function` raised.
        """
        self._reply = reply
        del reply
        self._resume()

    def _resume(self) -> None:
        self.request = None
        self._go_on(self._greenlet.switch, *(() if self._greenlet else (self,)))

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

    def _go_on(self, switch: Callable[..., Any], *values: Any) -> None:
        engines = self._engines = ThreadState(self._device)
        self._began = self._began or engines
        self._greenlet.parent = getcurrent()
        try:
            with handled_by(self) as self._outer:
                if self._own is not None:
                    self._own.again()
                switch(*values)
        finally:
            if self.finished:
                engines.follow(self._began)
            own = self._own = engines.restore()
        if self._failed is not None:
            try:  # without a name, by which the error would keep the tensors of its frames
                raise self._failed
            finally:
                self._failed = None
        if own is not None and self.request is not None:
            self.request.around = own.around_layer

    # ---- in the greenlet

    def call(self, request: Request) -> Any:
        """Returns what the engine makes of a layer call: at once if it is its turn, else behind a suspension."""
        if self._aborted:
            raise LaneAborted
        # Where the lane has set something of its own, the engine must not run in it.
        if self._answer is not None and self._engines is not None and self._engines.is_now:
            reply = self._answer_here(self._answer, request, self._engines)
            if reply is not Turn.LATER:
                return reply
            self._is_later = True
        self.request = request
        self._greenlet.parent.switch()
        reply, self._reply = self._reply, None
        return reply

    def _answer_here(self, answer: Answer, request: Request, engines: ThreadState) -> Any:
        try:
            with handled_by(self._outer):
                return answer(request)
        except BaseException as error:
            if id(error) in request.raised:
                raise
            self._failed = error
        finally:
            engines.follow()  # a switch that a layer leaves set is set for whatever comes next
        return self._greenlet.parent.switch()


def _run(lane: Lane) -> None:
    try:
        with torch.set_grad_enabled(lane._grad), Autocast.entered(lane._autocast):
            lane.result = lane._function()
    except BaseException:
        if not lane._aborted:
            raise
