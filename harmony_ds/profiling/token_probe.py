"""Find out whether a computation treats tokens alike: each by itself, whatever the others are, how many, and where it lies.

The computation is run on two numbers of tokens, and every operation that torch dispatches meanwhile is looked at. Tokens
stay apart as long as each operation is known to keep them so: functions of single values, products with a matrix of
weights, sums and norms over other dimensions, views that leave the tokens' dimension as it is. Numbers that differ between
the two runs, other than sizes in a view, depend on how many tokens there are. No value is looked at, so that the answer is
the same on the meta device.

What torch does not dispatch is not known, and neither is how a Python-written `autograd.Function` propagates back: then
tokens count as depending on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from harmony_ds.device.live_bytes import EagerDispatchMode, tensors_among
from harmony_ds.model.boundary import reachable_nodes
from harmony_ds.model.trees import tensors_in

_aten = torch.ops.aten

_COUNTS = (251, 257)
"""Numbers of tokens that are tried: primes, which no other dimension should be a multiple of."""


def _operators(names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names.split())


_VIEWS = _operators(
    "view _unsafe_view _reshape_alias reshape t transpose permute unsqueeze squeeze expand slice select split "
    "split_with_sizes unbind chunk detach alias lift_fresh"
)
"""What these take from the tokens' dimension, or add to it, shows in its size."""
_COPIES = _operators("_to_copy clone copy_ empty_like fill_ zero_")
_MATRIX_PRODUCTS = {_aten.mm: 0, _aten.addmm: 1}
"""The place, among the arguments, of the matrix whose rows are tokens."""
_ALONG_DIM = _operators("_softmax _log_softmax logsumexp cumsum argmax argmin")
_OVER_DIMS = _operators("sum mean amax amin var std linalg_vector_norm")
"""Reductions over the dimensions that the second argument (the third, of a norm) names."""
_NORMS = _operators("native_layer_norm _fused_rms_norm")


def treats_tokens_alike(run: Callable[[Tensor], Any], like: Tensor, dim: int) -> bool:
    """Return whether `run` treats each token of its argument by itself, forward and backward.

    It is called with zeros, with gradients on, and must leave nothing behind.

    Args:
        run: the computation; what it raises is taken for a no.
        like: an argument as `run` takes them: its dtype, device, and sizes in all dimensions but `dim`.
        dim: the dimension that holds the tokens.
    """
    traces: list[list[object]] = []
    for count in _COUNTS:
        shape = list(like.shape)
        shape[dim] = count
        watch = _TokenWatch(count)
        with torch.enable_grad():
            tokens = torch.zeros(shape, dtype=like.dtype, device=like.device, requires_grad=True)
            watch.mark(tokens, dim)
            try:
                with watch:
                    results = tensors_in(run(tokens))
            except Exception:  # noqa: BLE001 - it does not take such arguments
                return False
        if not results or not watch.keeps_apart or not all(map(watch.holds_tokens, results)):
            return False
        if any(_is_written_in_python(node) for node in reachable_nodes(one.grad_fn for one in results)):
            return False
        traces.append(watch.trace)
    return traces[0] == traces[1]


def _is_written_in_python(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


class _TokenWatch(EagerDispatchMode):
    """Watch of the operations of one run, which follows the tokens' dimension from tensor to tensor.

    Attributes:
        keeps_apart: whether every operation so far has kept tokens apart.
        trace: the operations, with what they were given beside tensors and sizes.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._dims: dict[int, int] = {}
        self._held: list[Tensor] = []  # so that no other tensor gets the id of a marked one
        self.keeps_apart = True
        self.trace: list[object] = []

    def mark(self, tensor: Tensor, dim: int) -> None:
        """Note that `tensor` holds tokens in `dim`, each by itself."""
        self._dims[id(tensor)] = dim
        self._held.append(tensor)

    def holds_tokens(self, tensor: Tensor) -> bool:
        """Return whether `tensor` was made of tokens, and holds each by itself."""
        return id(tensor) in self._dims

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        plain = [one for one in tree_flatten((args, kwargs))[0] if not isinstance(one, Tensor)]
        self.trace.append((packet, None if packet in _VIEWS else str(plain)))
        given = [one for one in tensors_among((args, kwargs)) if self.holds_tokens(one)]
        if given:
            made = list(tensors_among(result))
            self.keeps_apart &= self._keeps_apart(func, packet, args, kwargs, made)
            for one in made:
                dims = [dim for dim, size in enumerate(one.shape) if size == self._count]
                if len(dims) == 1:
                    self.mark(one, dims[0])
                elif one.numel():
                    self.keeps_apart = False
        return result

    def _keeps_apart(
        self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]
    ) -> bool:
        """Return whether an operation that is given tokens keeps them apart."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if packet in _VIEWS:
            return True
        if packet in _COPIES or torch.Tag.pointwise in func.tags:
            return self._are_aligned([*tensors_among((args, kwargs))], made)
        if packet in _MATRIX_PRODUCTS:
            rows: Tensor = args[_MATRIX_PRODUCTS[packet]]
            others = [one for one in tensors_among((args, kwargs)) if one is not rows]
            return self._dims.get(id(rows)) == 0 and self._count not in [n for one in others for n in one.shape]
        dim = self._dims.get(id(args[0]))
        normed: Sequence[int] = args[1] if packet in _NORMS else ()
        if dim is None or any(self.holds_tokens(one) for one in tensors_among((args[1:], kwargs))):
            return False
        rank: int = args[0].dim()
        if packet in _ALONG_DIM:
            along = args[1] if len(args) > 1 else kwargs.get("dim")
            return dim not in _dims_of(along, rank)
        if packet in _OVER_DIMS:
            place = 2 if packet is _aten.linalg_vector_norm else 1
            return dim not in _dims_of(args[place] if len(args) > place else kwargs.get("dim"), rank)
        if packet in _NORMS:
            return dim < rank - len(normed)
        return False

    def _are_aligned(self, operands: list[Tensor], made: list[Tensor]) -> bool:
        """Return whether all operands that hold tokens hold them at one place, where others have the same for all."""
        rank = max(one.dim() for one in (*operands, *made))
        places = {self._dims[id(one)] + rank - one.dim() for one in operands if self.holds_tokens(one)}
        if len(places) != 1:
            return False
        (place,) = places
        for one in operands:
            own = place - (rank - one.dim())
            if not self.holds_tokens(one) and own >= 0 and one.shape[own] != 1:
                return False
        return True


def _dims_of(dim: Any, rank: int) -> set[int]:
    """Return the dimensions that an operation names; None or empty: it takes all."""
    if dim is None or dim == []:
        return set(range(rank))
    return {one % rank for one in ([dim] if isinstance(dim, int) else dim)}
