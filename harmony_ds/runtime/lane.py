"""One micro-batch's forward pass, suspended at every layer call.

A lane is a greenlet: the model's own forward with a stack of its own, on the engine's thread. It runs up to a layer call,
or to its end, and the engine runs on: it answers the call and resumes the lane, or leaves it for later and resumes another
one. Context variables are kept apart by greenlets themselves; what torch keeps for the thread (grad mode, autocast, modes,
...) is exchanged here (`thread_state`). From the executor to the layer's own forward, and back:

    the engine's stack                                        the lane's stack
    Executor._enter -> MicroBatch.start -> Lane.resume
                                                              Lane._run -> MicroBatch.forward -> model(...) -> layer(...)
                                                              -> InterceptedForward.__call__ -> Lane.call, which waits
    Executor._forward -> Lane.run_on -> Executor._answer_cut
    -> LayerCalls.forward -> CalledLayer.run -> the layer's
    own forward; its outputs are the reply
                                                              Lane.call returns the reply; the model goes on, and waits
                                                              at its next layer call
    Lane.run_on answers that, too; or, if it belongs to a
    later pack, returns: the lane waits while the executor's
    next task runs, often that of another micro-batch

Nothing else interleaves micro-batches: which one runs on at a layer call is in the order of the plan's tasks.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from harmony_ds.model.contract import UnseenError
from harmony_ds.model.intercept import Autocast, ContextFactory, Request, handled_by
from harmony_ds.model.own_settings import LaneSettings, ModuleSettings, OutsideSettings
from harmony_ds.model.trees import tensors_in
from harmony_ds.runtime.failure import FailedCall
from harmony_ds.runtime.thread_state import SuspendedModes, ThreadState

PositionOf = Callable[[Request], int]
"""Return the position of a layer call in the order of the plan. Compared with the last position of the task that runs, it
tells whether this task runs the call or a later one."""
LayerCallRunner = Callable[[Request, int], Any]
"""Make the outputs of a layer call at a position."""


class LaneAborted(BaseException):
    """Raised in a suspended forward pass to unwind it, when its step has failed elsewhere."""


class AnyLane(Protocol):
    """A lane, or several that go from layer to layer together, as the executor knows it."""

    @property
    def finished(self) -> bool:
        """Whether it has come to its end, or was ended."""

    @property
    def result(self) -> Any:
        """What the model has returned; of several lanes, a list."""

    @property
    def lane_settings(self) -> LaneSettings | None:
        """Settings of modules that it has made for itself; None: none, or those of several lanes."""

    @property
    def failed_call(self) -> FailedCall | None:
        """The last layer call that has raised an error."""

    def waiting_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments of the layer calls to be made next."""

    def argument_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments of the calls that are waited at, as the model's code has them."""

    def run_on(self, position_of: PositionOf, answer: LayerCallRunner, last: int | None = None) -> None:
        """Run on to the first layer call after the position `last`, or to the end; `answer` answers the calls before it."""

    def close(self) -> None:
        """End it wherever it is, and unwind what is open in the model's code."""


