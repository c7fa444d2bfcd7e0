"""Let `optimizer.step()` by hand update as `engine.step()` does, while an engine steps the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harmony_ds.errors import OptimizerError, UnsupportedError, UsageError
from harmony_ds.optim.optimizer_chain import OptimizerChain

_NAMES = ("step", "zero_grad", "load_state_dict")


class OptimizerOverride:
    """Replacement of an optimizer's `step`, `zero_grad` and `load_state_dict` by calls of its engine, until `remove`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], None],
        zero_grad: Callable[[bool], None],
        finish: Callable[[], None],
    ) -> None:
        """Replace the methods. The functions must not keep the engine alive.

        Args:
            step: updates as the engine does.
            zero_grad: drops the engine's gradients; its argument is `set_to_none`.
            finish: waits for pending updates, which would write into the state that `load_state_dict` replaces.

        Raises:
            OptimizerError: the program has put a `step` of its own on the optimizer.
        """
        self._optimizer = optimizer
        self._before = {name: vars(optimizer)[name] for name in _NAMES if name in vars(optimizer)}
        # A learning-rate scheduler that was made before has put a `step` there, which calls the class's.
        if (put := self._before.get("step")) and getattr(put, "__wrapped__", None) is not type(optimizer).step:
            raise _replaced()
        own_zero_grad, own_load = optimizer.zero_grad, optimizer.load_state_dict

        def step_by_hand(closure: Callable[[], Any] | None = None) -> None:
            if closure is not None:
                raise UnsupportedError(
                    "optimizer.step(closure) evaluates the loss again while it steps, which an engine that updates layer "
                    "by layer cannot do: call engine.backward(loss), then step() without a closure."
                )
            step()

        def zero_grad_by_hand(set_to_none: bool = True) -> None:
            own_zero_grad(set_to_none)
            zero_grad(set_to_none)

        def load_state_dict(state_dict: dict[str, Any]) -> None:
            finish()
            own_load(state_dict)
            _keep_dtypes(optimizer, state_dict)

        step_by_hand._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers leave it as it is
        self._ours = {"step": step_by_hand, "zero_grad": zero_grad_by_hand, "load_state_dict": load_state_dict}
        vars(optimizer).update(self._ours)
        parts = optimizer.parts if isinstance(optimizer, OptimizerChain) else ()
        self._parts = [OptimizerOverride(part, _refuse_step_of_part, _drop_nothing_more, finish) for part in parts]

    def check(self) -> None:
        """Raise OptimizerError if the program has replaced `optimizer.step` since."""
        if vars(self._optimizer).get("step") is not self._ours["step"]:
            raise _replaced()
        for part in self._parts:
            part.check()

    def remove(self) -> None:
        """Give the optimizer its own methods back."""
        for part in self._parts:
            part.remove()
        for name, ours in self._ours.items():
            if vars(self._optimizer).get(name) is ours:
                del vars(self._optimizer)[name]
                vars(self._optimizer).update({key: own for key, own in self._before.items() if key == name})


def _keep_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore the saved dtypes of the state, which torch's `load_state_dict` has cast to those of (bf16) parameters."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != parameter.dtype:
                optimizer.state[parameter][key] = value.detach().to("cpu", copy=True)


def _refuse_step_of_part() -> None:
    raise UsageError(
        "step() of one of the optimizers that an engine steps together: call engine.step(), or engine.optimizer.step(), "
        "once for all of them."
    )


def _drop_nothing_more(set_to_none: bool) -> None:
    """Do nothing: `zero_grad` of one optimizer of several drops the gradients of its own parameters, and no others."""


def _replaced() -> OptimizerError:
    return OptimizerError(
        "optimizer.step was replaced on the object, and the engine updates layer by layer without calling it: use "
        "optimizer.register_step_post_hook, or override step() in a subclass of the optimizer."
    )
