"""Where an operation's results hold tokens, if its operands hold them in known places, and no token sees another.

A tensor's tokens are in one dimension, by themselves or between other numbers:

    (B, T, H)      TokenPlace(dim=1)
    (B * T, H)     TokenPlace(dim=0, before=B)       after view(-1, H)
    (T * K, H)     TokenPlace(dim=0, after=K)

There is a rule for each class of operations: elementwise ones, matrix products, reductions, norms and softmax over other
dimensions, views, look-ups in tables. An operation without a rule mixes tokens, as far as is known here: attention, shifts,
sorting along tokens, random numbers, custom kernels. Rules look at shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from harmony_ds.device.live_bytes import tensors_among


class TokensMixedError(Exception):
    """An operation is not known to treat each token by itself."""


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """The tokens of a tensor: its dimension `dim` counts (`before`, tokens, `after`), the last of them fastest."""

    dim: int
    before: int = 1
    after: int = 1

    def tokens_in(self, tensor: Tensor) -> int:
        """Return how many tokens `tensor` holds; TokensMixedError: its dimension is no multiple."""
        if self.dim >= tensor.dim() or tensor.shape[self.dim] % (self.before * self.after):
            raise TokensMixedError(f"{tuple(tensor.shape)} does not hold tokens as {self} says")
        return tensor.shape[self.dim] // (self.before * self.after)

    def narrow(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """Return `count` tokens from `first` on, as a view: with `before` in a dimension of its own, if that is not 1."""
        if self.before == 1:
            return tensor.narrow(self.dim, first * self.after, count * self.after)
        split: Tensor = tensor.unflatten(self.dim, (self.before, -1))
        return split.narrow(self.dim + 1, first * self.after, count * self.after)

    def moved(self, dim: int) -> TokenPlace:
        """Return the place in `dim`, with the same numbers around the tokens."""
        return TokenPlace(dim, self.before, self.after)


class Operation:
    """One call of an aten operator: its arguments by name, and the places of tokens in those that are tensors.

    Attributes:
        name: of the operator, without the overload.
        tensors: among the arguments, in their order.
        result: what it has returned; None: it has not been called.
    """

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], place_of: Callable[[Tensor], TokenPlace | None]
    ) -> None:
        self.name: str = func._overloadpacket.__name__
        self.tags = func.tags
        self.place_of = place_of
        self._arguments: dict[str, Any] = {
            a.name: a.default_value for a in func._schema.arguments if a.has_default_value()
        }
        self._arguments |= zip((a.name for a in func._schema.arguments), args, strict=False)
        self._arguments |= kwargs
        self.tensors = [*tensors_among([*self._arguments.values()])]
        self.result: Any = None

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def has(self, name: str) -> bool:
        return name in self._arguments

    def place(self, name: str) -> TokenPlace | None:
        """Return where the tensor argument `name` holds tokens; None: it holds none, or there is no tensor."""
        value = self._arguments.get(name)
        return self.place_of(value) if isinstance(value, Tensor) else None

    def operand(self) -> tuple[Tensor, TokenPlace]:
        """Return the first argument, which alone must hold tokens, and where."""
        tensor, *others = self.tensors
        place = self.place_of(tensor)
        if place is None or any(self.place_of(other) is not None for other in others):
            self.refuse()
        return tensor, place

    def dims(self, name: str = "dim") -> list[int]:
        """Return the dimensions of the first argument that the argument `name` names; all of them if it names none."""
        given, rank = self._arguments.get(name), self.tensors[0].dim()
        if given is None or (isinstance(given, (list, tuple)) and not given):
            return list(range(rank))
        return [dim % max(rank, 1) for dim in (given if isinstance(given, (list, tuple)) else [given])]

    def refuse(self) -> NoReturn:
        raise TokensMixedError(f"{self.name} is not known to treat each token by itself as it is called")


def result_place(operation: Operation) -> TokenPlace | None:
    """Return where the results of an operation, all of them, hold tokens; None: it depends on none.

    Raises:
        TokensMixedError: a token may depend on another, or on where it is.
    """
    if torch.Tag.nondeterministic_seeded in operation.tags:
        operation.refuse()
    if all(operation.place_of(tensor) is None for tensor in operation.tensors):
        return None
    rule = _RULES.get(operation.name)
    if rule is None and (torch.Tag.pointwise in operation.tags or operation.name in _ELEMENTWISE):
        rule = _aligned
    if rule is None:
        operation.refuse()
    return rule(operation)


Rule = Callable[[Operation], TokenPlace | None]
"""Where the result of an operation holds tokens; it may raise TokensMixedError."""


# ---- elementwise


def _aligned(operation: Operation) -> TokenPlace:
    """Operands are broadcast: tokens must be at the same place in all that have them, and others must not vary there."""
    rank = max(tensor.dim() for tensor in operation.tensors)
    found: list[TokenPlace] = []
    for tensor in operation.tensors:
        place = operation.place_of(tensor)
        if place is not None:
            found.append(place.moved(place.dim + rank - tensor.dim()))
    if len({*found}) != 1:
        operation.refuse()
    for tensor in operation.tensors:
        dim = found[0].dim - (rank - tensor.dim())
        if operation.place_of(tensor) is None and dim >= 0 and tensor.shape[dim] != 1:
            operation.refuse()
    return found[0]


def _without_tokens(_: Operation) -> None:
    """Of the operand only dtype and device are used; sizes are constants, which are compared."""
    return


# ---- along other dimensions


def _reduced(operation: Operation) -> TokenPlace:
    """Dimensions without tokens are reduced."""
    _, place = operation.operand()
    dims = operation.dims()
    if place.dim in dims:
        operation.refuse()
    if operation.has("keepdim") and operation["keepdim"]:
        return place
    return place.moved(place.dim - sum(dim < place.dim for dim in dims))


def _along(operation: Operation) -> TokenPlace:
    """Values along dimensions without tokens are combined."""
    place = _common_place(operation)
    if place.dim in operation.dims("dims" if operation.has("dims") else "dim"):
        operation.refuse()
    return place


def _common_place(operation: Operation) -> TokenPlace:
    """Return where all operands hold tokens, if that is the same place."""
    place = operation.place_of(operation.tensors[0])
    if place is None or any(operation.place_of(tensor) != place for tensor in operation.tensors):
        operation.refuse()
    return place


def _normalized(operation: Operation) -> TokenPlace:
    """Return the place, if the tokens are not in the last dimensions, which are normalized."""
    tensor, place = operation.operand()
    if place.dim >= tensor.dim() - len(operation["normalized_shape"]):
        operation.refuse()
    return place


def _padded(operation: Operation) -> TokenPlace:
    tensor, place = operation.operand()
    pads = operation["pad"]
    beside = 2 * (tensor.dim() - 1 - place.dim)  # pads begin with the last dimension
    if any(pads[beside : beside + 2]):
        operation.refuse()
    return place


# ---- products of matrices


def _product(operation: Operation) -> TokenPlace:
    """Return the place, if one factor holds tokens in its outer dimension, or both in the batch."""
    left, right = _FACTORS[operation.name]
    first, second = operation[left], operation[right]
    of_first, of_second = operation.place(left), operation.place(right)
    batch = first.dim() == 3
    found = None
    if of_first is not None and of_second is not None:
        found = of_first if batch and of_first == of_second and of_first.dim == 0 else None
    elif of_first is not None:
        found = of_first if of_first.dim == batch else None
    elif of_second is not None and second.dim() > 1:
        found = of_second if of_second.dim == 1 + batch else None
    if found is None:
        operation.refuse()
    for tensor in operation.tensors:
        if tensor is first or tensor is second:
            continue
        place, dim = operation.place_of(tensor), found.dim - (operation.result.dim() - tensor.dim())
        constant = place is None and (dim < 0 or tensor.shape[dim] == 1)
        if not constant and place != found.moved(dim):
            operation.refuse()
    return found


_FACTORS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
}


def _linear(operation: Operation) -> TokenPlace:
    tensor, place = operation.operand()
    if place.dim == tensor.dim() - 1:
        operation.refuse()
    return place


# ---- look-ups


def _embedded(operation: Operation) -> TokenPlace:
    """Rows of a table, by token."""
    place = operation.place("indices")
    if place is None or operation.place("weight") is not None:
        operation.refuse()
    return place


def _index_selected(operation: Operation) -> TokenPlace:
    """Entries of a table by token, or the same entries of each token."""
    (dim,) = operation.dims()
    place, of_index = operation.place("self"), operation.place("index")
    if place is not None and of_index is None and place.dim != dim:
        return place
    if place is not None or of_index is None:
        operation.refuse()
    return of_index.moved(dim)


def _indexed(operation: Operation) -> TokenPlace:
    """`table[:, index]`, by one index tensor that holds tokens."""
    given = [(dim, index) for dim, index in enumerate(operation["indices"]) if index is not None]
    dim, index = given[0]
    place = operation.place_of(index)
    if len(given) != 1 or place is None or index.dtype is torch.bool or operation.place("self") is not None:
        operation.refuse()
    return place.moved(dim + place.dim)


# ---- views, and what rearranges


def _viewed(operation: Operation) -> TokenPlace:
    """Return where the same elements, in the same order, have the tokens now, by the elements around them."""
    tensor, place = operation.operand()
    tokens = place.tokens_in(tensor)
    before = math.prod(tensor.shape[: place.dim]) * place.before
    after = math.prod(tensor.shape[place.dim + 1 :]) * place.after
    outer, inner = 1, math.prod(operation.result.shape)
    for dim, size in enumerate(operation.result.shape):
        inner //= max(size, 1)
        fits = before % outer == 0 and inner > 0 and after % inner == 0
        if fits and (before // outer) * tokens * (after // inner) == size:
            return TokenPlace(dim, before // outer, after // inner)
        outer *= size
    raise TokensMixedError(
        f"tokens and others are taken together: {tuple(tensor.shape)}, {tuple(operation.result.shape)}"
    )


def _expanded(operation: Operation) -> TokenPlace:
    tensor, place = operation.operand()
    return place.moved(place.dim + operation.result.dim() - tensor.dim())


def _permuted(operation: Operation) -> TokenPlace:
    _, place = operation.operand()
    return place.moved(operation.dims("dims").index(place.dim))


def _transposed(operation: Operation) -> TokenPlace:
    tensor, place = operation.operand()
    one, other = (0, 1)
    if operation.has("dim0"):
        one, other = operation["dim0"] % tensor.dim(), operation["dim1"] % tensor.dim()
    elif tensor.dim() < 2:
        return place
    return place.moved({one: other, other: one}.get(place.dim, place.dim))


def _unsqueezed(operation: Operation) -> TokenPlace:
    _, place = operation.operand()
    return place.moved(place.dim + (operation["dim"] % operation.result.dim() <= place.dim))


def _squeezed(operation: Operation) -> TokenPlace:
    tensor, place = operation.operand()
    gone = [dim for dim in operation.dims() if tensor.shape[dim] == 1]
    if place.dim in gone:
        operation.refuse()
    return place.moved(place.dim - sum(dim < place.dim for dim in gone))


def _sliced(operation: Operation) -> TokenPlace:
    """Part of another dimension, or all of the tokens."""
    _, place = operation.operand()
    if operation.dims() == [place.dim]:
        length = operation.tensors[0].shape[place.dim]
        end = operation["end"]
        if operation["step"] != 1 or operation["start"] not in (None, 0) or (end is not None and end < length):
            operation.refuse()
    return place


def _split(operation: Operation) -> TokenPlace:
    """Parts of another dimension."""
    _, place = operation.operand()
    if place.dim in operation.dims():
        operation.refuse()
    return place


def _selected(operation: Operation) -> TokenPlace:
    """Entries of another dimension, which is gone."""
    _, place = operation.operand()
    (dim,) = operation.dims()
    if place.dim == dim:
        operation.refuse()
    return place.moved(place.dim - (dim < place.dim))


def _stacked(operation: Operation) -> TokenPlace:
    """Return the place in tensors that all hold tokens at the same place, joined in a new dimension."""
    place = _common_place(operation)
    return place.moved(place.dim + (operation["dim"] % operation.result.dim() <= place.dim))


_ELEMENTWISE = frozenset(
    "_to_copy clone detach alias copy_ fill_ zero_ zeros_like ones_like full_like masked_fill masked_fill_".split()
)
"""Beside those that torch tags as such."""
_RULES: dict[str, Rule] = {
    **dict.fromkeys(["new_zeros", "new_ones", "new_full", "new_empty"], _without_tokens),
    **dict.fromkeys("sum mean amax amin var std var_mean std_mean logsumexp linalg_vector_norm prod".split(), _reduced),
    **dict.fromkeys("any all argmax argmin max min count_nonzero norm".split(), _reduced),
    **dict.fromkeys("_softmax _log_softmax cumsum cumprod logcumsumexp sort topk flip glu cat".split(), _along),
    **dict.fromkeys("gather scatter scatter_ scatter_add scatter_add_".split(), _along),
    **dict.fromkeys(["native_layer_norm", "_fused_rms_norm"], _normalized),
    "constant_pad_nd": _padded,
    **dict.fromkeys(_FACTORS, _product),
    "linear": _linear,
    "embedding": _embedded,
    "index_select": _index_selected,
    "index": _indexed,
    **dict.fromkeys(["view", "_unsafe_view", "_reshape_alias", "reshape"], _viewed),
    "expand": _expanded,
    "permute": _permuted,
    **dict.fromkeys(["transpose", "t", "numpy_T"], _transposed),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "slice": _sliced,
    **dict.fromkeys(["split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"], _split),
    **dict.fromkeys(["select", "unbind"], _selected),
    "stack": _stacked,
}
SIZED_BY_TOKENS = frozenset(["view", "_unsafe_view", "_reshape_alias", "reshape", "expand"])
"""Operations whose arguments are the sizes of their results."""
