"""A loss that has not been computed yet, so that a loop that hands over micro-batches one by one is still grouped.

What stays pending: arithmetic with numbers and scalars, `detach`, `float`, `clone`, `mean`, ... and `backward`.
Everything else looks at the value, and looking computes it at once: `item`, `float(...)`, comparisons, formatting, and
adding it in place to a plain tensor (`total += loss`), because nobody could tell that tensor's other owners later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from harmony_ds.calls.boundary import targets_of
from harmony_ds.errors import UnsupportedError

_LAZY = frozenset(
    "add sub rsub mul div true_divide neg abs exp log sqrt float double half bfloat16 to type cpu cuda clone mean sum "
    "reshape squeeze __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ "
    "__neg__ __pos__ __abs__".split()
)
_IN_PLACE = {
    "__iadd__": operator.add,
    "__isub__": operator.sub,
    "__imul__": operator.mul,
    "__itruediv__": operator.truediv,
    "add_": torch.add,
    "sub_": torch.sub,
    "mul_": torch.mul,
    "div_": torch.div,
}
_DIVISIONS = frozenset("div true_divide __truediv__ __div__".split())
_METADATA = frozenset("shape dtype device ndim layout is_leaf dim size numel is_floating_point is_cuda __len__".split())


class Ticket(Protocol):
    """One queued micro-batch."""

    def loss(self, attached: bool) -> Tensor:
        """Its loss, computed now if need be; with its graph if `attached` and the step is not over."""

    @property
    def resolved(self) -> bool:
        """Whether its loss is known."""

    def check_not_propagated(self) -> None:
        """Raises UsageError if its backward pass is over."""

    def backward(self, loss: PendingLoss) -> None:
        """Propagate back from `loss`, which depends on this ticket alone, when the group runs."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """A function, and what it is to be called with, pending losses among it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def operands(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs


class PendingLoss(torch.Tensor):
    """A scalar over the losses of queued micro-batches."""

    _source: Ticket | _Applied
    _attached: bool

    @staticmethod
    def of(ticket: Ticket, dtype: torch.dtype, device: torch.device) -> PendingLoss:
        """The loss of one micro-batch."""
        return _make(ticket, True, dtype, device)

    @property
    def tickets(self) -> set[Ticket]:
        """The micro-batches whose losses it depends on."""
        if isinstance(self._source, _Applied):
            return {ticket for loss in _pending_in(self._source.operands) for ticket in loss.tickets}
        return {self._source}

    @property
    def resolved(self) -> bool:
        """Whether every loss it depends on is known."""
        return all(ticket.resolved for ticket in self.tickets)

    def evaluate(self, loss: Callable[[Ticket], Tensor]) -> Any:
        """Its value, given the losses."""
        source = self._source
        if isinstance(source, _Applied):
            args, kwargs = _replace(source.operands, lambda p: p.evaluate(loss))
            value = source.function(*args, **kwargs)
        else:
            value = loss(source)
        return value if self._attached or not isinstance(value, Tensor) else value.detach()

    def value(self) -> Any:
        """Its value; computes what is not known yet."""
        return self.evaluate(lambda ticket: ticket.loss(self._attached))

    def is_divided_by(self, number: int) -> bool:
        """Whether the program has divided it by `number`, and that is not all that `number` can mean here."""
        source = self._source
        if not isinstance(source, _Applied):
            return False
        operand, *others = source.args
        if source.function.__name__ in _DIVISIONS and others == [number] and not isinstance(others[0], Tensor):
            return True
        return isinstance(operand, PendingLoss) and operand.is_divided_by(number)

    def _leads_outside(self) -> bool:
        """Whether gradients go to what is not the engine's, whose owner expects them when backward is done."""
        if not isinstance(self._source, _Applied):
            return False
        for leaf in torch.utils._pytree.tree_iter(self._source.operands):
            if isinstance(leaf, PendingLoss):
                if leaf._leads_outside():
                    return True
            elif isinstance(leaf, Tensor) and leaf.grad_fn is not None and not _is_own(leaf.grad_fn):
                return True
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PendingLoss(of {len(self.tickets)} micro-batches, {'known' if self.resolved else 'not computed yet'})"

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        first = args[0] if args else None
        if isinstance(first, PendingLoss):
            if name in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name == "requires_grad":
                return first._attached
            if name == "backward":
                return first.propagate(*args[1:], **kwargs)
            if name in ("detach", "data"):
                return _make(_Applied(torch.clone, (first,), {}), False, first.dtype, first.device)
            if name in _IN_PLACE:
                func, name = _IN_PLACE[name], "add"
        if func is torch.autograd.grad:
            raise UnsupportedError(
                "torch.autograd.grad of a loss that an engine computes: its backward pass runs layer by layer, outside "
                "autograd's graph, and gathers the gradients of all parameters. Call engine.backward(loss) and read .grad, "
                "of parameters or of inputs that require a gradient."
            )
        if name in _LAZY and not any(p.resolved for p in _pending_in((args, kwargs))) and _all_scalar(args):
            return _lazily(func, args, kwargs)
        known_args, known_kwargs = _replace((args, kwargs), lambda p: p.value())
        return func(*known_args, **known_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached by C++ code that never asked __torch_function__.
        known_args, known_kwargs = _replace((args, kwargs or {}), lambda p: p.value())
        return func(*known_args, **known_kwargs)

    def check_not_propagated(self) -> None:
        """Raises UsageError if the backward pass of a micro-batch that it depends on is over."""
        for ticket in self.tickets:
            ticket.check_not_propagated()

    def propagate(self, *args: Any, **kwargs: Any) -> None:
        """Notes that the group has to propagate back from this loss; what is known already is propagated at once."""
        self.check_not_propagated()
        tickets = self.tickets
        plain = not args and not any(kwargs.values())  # torch passes every keyword on, unset ones too
        if len(tickets) == 1 and not self.resolved and plain and not self._leads_outside():
            next(iter(tickets)).backward(self)
        else:
            self.value().backward(*args, **kwargs)


def _make(source: Ticket | _Applied, attached: bool, dtype: torch.dtype, device: torch.device) -> PendingLoss:
    # requires_grad stays False in C++, so that code which bypasses Python fails loudly instead of losing a gradient.
    loss: PendingLoss = torch.Tensor._make_wrapper_subclass(PendingLoss, (), dtype=dtype, device=device)
    loss._source, loss._attached = source, attached
    return loss


def _lazily(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingLoss:
    pending = list(_pending_in((args, kwargs)))
    args, kwargs = torch.utils._pytree.tree_map(_of_now, (args, kwargs))
    # What it will look like is found out on stand-ins.
    with torch.no_grad():
        like = func(*_replace(args, _stand_in), **_replace(kwargs, _stand_in))
    attached = torch.is_grad_enabled() and any(p._attached for p in pending)
    return _make(_Applied(func, args, kwargs), attached, like.dtype, like.device)


def _of_now(operand: Any) -> Any:
    """What a tensor beside pending losses is now: it may be written into before they are known."""
    return operand.clone() if isinstance(operand, Tensor) and not isinstance(operand, PendingLoss) else operand


def _is_own(node: Any) -> bool:
    """Whether everything behind an autograd node is a parameter that keeps gradients for its engine."""
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not hasattr(variable, "_hp_mapping"):
            return False
        if targets_of(node) is not None:
            return False
        todo += [following for following, _ in node.next_functions if following is not None]
    return True


def _stand_in(loss: PendingLoss) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.zeros((), dtype=loss.dtype, device=loss.device)


def _all_scalar(args: Any) -> bool:
    return all(t.numel() == 1 for t in torch.utils._pytree.tree_iter(args) if isinstance(t, Tensor))


def _pending_in(tree: Any) -> Iterator[PendingLoss]:
    return (leaf for leaf in torch.utils._pytree.tree_iter(tree) if isinstance(leaf, PendingLoss))


def _replace(tree: Any, function: Callable[[PendingLoss], Any]) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, PendingLoss) else leaf, tree)
