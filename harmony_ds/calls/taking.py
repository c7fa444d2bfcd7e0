"""The arguments of one micro-batch's layer calls, taken one call after another.

Most layers are given what the layer before was given (masks, position ids, rotary tables, flags), and one tensor that is
another. What was looked at for the layer before is not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harmony_ds.calls.arguments import Arguments, Often, collects, take_tensors
from harmony_ds.calls.caches import without_unknown
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.keeping import Kept


@dataclass(slots=True, eq=False)
class Given:
    """What one call was given.

    Attributes:
        tensors: those among its arguments, each once.
        kept: for each, what is kept of it for an earlier call that was given it too; empty: nothing is known of one.
    """

    arguments: Arguments
    tensors: list[Tensor]
    kept: Sequence[Kept | None] = ()


class Taking:
    """Takes what the calls of one micro-batch are given."""

    __slots__ = ("_alike",)

    def __init__(self) -> None:
        self._alike: _Alike | None = None  # calls that come may be like this one

    def take(self, request: Request) -> Given:
        """What a call is given."""
        if self._alike is not None:
            given = self._alike.given(request)
            if given is not None:
                return given
        return Given(*take_tensors(without_unknown(request)))

    def remember(self, request: Request, given: Given, kept: Sequence[object]) -> None:
        """`kept` of a call is kept until its backward pass; calls that come may be given the same."""
        if not given.kept and given.tensors and given.arguments.are_fixed and without_unknown(request) is request:
            self._alike = _Alike.of(request, given, [one if isinstance(one, Kept) else None for one in kept])

    def forget(self) -> None:
        """No more calls come."""
        self._alike = None


class _Alike:
    """A call, as far as others may be like it: each is given the very same, but for tensors that are an argument each.

    No tensor that needs a gradient is held, and none but those that are kept of the call anyway.
    """

    __slots__ = ("_arguments", "_kept", "_names", "_places", "_positional", "_tensors", "_values")

    def __init__(self, request: Request, given: Given, kept: list[Kept | None], roots: list[int | None]) -> None:
        self._arguments = given.arguments
        self._positional, self._names = len(request.args), tuple(request.kwargs)
        self._places = {root: place for place, root in enumerate(roots) if root is not None}
        self._kept = kept
        self._tensors = [tensor if k else None for tensor, k in zip(given.tensors, kept, strict=True)]
        self._values = [*request.args, *request.kwargs.values()]
        for root, place in self._places.items():
            self._values[root] = self._tensors[place] if kept[place] else _ANOTHER

    @staticmethod
    def of(request: Request, given: Given, kept: list[Kept | None]) -> _Alike | None:
        """None: a part of an argument needs a gradient."""
        roots = given.arguments.roots()
        if any(k is None and root is None for k, root in zip(kept, roots, strict=True)):
            return None
        given.arguments.often = Often(given.arguments, [None if k is None else k.tensor for k in kept], roots)
        return _Alike(request, given, kept, roots)

    def given(self, request: Request) -> Given | None:
        """What `request` is given; None: it is not like this one."""
        args, kwargs = request.args, request.kwargs
        if len(args) != self._positional or tuple(kwargs) != self._names:
            return None
        tensors: list[Any] = self._tensors.copy()
        kept = self._kept.copy()
        for root, (value, own) in enumerate(zip((*args, *kwargs.values()), self._values, strict=True)):
            if value is not own:
                place = self._places.get(root)
                if place is None or not isinstance(value, Tensor):
                    return None
                tensors[place], kept[place] = value, None
        if len(set(map(id, tensors))) != len(tensors) or collects(request):
            return None
        return Given(self._arguments, tensors, kept)


_ANOTHER = object()
"""Where each call is given another tensor."""
