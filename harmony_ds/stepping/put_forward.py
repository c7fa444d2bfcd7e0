"""The `forward` that a program puts on the model object: a call reaches the one that stood there when it was made.

Strategies that redirect a single call (`_ForwardRedirection` of Lightning and of TRL) put one there that takes itself away
as soon as it is reached. A call of the engine reaches it later, and more than once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from harmony_ds.calls.intercept import InterceptedForward

_NAME = "forward"


class PutForward:
    """What stands in the place of `module.forward`, and what takes itself away."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left: dict[object, Any] = {}  # by the code of one that has run: what stood there then; None: nothing

    @property
    def is_new(self) -> bool:
        """Whether nothing like what stands there has run so far."""
        put = self._standing()
        return put is not None and _code(put) not in self._left

    def call(self) -> Callable[..., Any]:
        """Calls the module by what stands there now, whatever stands there then."""
        put = self._standing()

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._standing()
            if put is None and before is None:
                return self._module(*args, **kwargs)

            def reached(*given: Any, **named: Any) -> Any:
                self._stand(before)
                return self._own(*given, **named) if put is None else put(*given, **named)

            self._stand(reached)
            try:
                outputs = self._module(*args, **kwargs)
                if before is put:
                    self._left[_code(put)] = self._standing()
                return outputs
            finally:
                self._stand(before)

        return call

    def called(self) -> None:
        """A call was made: what takes itself away stands there no more, though it may run later."""
        put = self._standing()
        if put is not None:
            left = self._left.get(_code(put), put)
            if left is None or _code(left) != _code(put):
                self._stand(left)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    def _standing(self) -> Any:
        put = self._module.__dict__.get(_NAME)
        return None if isinstance(put, InterceptedForward) else put

    def _stand(self, forward: Any) -> None:
        if forward is not None:
            self._module.__dict__[_NAME] = forward
        else:
            self._module.__dict__.pop(_NAME, None)


def _code(forward: Any) -> object:
    """What functions that are made anew for every call have alike."""
    return getattr(forward, "__code__", type(forward))
