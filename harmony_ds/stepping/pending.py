"""A loss that has not been computed yet, so that a loop that hands over micro-batches one by one is still grouped.

What stays pending: arithmetic with numbers and scalars, `detach`, `float`, `clone`, `mean`, ... and `backward`.
Everything else looks at the value, and looking computes it at once: `item`, `float(...)`, comparisons, formatting,
collectives of `torch.distributed`, and adding it in place to a plain tensor (`total += loss`), because nobody could tell
that tensor's other owners later.

What is written into it in place stays, and whatever shares its memory (`loss.detach()`) shows it, as of any tensor.
"""

from __future__ import annotations

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
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "__iadd__": torch.add,
    "__isub__": torch.sub,
    "__imul__": torch.mul,
    "__itruediv__": torch.div,
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


@dataclass(slots=True)
class _Memory:
    """What a loss shares with all that is detached from it: how its value comes about and, once known, where it lies."""

    source: Ticket | _Applied
    value: Tensor | None = None


class PendingLoss(torch.Tensor):
    """A scalar over the losses of queued micro-batches."""

    _graph: Ticket | _Applied  # what gradients go through
    _attached: bool
    _memory: _Memory

    @staticmethod
    def of(ticket: Ticket, dtype: torch.dtype, device: torch.device) -> PendingLoss:
        """The loss of one micro-batch."""
        return _make(ticket, True, dtype, device)

    @property
    def _source(self) -> Ticket | _Applied:
        return self._graph if self._attached else self._memory.source

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
        """Its value, in the memory that it has for good; computes what is not known yet."""
        memory = self._memory
        if memory.value is None:
            known = _alias(self, self._graph, attached=False).evaluate(lambda ticket: ticket.loss(False))
            memory.value = known.clone()  # the program may write into it
        if self._attached:
            value = self.evaluate(lambda ticket: ticket.loss(True))
            if value.requires_grad:
                if value.data_ptr() != memory.value.data_ptr():
                    value.data = memory.value
                return value
        return memory.value.detach()

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
        args, kwargs = _by_place(args, kwargs or {})
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        first = args[0] if args else None
        if isinstance(first, PendingLoss):
            if name in _METADATA or (name == "type" and len(args) == 1 and not kwargs):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name == "requires_grad":
                return first._attached
            if name == "backward":
                return first.propagate(*args[1:], **kwargs)
            if name in ("detach", "data"):
                return _alias(first, first._graph, attached=False)
            if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
                return _write(name, func, first, args[1:], kwargs)
        if func is torch.autograd.grad:
            raise UnsupportedError(
                "torch.autograd.grad of a loss that an engine computes: its backward pass runs layer by layer, outside "
                "autograd's graph, and gathers the gradients of all parameters. Call engine.backward(loss) and read .grad, "
                "of parameters or of inputs that require a gradient."
            )
        call = _lazily if name in _LAZY and _can_wait(args, kwargs) else _now
        return call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached by C++ code that never asked __torch_function__.
        return _now(func, args, kwargs or {})

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
            next(iter(tickets)).backward(_of_now(self))
        else:
            self.value().backward(*args, **kwargs)


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`torch.div(input=loss, other=2)` as `torch.div(loss, 2)`."""
    named = [kwargs[key] for key in ("input", "other") if key in kwargs]
    return (*args, *named), {key: value for key, value in kwargs.items() if key not in ("input", "other")}


def _make(source: Ticket | _Applied, attached: bool, dtype: torch.dtype, device: torch.device) -> PendingLoss:
    # requires_grad stays False in C++, so that code which bypasses Python fails loudly instead of losing a gradient.
    loss: PendingLoss = torch.Tensor._make_wrapper_subclass(PendingLoss, (), dtype=dtype, device=device)
    loss._graph, loss._attached, loss._memory = source, attached, _Memory(source)
    return loss


def _alias(loss: PendingLoss, graph: Ticket | _Applied, attached: bool) -> PendingLoss:
    """Another tensor in the memory of `loss`."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = _make(graph, attached, loss.dtype, loss.device)
    alias._memory = loss._memory
    return alias


def _write(name: str, func: Any, loss: PendingLoss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingLoss:
    """An in-place operation on `loss`; arithmetic stays pending if it can."""
    before, arithmetic = _of_now(loss), _IN_PLACE.get(name)
    if arithmetic is not None and _can_wait((loss, *args), kwargs):
        after = _lazily(arithmetic, (before, *args), kwargs)
        if after.dtype != loss.dtype:
            after = _lazily(Tensor.to, (after, loss.dtype), {})
        loss._graph, loss._attached, loss._memory.source = after._graph, after._attached, after._graph
        return loss
    value = _now(arithmetic or func, (loss, *args), kwargs)
    if arithmetic is not None:
        _alias(loss, loss._graph, attached=False).value().copy_(value.detach())
    loss._graph, loss._attached = _Applied(_first_of, (value, before), {}), value.requires_grad
    return loss


def _first_of(value: Tensor, _: Any) -> Tensor:
    return value


def _now(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known_args, known_kwargs = _replace((args, kwargs), lambda p: p.value())
    return func(*known_args, **known_kwargs)


def _can_wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation has scalars alone, whose values nobody has looked at or overwritten."""
    pending = _pending_in((args, kwargs))
    return _all_scalar(args) and not any(p.resolved or p._source is not p._memory.source for p in pending)


def _lazily(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingLoss:
    pending = list(_pending_in((args, kwargs)))
    args, kwargs = torch.utils._pytree.tree_map(_of_now, (args, kwargs))
    # What it will look like is found out on stand-ins.
    with torch.no_grad():
        like = func(*_replace(args, _stand_in), **_replace(kwargs, _stand_in))
    attached = torch.is_grad_enabled() and any(p._attached for p in pending)
    return _make(_Applied(func, args, kwargs), attached, like.dtype, like.device)


def _of_now(operand: Any) -> Any:
    """What an operand is now: it may be written into before its losses are known."""
    if isinstance(operand, PendingLoss):
        with torch._C.DisableTorchFunctionSubclass():
            return _make(operand._source, operand._attached, operand.dtype, operand.device)
    return operand.clone() if isinstance(operand, Tensor) else operand


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