class Lane:
    """The forward pass of one micro-batch, which stops at each layer call until the engine lets it run on.

    It runs `function` on the thread that made the lane.

    Attributes:
        request: the layer call that it waits at.
        result: what `function` has returned.
        lane_settings: settings of modules that it has made for itself; None: none.
        failed_call: the last layer call that has raised an error.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        grad: bool,
        autocast: Autocast | None,
        thread: ThreadState,
        context: contextvars.Context,
        settings: ModuleSettings,
        between_layers: ContextFactory | None = None,
    ) -> None:
        """Make a lane that will run in `context`; `between_layers` makes the context of the code between layer calls.

        `settings`: of modules, which it may make for itself.
        """
        self.device = thread.device
        self.request: Request | None = None
        self.result: Any = None
        self.failed_call: FailedCall | None = None
        self._function = function
        self._grad = grad
        self._autocast = autocast
        self._thread = thread
        self._between_layers = between_layers
        self._settings = settings
        self.lane_settings: LaneSettings | None = None
        self._on_top: SuspendedModes | None = None  # while it is suspended
        self._reply: Any = None  # to the call that it waits at; not held elsewhere while the lane runs
        self._aborted = False
        self._greenlet = greenlet(self._run)
        self._greenlet.gr_context = context

    @property
    def finished(self) -> bool:
        """Whether it has come to its end, or was ended."""
        return bool(self._greenlet.dead)

    def waiting_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments of the layer call that it waits at."""
        return [] if self.request is None else tensors_in((self.request.args, self.request.kwargs))

    def argument_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments of the layer calls that are waited at, as the model's code has them."""
        return self.waiting_tensors()

    def run_on(self, position_of: PositionOf, answer: LayerCallRunner, last: int | None = None) -> None:
        """Run on to the first layer call after the position `last`, or to the end; `answer` answers the calls before it.

        An error of the layer's own forward is thrown into the model's code, which may catch it. Any other error of an
        answer is raised here.
        """
        engine_thread = self._thread.read()
        outside = self._settings.enter_lane(self.lane_settings)
        waited_at = None if self.request is None else self.request.layer
        try:
            while self.request is not None:
                position = position_of(self.request)
                if last is not None and position > last:
                    return
                try:
                    self._reply = answer(self.request, position)
                except BaseException as error:
                    self.failed_call = FailedCall(self.request.layer, id(error))
                    if id(error) not in self.request.raised:
                        raise
                    self._note_return(self.request.layer, outside)
                    # The model's code may know what to do about it.
                    self._go_on(engine_thread, self._greenlet.throw, error)
                else:
                    self._note_return(self.request.layer, outside)
                    self._go_on(engine_thread, self._greenlet.switch)
                self._note_arrival(outside)
        finally:
            self._take_settings(outside)
        if self.request is None:
            self._settings.end_lane(self.lane_settings, waited_at)

    def read_thread(self) -> tuple[Any, ...]:
        """Return what torch keeps for the thread, as the engine has set it, for `resume`."""
        return self._thread.read()

    def resume(self, reply: Any = None, engine_thread: tuple[Any, ...] | None = None) -> None:
        """Run on until the next layer call or the end.

        Args:
            reply: the outputs of the layer call that it waits at.
            engine_thread: what `read_thread` has returned, if the engine has changed nothing of it since; None: read now.
        """
        self._reply = reply
        del reply
        outside = self._settings.enter_lane(self.lane_settings)
        try:
            self._go_on(self._thread.read() if engine_thread is None else engine_thread, self._greenlet.switch)
            self._note_arrival(outside)
        finally:
            self._take_settings(outside)
        if self.request is None:
            self._settings.end_lane(self.lane_settings, waited_at=None)

    def close(self) -> None:
        """End it wherever it is, and unwind what is open in the model's code."""
        self._aborted = True
        if self._greenlet:
            outside = self._settings.enter_lane(self.lane_settings)
            try:
                self._go_on(self._thread.read(), self._greenlet.throw, LaneAborted)
            finally:
                self._take_settings(outside)

    # ---- what it sets on modules

    def _take_settings(self, outside: OutsideSettings) -> None:
        """Let modules be as they are to the engine."""
        if not self._settings.no_lane_sets_any:
            self.lane_settings = self._settings.read_lane(outside, self.lane_settings)
            self._settings.leave_lane(outside)

    def _note_arrival(self, outside: OutsideSettings) -> None:
        """Note what the lane has set before the call that it waits at, if it has not come to its end.

        Raises:
            UnseenError: it was not known to set that.
        """
        settings, request = self._settings, self.request
        if request is None:
            return
        unseen = settings.find_unseen(request.layer)
        if unseen:
            names = ", ".join(sorted({name for _, name in unseen}))
            raise UnseenError(f"the code between layers sets {names}, which was not seen when it was measured.")
        if not settings.no_lane_sets_any:
            self.lane_settings = settings.read_lane(outside, self.lane_settings)
        request.lane_settings = self.lane_settings

    def _note_return(self, layer: int, outside: OutsideSettings) -> None:
        """Note what a call of `layer` has set."""
        self._settings.note_return(layer)
        if not self._settings.no_lane_sets_any:
            self.lane_settings = self._settings.read_lane(outside, self.lane_settings)

    def _go_on(self, engine_thread: tuple[Any, ...], switch: Callable[..., Any], *values: Any) -> None:
        if self._between_layers is None:
            self._switch(engine_thread, switch, *values)
        else:
            with self._between_layers():
                self._switch(self._thread.read(), switch, *values)

    def _switch(self, engine_thread: tuple[Any, ...], switch: Callable[..., Any], *values: Any) -> None:
        self._greenlet.parent = getcurrent()
        try:
            with handled_by(self):
                if self._on_top is not None:
                    self._on_top.put_back.close()
                switch(*values)
        finally:
            del values  # an error that was thrown would keep itself and the tensors of its frames
            self._on_top = self._thread.restore(engine_thread)
        if self._on_top is not None and self.request is not None:
            self.request.around = self._on_top.around_layer

    # ---- in the greenlet

    def call(self, request: Request) -> Any:
        """Suspend the lane at a layer call; return the outputs that the engine answers with."""
        if self._aborted:
            raise LaneAborted
        self.request = request
        try:
            self._greenlet.parent.switch()
        finally:
            self.request = None
        reply, self._reply = self._reply, None
        return reply

    def _run(self) -> None:
        try:
            with torch.set_grad_enabled(self._grad), Autocast.entered(self._autocast):
                self.result = self._function()
        except BaseException:
            if not self._aborted:
                raise
