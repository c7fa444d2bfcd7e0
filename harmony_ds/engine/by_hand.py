"""The user's optimizer while an engine steps it: `optimizer.step()` by hand means what it always means.

optimizer.step   what stands there        who calls it             what it does
the engine's     from the beginning on    the program              the engine's update
a scheduler's    around either            the program              notes the call, and calls the engine's
the program's    before initialize        the update, as a whole   whatever it does, through the class's own
                 later                    the update, likewise     the same, through the engine's
                                          the program              the same, around the engine's update
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from harmony_ds.errors import UnsupportedError
from harmony_ds.offload.host_optimizer import HostOptimizer


class OptimizerByHand:
    """Puts a `step` and a `zero_grad` on the optimizer object that ask its engine."""

    def __init__(
        self,
        host: HostOptimizer,
        step: Callable[[], None],
        zero_grad: Callable[[bool], None],
        finish: Callable[[], None],
    ) -> None:
        """`step`, `zero_grad` and `finish`: what `optimizer.step()` does, what else `optimizer.zero_grad(set_to_none)`
        does, and what must be done before its state is replaced. None of them keeps the engine alive.
        """
        self._host = host
        self._optimizer = optimizer = host.optimizer
        self._before = {key: optimizer.__dict__.get(key) for key in ("step", "zero_grad")}
        before = self._before["step"]
        self._own = None if before is None or _is_schedulers(before, type(optimizer).step) else before
        self._removed = False

        def step_by_hand(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            if self._removed or host.is_stepping_whole:  # called by a step that the program has put here
                below = self._own if self._own is not None and host.own_step is not self._own else None
                return below() if below is not None else type(optimizer).step(optimizer)
            if closure is not None:
                raise UnsupportedError(
                    "optimizer.step(closure) evaluates the loss again while it steps, which an engine that updates layer "
                    "by layer cannot do: call engine.backward(loss), then step() without a closure."
                )
            return step()

        if before is not None:
            step_by_hand._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._step = step_by_hand
        optimizer.__dict__["step"] = MethodType(step_by_hand, optimizer)
        optimizer.__dict__["zero_grad"] = MethodType(self._zeroing(zero_grad), optimizer)
        # State that is loaded takes the place of what pending updates still write into.
        self._hook = optimizer.register_load_state_dict_pre_hook(lambda *_: finish())

    def _zeroing(self, zero_grad: Callable[[bool], None]) -> Callable[..., None]:
        def zero_grad_by_hand(optimizer: Any, set_to_none: bool = True) -> None:
            (self._before["zero_grad"] or MethodType(type(optimizer).zero_grad, optimizer))(set_to_none)
            if not self._removed:
                zero_grad(set_to_none)

        return zero_grad_by_hand

    def follow(self, by_hand: bool) -> None:
        """Before a step: finds the `step` that the program has put on the optimizer, which is then the whole update.

        Args:
            by_hand: the program has called it, and it has called the engine's.
        """
        found = self._optimizer.__dict__.get("step")
        later = None if by_hand or found is None or self._is_ours(found) else found
        self._host.own_step = self._own if later is None else later

    def _is_ours(self, step: Any) -> bool:
        return getattr(step, "__func__", None) is self._step or _is_schedulers(step, self._step)

    def remove(self) -> None:
        """Gives the optimizer its own methods back."""
        self._removed = True
        self._hook.remove()
        found = self._optimizer.__dict__.get("step")
        self._put_back("zero_grad")
        if found is None or self._is_ours(found):
            self._put_back("step")

    def _put_back(self, key: str) -> None:
        self._optimizer.__dict__.pop(key, None)
        if self._before[key] is not None:
            self._optimizer.__dict__[key] = self._before[key]


def _is_schedulers(step: Any, wrapped: Any) -> bool:
    """Whether `step` is what torch's learning-rate schedulers put around `wrapped`."""
    return getattr(step, "_wrapped_by_lr_sched", False) and getattr(step, "__wrapped__", None) is wrapped
