"""A loss that has not been computed yet, so that a loop that hands over micro-batches one by one is still grouped.

What stays pending: arithmetic with numbers, other pending losses, scalars without a graph and penalties over weights,
`detach`, `float`, `clone`, `mean`, ... and `backward`. Everything else looks at the value, and looking computes it at once:
`item`, `float(...)`, comparisons, formatting, collectives, adding it in place to a plain tensor (`total += loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from harmony_ds.calls.boundary import next_nodes, reachable_nodes
from harmony_ds.errors import UnsupportedError

_LAZY = frozenset(
    "add sub mul div neg exp float double half bfloat16 to cpu clone detach data mean sum __rsub__ __rdiv__".split()
)
_ADDITIVE = _LAZY - {"mul", "div", "exp", "__rdiv__"}
_METADATA = frozenset("shape dtype device ndim layout dim size numel is_floating_point is_cuda".split())


class Ticket(Protocol):
    """One queued micro-batch."""

    def loss(self, attached: bool) -> Tensor:
        """Return its loss, computed now if need be; with its graph if `attached` and the step is not over."""

    @property
    def resolved(self) -> bool:
        """Whether its loss is known."""

    def check_not_propagated(self) -> None:
        """Raise UsageError if its backward pass is over."""

    def backward(self, loss: PendingLoss) -> None:
        """Propagate back from `loss`, to this ticket alone, when the group runs."""


class PendingLoss(torch.Tensor):
    """A scalar over the losses of queued micro-batches: the loss of one, or what `_function` makes of `_operands`."""

    tickets: tuple[Ticket, ...]  # the micro-batches whose losses it depends on
    is_linear: bool = True  # in each of them, and leads gradients nowhere else: each can propagate its own part
    divisors: frozenset[float] = frozenset()  # what the program has divided it by
    requires_grad: bool = True
    _function: Callable[[Iterable[Any]], Tensor] | None = None
    _operands: Iterable[Any] = ()
    _known: Tensor | None = None

    def __new__(
        cls, tickets: tuple[Ticket, ...], dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = ()
    ) -> PendingLoss:
        # requires_grad stays False in C++, so that code which bypasses Python fails loudly instead of losing a gradient.
        loss: PendingLoss = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        loss.tickets = tickets
        return loss

    @property
    def resolved(self) -> bool:
        """Whether every loss it depends on is known."""
        return all(ticket.resolved for ticket in self.tickets)

    def evaluate(self, loss: Callable[[Ticket], Tensor]) -> Tensor:
        """Return its value, given the losses."""
        operands = [one.evaluate(loss) if isinstance(one, PendingLoss) else one for one in self._operands]
        value = loss(*self.tickets) if self._function is None else self._function(operands)
        return value if self.requires_grad else value.detach()

    def value(self) -> Tensor:
        """Return its value, computed now if need be. What is written into it stays."""
        if self._known is None:
            with torch.inference_mode(False):  # with gradients, though the reader may want none now
                self._known = self.evaluate(lambda ticket: ticket.loss(self.requires_grad)).clone()
        return self._known

    def check_not_propagated(self) -> None:
        """Raise UsageError if the backward pass of a micro-batch that it depends on is over."""
        for ticket in self.tickets:
            ticket.check_not_propagated()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Note that the group has to propagate back from this loss; what is known already is propagated at once."""
        self.check_not_propagated()
        plain = not args and not any(kwargs.values())
        notes = self.requires_grad and (len(self.tickets) == 1 or self.is_linear)
        if plain and notes and not any(ticket.resolved for ticket in self.tickets):
            for ticket in self.tickets:
                ticket.backward(self)
        else:
            self.value().backward(*args, **kwargs)

    def __iadd__(self, _: Any) -> Any:  # type: ignore[misc]
        return NotImplemented  # so that Python goes on with `loss = loss + ...`

    __isub__ = __imul__ = __itruediv__ = __iadd__

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PendingLoss(of {len(self.tickets)} micro-batches, {'known' if self.resolved else 'not computed yet'})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func.__self__, "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            raise UnsupportedError(
                "torch.autograd.grad of a loss that an engine computes, outside autograd's graph: call "
                "engine.backward(loss) and read .grad, of parameters or of inputs that require a gradient."
            )
        later = _later(func, args, kwargs) if name in _LAZY else None
        return _now(func, args, kwargs) if later is None else later

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached by C++ code that never asked __torch_function__.
        return _now(func, args, kwargs or {})


def _now(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known_args, known_kwargs = tree_map_only(PendingLoss, PendingLoss.value, (args, kwargs))
    return func(*known_args, **known_kwargs)


def _later(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingLoss | None:
    """Return what `func` will return; None if it cannot wait: an operand is no scalar, or leads gradients elsewhere."""
    leaves, spec = tree_flatten((args, kwargs))
    operands = [_as_it_is(leaf) for leaf in leaves]
    pending = [one for one in operands if isinstance(one, PendingLoss)]
    others = [one for one in operands if isinstance(one, Tensor) and not isinstance(one, PendingLoss)]
    if not pending or any(other.ndim or (other.requires_grad and _leads_elsewhere(other)) for other in others):
        return None

    def function(operands: Iterable[Any]) -> Tensor:
        args, kwargs = tree_unflatten(operands, spec)
        return func(*args, **kwargs)

    like = function(map(_stand_in, operands))
    tickets = dict.fromkeys(ticket for one in pending for ticket in one.tickets)
    loss = PendingLoss(tuple(tickets), like.dtype, like.device, like.shape)
    loss._function, loss._operands, loss.requires_grad = function, operands, like.requires_grad
    scales = func.__name__ in ("mul", "div") and len(pending) == 1 and operands[0] is pending[0]
    loss.is_linear = (scales or func.__name__ in _ADDITIVE) and all(one.is_linear for one in pending)
    loss.is_linear &= not any(other.requires_grad for other in others)
    loss.divisors = pending[0].divisors.union(*(one.divisors for one in pending))
    if func.__name__ == "div" and not others:
        loss.divisors |= {operands[-1]}
    return loss


def _leads_elsewhere(tensor: Tensor) -> bool:
    """Return whether its gradients go to anything but parameters of an engine, which keep them for the step."""
    reached = reachable_nodes([tensor.grad_fn])
    ends = all(node in reached for one in reached for node in next_nodes(one))  # in no layer's output
    own = all(hasattr(node.variable, "_hp_mapping") for node in reached if hasattr(node, "variable"))
    return not (reached and ends and own)


def _as_it_is(operand: Any) -> Any:
    """Return a scalar as it is now: it may be written into before its micro-batch runs."""
    if isinstance(operand, PendingLoss):
        return operand.value() if operand.resolved else operand
    return operand.clone() if isinstance(operand, Tensor) and not operand.ndim else operand


def _stand_in(operand: Any) -> Any:
    """Return a tensor that shows what a result will look like."""
    if not isinstance(operand, PendingLoss):
        return operand
    return torch.zeros(operand.shape, dtype=operand.dtype, device=operand.device, requires_grad=operand.requires_grad)
