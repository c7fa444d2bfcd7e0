"""The output of a model's head, not computed: what the program makes of it is computed in tiles of tokens.

    hidden states --head--> TokenTensor --float, view, / T, log_softmax--> TokenTensor --cross_entropy--> a plain tensor

A `TokenTensor` says which values each token has (an expression), and which token lies where (its places). Views along
tokens change the places, functions of a token's own values extend the expression. What reduces the values of each token (a
loss, a log-probability, the largest value) is computed at once, tile by tile, and its backward pass runs in the same tiles.

Everything else that the program does with it computes it whole, with the graph that it would have had, once: from then on
the tensor is what was computed. So nothing needs to be known of a function for its result to be right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from harmony_ds.errors import UnsupportedError
from harmony_ds.model.graph_cut import in_autograd_function
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.token_expression import (
    Applied,
    Beside,
    Expression,
    HeadCall,
    HeadOutput,
    Placed,
    TiledWork,
    compute_in_tiles,
    evaluate_here,
    evaluate_whole,
    stand_in_with_graph,
)
from harmony_ds.model.torch_functions import name_of

_METADATA = frozenset(
    "shape ndim dim size numel nbytes __len__ dtype device layout is_cuda is_cpu is_meta is_sparse is_quantized".split()
    + "is_floating_point is_complex element_size itemsize requires_grad is_leaf grad_fn stride is_contiguous names".split()
    + "__hash__ _is_view _version output_nr is_inference is_nested".split()
)
_SAME_HERE = frozenset("to float double half bfloat16 type type_as cpu cuda contiguous".split())
"""These return the tensor itself, where it is already as they make it."""
_VIEWS = frozenset(
    "view reshape flatten squeeze unsqueeze expand narrow select split chunk unbind transpose permute swapaxes".split()
    + "view_as reshape_as __getitem__ expand_as tensor_split unflatten movedim contiguous".split()
)
"""These say which tokens lie where, and leave the values of each as they are."""
_OF_VALUES = frozenset(
    "to float double half bfloat16 type type_as clone detach neg mul div add sub true_divide multiply divide".split()
    + "subtract pow square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p abs sign reciprocal tanh sigmoid relu".split()
    + "gelu silu softplus log_sigmoid logsigmoid hardtanh clamp clamp_min clamp_max clip where masked_fill".split()
    + "nan_to_num maximum minimum xlogy logaddexp lerp addcmul rsub positive erf sin cos softsign".split()
    + "__radd__ __rmul__ __rsub__ __rdiv__ __rtruediv__ __rpow__ __mul__ __truediv__ __add__ __sub__ __neg__".split()
    + "__pow__ __div__ eq ne gt ge lt le isnan isinf isfinite logical_not logical_and logical_or".split()
    + "__eq__ __ne__ __gt__ __ge__ __lt__ __le__".split()
)
"""Functions of each value, and of those at the same place in other operands."""
_ALONG_VALUES = frozenset("softmax log_softmax softmin normalize scatter scatter_add cumsum".split())
"""Functions of all values of a token, with as many results."""
_REDUCTIONS = frozenset(
    "logsumexp sum mean max min amax amin aminmax argmax argmin gather take_along_dim topk norm vector_norm".split()
    + "linalg_vector_norm std var std_mean var_mean median nansum nanmean count_nonzero any all prod kthvalue".split()
)
"""Functions of all values of a token, with few results."""
_ALSO_OF_ALL = frozenset("sum mean amax amin nansum any all".split())
"""Reductions that may go on over tokens, from what is left of each: reductions of reductions."""


class TokenTensor(torch.Tensor):
    """The output of a head, or what the program has made of it, that has not been computed.

    Attributes:
        head: the call whose output it is made of.
        expression: the values of each token.
        places: (tokens' shape), on the host: the place of the expression that lies at each place of the tensor.
        values_dim: the dimension that holds a token's values: the last, or 1 of three.
    """

    head: HeadCall
    expression: Expression
    places: Tensor
    values_dim: int
    _whole: Tensor | None
    _viewed: tuple[TokenTensor, Callable[[Tensor], Tensor]] | None
    _family: weakref.WeakSet[TokenTensor]  # that share its memory, once there is any
    _is_used: bool  # in something that is computed in tiles
    _entrance: Callable[[Tensor], Tensor] | None  # of gradients, which lives as long as what they may come to

    __hash__ = torch.Tensor.__hash__

    @staticmethod
    def of_head(head: HeadCall) -> TokenTensor | None:
        """Return the output of `head`; None: it is not made of one vector for each token."""
        expression = HeadOutput()
        places = torch.arange(head.token_shape.numel(), device="cpu").view(head.token_shape)
        work = TiledWork(head, expression, places.reshape(-1)[:1], has_graph=True)
        like = evaluate_here(work)
        return _make(head, expression, places, like) if like.is_floating_point() else None

    def enter_by(self, hook: Callable[[Tensor], Tensor]) -> None:
        """Let gradients that come to what the program makes of the head's output pass `hook`, a method.

        Nothing but what the program has of that output keeps the method's object alive.
        """
        self.head.entrance, self._entrance = weakref.WeakMethod(hook), hook

    @property
    def width(self) -> int:
        """How many values each token has."""
        return self.shape[self.values_dim]

    @property
    def is_computed(self) -> bool:
        """Whether all of it has been computed, as a plain tensor."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """Return all of it, with its graph, computed now if it has not been; it is what was computed from now on."""
        if self._whole is None:
            if self._viewed is None:
                self._whole = self._computed_apart()
            else:
                parent, view = self._viewed
                with torch.set_grad_enabled(self.requires_grad):
                    self._whole = view(parent.whole())
        return self._whole

    def value(self) -> Tensor:
        """Return its value, with its graph, to be read; of a view of some tokens alone, no others are computed."""
        if self.is_computed or self._viewed is None or self.places.numel() == self._viewed[0].places.numel():
            return self.whole()
        return self._computed_apart()

    def _computed_apart(self) -> Tensor:
        work = TiledWork(self.head, self.expression, self.places.reshape(-1), bool(self.requires_grad))
        with torch.set_grad_enabled(work.has_graph):
            made = evaluate_whole(work).reshape(*self.places.shape, self.width)
            return made if self.values_dim == self.places.dim() else made.movedim(-1, self.values_dim)

    def compute_all_views(self) -> None:
        """Compute it and all that shares its memory: it is about to be changed, or to lead its gradient elsewhere.

        Raises:
            UnsupportedError: gradients would pass it by.
        """
        for one in self._family:
            one.whole()

    def copy_to_host(self, host_type: str) -> Tensor:
        """Return a copy on the host, computed tile by tile; `host_type`: torch's device type of host memory."""
        if self.is_computed:
            return torch.empty(self.shape, dtype=self.dtype, device=host_type).copy_(self.whole().detach())
        made = torch.empty(self.numel(), dtype=self.dtype, device=host_type).view(-1, self.width)
        work = TiledWork(self.head, self.expression, self.places.reshape(-1), has_graph=False)
        with torch.no_grad(), self.head.holding_weights():
            for first, places in work.tiles():
                made.narrow(0, first, places.numel()).copy_(
                    TiledWork(self.head, self.expression, places, has_graph=False).compute(self.head.hidden)[0]
                )
        made = made.view(*self.places.shape, self.width)
        return made if self.values_dim == self.places.dim() else made.movedim(-1, self.values_dim)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `function` of it, which is one of each token's values by itself, and changes no shape."""
        if self.is_computed:
            return function(self.whole())
        made = _of_values(function, (self,), {})
        return function(self.whole()) if made is None else made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.is_computed:
            return repr(self.whole())
        return f"TokenTensor(of shape {tuple(self.shape)}, {self.dtype}, not computed)"

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _METADATA and not _first(args).is_computed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [one.whole() if isinstance(one, TokenTensor) and one.is_computed else one for one in leaves]
        args, kwargs = tree_unflatten(leaves, structure)
        waiting = [one for one in leaves if isinstance(one, TokenTensor)]
        if not waiting:
            return func(*args, **kwargs)
        # A Function of the program's own returns plain tensors, and hands the gradient of its argument to the stand-in.
        is_in_function = not torch.is_grad_enabled() and in_autograd_function()
        if kwargs.get("out") is None and not kwargs.get("inplace") and not is_in_function:
            made = _not_whole(name, func, args, kwargs, waiting)
            if made is not None:
                return made
        return _whole_now(name, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached by C++ code that never asked __torch_function__; gradients of its result come by `stand_in_with_graph`.
        leaves, structure = tree_flatten((args, kwargs or {}))
        with torch.no_grad():
            leaves = [one.whole().detach() if isinstance(one, TokenTensor) else one for one in leaves]
        args, kwargs = tree_unflatten(leaves, structure)
        return func(*args, **kwargs)


def _first(args: Sequence[Any]) -> TokenTensor:
    return next(one for one in args if isinstance(one, TokenTensor))


def _make(
    head: HeadCall,
    expression: Expression,
    places: Tensor,
    like: Tensor,
    values_dim: int | None = None,
    viewed: tuple[TokenTensor, Callable[[Tensor], Tensor]] | None = None,
) -> TokenTensor:
    """Return a token tensor whose tokens have as many values as `like`, of its dtype, and a gradient if it has one.

    Args:
        viewed: a tensor that it shares its memory with, and how it is made of that.
    """
    values = like.shape[-1]
    dim = places.dim() if values_dim is None else values_dim
    shape, strides = list(places.shape), [stride * values for stride in places.stride()]
    shape.insert(dim, values)
    strides.insert(dim, 1)
    has_graph = like.requires_grad and torch.is_grad_enabled()

    def stand_in() -> Tensor:
        return torch.Tensor._make_wrapper_subclass(
            TokenTensor, shape, strides=strides, dtype=like.dtype, device=head.hidden.device, requires_grad=False
        )

    if has_graph:
        made: Any = stand_in_with_graph(TiledWork(head, expression, places.reshape(-1), True), stand_in, dim)
    else:
        made = stand_in()
    made.head, made.expression, made.places, made.values_dim = head, expression, places, dim
    made._whole, made._viewed, made._is_used, made._entrance = None, viewed, False, head.entrance_hook()
    made._family = weakref.WeakSet() if viewed is None else viewed[0]._family
    made._family.add(made)
    token_tensor: TokenTensor = made
    return token_tensor


def _stand_in(one: TokenTensor) -> Tensor:
    """Return (1, W): what stands for the values of one token of `one`."""
    return torch.zeros(
        (1, one.width), dtype=one.dtype, device=one.head.hidden.device, requires_grad=bool(one.requires_grad)
    )


def _whole_now(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with all token tensors computed. What it writes into one in place is in all that share its memory."""
    leaves, structure = tree_flatten((args, kwargs))
    waiting = [one for one in leaves if isinstance(one, TokenTensor)]
    stays = _stays(name, kwargs)
    for one in waiting:
        one.head.computed_whole_for[name] = tuple(one.shape)
        if stays:
            continue
        if name in _OF_GRADIENTS and any(other._is_used for other in one._family):
            raise UnsupportedError(
                f"{name} of the output of the model's last layer, after a loss was made of it, which has been computed in "
                'tiles of tokens: its gradient never is there whole. Set "harmony": {"tokens": "off"}.'
            )
        one.compute_all_views()
    args, kwargs = tree_unflatten([one.value() if isinstance(one, TokenTensor) else one for one in leaves], structure)
    made = func(*args, **kwargs)
    return next((one for one in waiting if one._whole is made), made)  # what is written in place stays what it was


_OF_GRADIENTS = frozenset(["register_hook", "retain_grad", "register_post_accumulate_grad_hook"])


def _stays(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a function leaves its arguments as they are, values and graph."""
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name.startswith("__i") and name not in ("__iter__", "__invert__", "__index__", "__int__")
    return not (
        in_place or name in ("__setitem__", *_OF_GRADIENTS) or kwargs.get("out") is not None or kwargs.get("inplace")
    )


# ---- what is noted or computed in tiles


def _not_whole(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], waiting: Sequence[TokenTensor]
) -> Any:
    """Return the result of `func` as a token tensor, or computed in tiles; None: it needs all tokens at once."""
    loss = _LOSSES.get(name)
    if loss is not None:
        return loss(func, args, kwargs)
    one = waiting[0]
    if any(other.head is not one.head or other.values_dim != other.places.dim() for other in waiting):
        return _moved(name, one, args, kwargs) if len(waiting) == 1 else None
    if args and args[0] is one:
        if name in _SAME_HERE and (same := _same_here(name, one, args, kwargs)) is not None:
            return same
        if name in _VIEWS:
            return _viewed(name, func, one, args, kwargs)
        if name in _REDUCTIONS:
            return _reduced(name, func, one, args, kwargs)
        if name in _ALONG_VALUES:
            return _of_values(func, args, kwargs) if _dim_of(args, kwargs) in (-1, one.places.dim()) else None
    if name == "data":
        return _of_values(Tensor.detach, (one,), {})
    if name == "__iter__" and one.places.dim() > 1:
        return iter(one.unbind())
    return _of_values(func, args, kwargs) if name in _OF_VALUES else None


def _same_here(name: str, one: TokenTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenTensor | None:
    """Return `one`, if the function would return its argument itself; else None."""
    if name == "contiguous":
        return one if one.is_contiguous() and not kwargs else None
    if kwargs.get("copy") or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    dtype, device = _target(name, args[1:], kwargs)
    return one if dtype in (None, one.dtype) and device in (None, one.device) else None


_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def _target(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.dtype | None, torch.device | None]:
    """Return the dtype and the device that a conversion converts to; None: as they are."""
    if name in _CASTS:
        return _CASTS[name], None
    if name in ("cpu", "cuda"):
        return None, torch.empty(0, device="cpu" if name == "cpu" else (args[0] if args else "cuda")).device
    dtype, device = None, None
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            dtype, device = value.dtype, value.device
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (torch.device, str)):
            device = torch.empty(0, device=value).device
    return dtype, device


def _dim_of(args: tuple[Any, ...], kwargs: dict[str, Any], place: int = 1) -> Any:
    """Return the `dim` of a call; None: it has none."""
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    return dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim


# ---- views


def _viewed(name: str, func: Callable[..., Any], one: TokenTensor, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return what a view along tokens makes of `one`; None: it takes values of tokens apart."""
    if name == "__getitem__":
        return _taken(one, args[1])
    rank = one.places.dim()
    if name in ("transpose", "swapaxes", "permute", "movedim") and rank == 2:
        moved = _with_values_moved(name, one, args, kwargs)
        if moved is not None:
            return moved
    shown = [_without_memory(other) if isinstance(other, TokenTensor) else other for other in args]
    with _disable_current_modes():  # which count bytes, on the meta device, too
        like = func(*shown, **kwargs)  # raises what the tensor itself would, in the same words
    if any(part.dim() < 2 or part.shape[-1] != one.width for part in ([like] if isinstance(like, Tensor) else like)):
        return None
    shares = name != "contiguous" and all(part._is_view() for part in ([like] if isinstance(like, Tensor) else like))
    # Each value of the stand-in is the place of its token. A copy would be one of all values, so that none is made here.
    places = one.places if shares else one.places.contiguous()
    if name == "contiguous":
        return _at(one, places, None)
    stand_in = places[..., None].expand(*places.shape, one.width)
    made = func(stand_in, *shown[1:], **kwargs)
    parts = [made] if isinstance(made, Tensor) else list(made)
    if any(part.stride(-1) != 0 for part in parts):  # values of different tokens have changed places
        return None
    viewed: list[TokenTensor] = []
    for place, part in enumerate(parts):
        whole = isinstance(made, Tensor)

        def view(parent: Tensor, place: int = place, whole: bool = whole) -> Tensor:
            result: Any = func(parent, *args[1:], **kwargs)
            part: Tensor = result if whole else result[place]
            return part

        viewed.append(_at(one, part[..., 0], view if shares else None))
    return viewed[0] if isinstance(made, Tensor) else type(made)(viewed)


def _without_memory(one: TokenTensor) -> Tensor:
    """Return a tensor on the meta device with the shape and strides of `one`."""
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")


def _at(one: TokenTensor, places: Tensor, view: Callable[[Tensor], Tensor] | None) -> TokenTensor:
    """Return a tensor of the tokens of `one` at `places`; `view`: how it is made of the same memory, if it is."""
    return _make(one.head, one.expression, places, _stand_in(one), viewed=None if view is None else (one, view))


def _with_values_moved(name: str, one: TokenTensor, args: tuple[Any, ...], kwargs: Any) -> TokenTensor | None:
    """Return (B, V, S) of (B, S, V); None: something else is asked for."""
    if kwargs:
        return None
    dims = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    wanted = [dim % 3 for dim in dims if isinstance(dim, int)]
    permuted = name == "permute" and wanted == [0, 2, 1]
    swapped = name in ("transpose", "swapaxes") and sorted(wanted) == [1, 2]
    moved = name == "movedim" and wanted in ([1, 2], [2, 1])
    if not (permuted or swapped or moved):
        return None
    return _make(one.head, one.expression, one.places, _stand_in(one), 1, (one, lambda whole: whole.transpose(1, 2)))


def _moved(name: str, one: TokenTensor, args: tuple[Any, ...], kwargs: Any) -> TokenTensor | None:
    """Return (B, S, V) of (B, V, S), where that is asked for; else None."""
    if one.places.dim() != 2 or one.values_dim != 1 or kwargs or name not in ("transpose", "swapaxes", "permute"):
        return None
    wanted = [dim % 3 for dim in args[1:] if isinstance(dim, int)]
    if wanted != [0, 2, 1] and sorted(wanted) != [1, 2]:
        return None
    return _make(one.head, one.expression, one.places, _stand_in(one), 2, (one, lambda whole: whole.transpose(1, 2)))


def _taken(one: TokenTensor, items: Any) -> Any:
    """Return `one[items]`; None: it is to be computed whole."""
    rank, picked = one.places.dim(), items if isinstance(items, tuple) else (items,)
    if any(isinstance(item, TokenTensor) for item in picked):
        return None
    taken = sum(item.dim() if _is_mask(item) else item is not None and item is not Ellipsis for item in picked)
    fill = (slice(None),) * (rank + 1 - taken)
    dots = [place for place, item in enumerate(picked) if item is Ellipsis]
    at = dots[0] if dots else len(picked)
    picked = (*picked[:at], *fill, *picked[at + 1 :])
    if not picked or picked[-1] is None or _is_mask(picked[-1]):
        return None
    *of_tokens, of_values = (item.cpu() if isinstance(item, Tensor) else item for item in picked)
    if isinstance(of_values, slice) and of_values == slice(None):
        places = one.places[tuple(of_tokens)]
        if places.dim() == 0:
            return _at(one, places.reshape(1), None).whole()[0]
        basic = all(item is None or isinstance(item, (int, slice)) for item in of_tokens)
        return _at(one, places, (lambda whole: whole[items]) if basic else None)
    if any(isinstance(item, (Tensor, list)) for item in of_tokens):
        return _values_at(one, of_tokens, picked[-1])
    tokens = one if all(item == slice(None) for item in of_tokens) else _taken(one, (*of_tokens, slice(None)))
    if not isinstance(tokens, TokenTensor):
        return None
    item = picked[-1]
    if isinstance(item, slice):
        return _of_values(_value_slice(item), (tokens,), {})
    if isinstance(item, Tensor) and item.dim() > 1:
        return None
    return _computed(_value_picker(item), (tokens,), {})


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _value_slice(item: slice) -> Callable[[Tensor], Tensor]:
    def sliced(values: Tensor) -> Tensor:
        return values[..., item]

    return sliced


def _value_picker(item: Any) -> Callable[[Tensor], Tensor]:
    def picked(values: Tensor) -> Tensor:
        return values[..., item]

    return picked


def _values_at(one: TokenTensor, of_tokens: Sequence[Any], of_values: Any) -> Any:
    """Return `one[tokens, values]` for tensors of both: one value of each of the tokens; None: otherwise."""
    if not all(isinstance(item, (Tensor, list)) and not _is_mask(item) for item in (*of_tokens, of_values)):
        return None
    tokens = [torch.as_tensor(item) for item in of_tokens]
    values = torch.as_tensor(of_values, device=one.device)
    shape = torch.broadcast_shapes(values.shape, *(item.shape for item in tokens))
    if not shape:
        return None
    places = one.places[tuple(item.expand(shape) for item in tokens)]
    made = _reduced("gather", torch.gather, _at(one, places, None), (None, -1, values.expand(shape)[..., None]), {})
    return None if made is None else made.squeeze(-1)


# ---- functions of values


def _operand(value: Any, token_shape: torch.Size) -> Any:
    """Return what stands for an argument of a function of `token_shape` tokens; None: it does not go with them.

    What is no tensor stands for itself.
    """
    rank = len(token_shape)
    if isinstance(value, TokenTensor):
        if value.values_dim != value.places.dim() or value.places.dim() > rank:
            return None
        value._is_used = True
        return Placed(value.expression, value.places.expand(token_shape))
    if not isinstance(value, Tensor):
        return value
    if value.dim() > rank + 1:
        return None
    if value.dim() <= 1 or value.shape[:-1].numel() == 1:
        return Beside(value, None)
    try:
        value.expand(*token_shape, value.shape[-1])
    except RuntimeError:
        return None
    return Beside(value, token_shape)


def _applied(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Noted | None:
    """Return the expression of `function` of these arguments, and what it makes of one token; None: there is none."""
    leaves, structure = tree_flatten((args, kwargs))
    own = [one for one in leaves if isinstance(one, TokenTensor)]
    try:
        token_shape = torch.broadcast_shapes(*(one.places.shape for one in own))
    except RuntimeError:
        return None
    operands = [leaf if leaf is None else _operand(leaf, token_shape) for leaf in leaves]
    if any(operand is None and leaf is not None for operand, leaf in zip(operands, leaves, strict=True)):
        return None
    autocast = Autocast.current(own[0].device.type)
    rank = len(token_shape)
    expression = Applied(function, operands, structure, rank, torch.is_grad_enabled(), autocast)
    values_of_one = _values_of_one_token(operands, leaves, rank)
    try:
        made = expression.call(values_of_one)
    except Exception:  # noqa: BLE001 - what the arguments themselves raise is raised when it is computed whole
        return None
    for result in made if isinstance(made, tuple) else (made,):
        if not isinstance(result, Tensor) or tuple(result.shape[:rank]) != (1,) * rank:
            return None
    return _Noted(expression, token_shape, made, own[0].head)


def _values_of_one_token(operands: Sequence[Any], leaves: Sequence[Any], rank: int) -> Callable[[Any], Any]:
    """Return a function from an operand to what stands in for it where there is one token, in `rank` dimensions of 1.

    Args:
        operands: of an expression.
        leaves: the arguments that these are made of.
    """
    of_own = {
        operand: _stand_in(leaf)
        for operand, leaf in zip(operands, leaves, strict=True)
        if isinstance(leaf, TokenTensor)
    }

    def values_of(operand: Any) -> Any:
        if isinstance(operand, Placed):
            values = of_own[operand]
        elif isinstance(operand, Beside) and operand.token_shape is not None:
            value = operand.value
            values = value.new_zeros((1, value.shape[-1])).requires_grad_(value.requires_grad)
        else:
            return operand.value if isinstance(operand, Beside) else operand
        return values.view(*[1] * (rank - 1), *values.shape)

    return values_of


class _Noted:
    """A function that was noted, with what it makes of one token."""

    __slots__ = ("expression", "head", "made", "token_shape")

    def __init__(self, expression: Applied, token_shape: torch.Size, made: Any, head: HeadCall) -> None:
        self.expression, self.token_shape, self.made, self.head = expression, token_shape, made, head

    @property
    def places(self) -> Tensor:
        return torch.arange(self.token_shape.numel(), device="cpu")

    def not_computed(self) -> TokenTensor | None:
        """Return its result as a token tensor; None: it is no vector of values for each token."""
        rank = len(self.token_shape)
        if not isinstance(self.made, Tensor) or self.made.dim() != rank + 1:
            return None
        return _make(self.head, self.expression, self.places.view(self.token_shape), self.made)

    def computed(self) -> Any:
        """Return its results, computed in tiles."""
        several = self.made if isinstance(self.made, tuple) else (self.made,)
        has_graph = torch.is_grad_enabled() and any(one.requires_grad for one in several)
        work = TiledWork(self.head, self.expression, self.places, has_graph)
        results = [one.view(*self.token_shape, *one.shape[1:]) for one in compute_in_tiles(work)]
        if isinstance(self.made, Tensor):
            return results[0]
        # torch's named results take a sequence, Python's own named tuples take each by itself.
        return self.made._make(results) if hasattr(self.made, "_make") else type(self.made)(results)


def _of_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> TokenTensor | None:
    """Return what `func` makes of each token's values, not computed; None: that cannot be said."""
    noted = _applied(func, args, kwargs)
    return None if noted is None else noted.not_computed()


def _computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return what `func` leaves of each token's values, computed in tiles; None: that cannot be said."""
    noted = _applied(func, args, kwargs)
    return None if noted is None else noted.computed()


def _reduced(name: str, func: Callable[..., Any], one: TokenTensor, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return what a reduction leaves of each token's values, or of all tokens; None: it needs all tokens at once."""
    rank = one.places.dim()
    args = (one, *args[1:])
    dim = _dim_of(args, kwargs, 2 if name in ("topk", "kthvalue", "norm", "vector_norm") else 1)
    if name in ("topk", "kthvalue") and dim is None:
        dim = -1
    if isinstance(dim, int) and dim in (-1, rank):
        return _computed(func, args, kwargs)
    dims = range(rank + 1) if dim is None else dim
    if name not in _ALSO_OF_ALL or not isinstance(dims, (tuple, list, range)):
        return None
    dims = sorted(one_dim % (rank + 1) for one_dim in dims)
    if dims[-1:] != [rank] or kwargs.get("keepdim") or any(isinstance(arg, (Tensor, bool)) for arg in args[1:]):
        return None
    options = {key: value for key, value in kwargs.items() if key not in ("dim", "axis", "keepdim")}
    left = _computed(func, (one,), {"dim": -1, **options})
    return left if left is None or len(dims) == 1 else func(left, dim=tuple(dims[:-1]), **options)


# ---- losses

_CLASS_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _class_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a cross-entropy, or a negative log-likelihood, of classes or of their probabilities."""
    given = dict(zip(_CLASS_LOSS, args, strict=False)) | kwargs
    one, target, weight = given.pop("input", None), given.pop("target", None), given.pop("weight", None)
    reduction = given.pop("reduction", "mean")
    old = given.pop("size_average", None), given.pop("reduce", None)
    if not isinstance(one, TokenTensor) or old != (None, None) or reduction not in ("none", "sum", "mean"):
        return None
    rank = one.places.dim()
    if one.values_dim != 1 and rank != 1:  # torch takes classes in dimension 1
        return None
    if isinstance(weight, TokenTensor) or not isinstance(target, Tensor):
        return None
    has_classes = not target.is_floating_point()
    flat = _at(one, one.places.reshape(-1), None)
    if has_classes:
        if target.shape != one.places.shape:
            return None
        wanted: Any = target.reshape(-1, 1)
    else:
        if target.shape != one.shape or (isinstance(target, TokenTensor) and target.values_dim != one.values_dim):
            return None
        wanted = _flattened(target, one.values_dim)

    def of_tile(values: Tensor, wanted: Tensor, weight: Tensor | None) -> Tensor:
        loss: Tensor = func(values, wanted[:, 0] if has_classes else wanted, weight, reduction="none", **given)
        return loss

    each = _computed(of_tile, (flat, wanted, weight), {})
    if each is None or reduction == "none":
        return None if each is None else each.view(one.places.shape)
    total = each.sum()
    if reduction == "sum":
        return total
    if not has_classes:
        return total / each.numel()
    return total / _weight_of_classes(target.reshape(-1), weight, given.get("ignore_index", -100))


def _weight_of_classes(classes: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Return what a mean over `classes` divides by: the sum of their weights, or their number, without the `ignored`."""
    counted = classes != ignored
    if weight is None:
        return counted.sum()
    return weight[classes * counted].mul(counted).sum()


def _flattened(target: Tensor, values_dim: int) -> Tensor:
    """Return (tokens, V) of a tensor with the values of tokens in a dimension."""
    if isinstance(target, TokenTensor):
        return _at(target, target.places.reshape(-1), None)
    target = target.movedim(values_dim, -1)
    return target.reshape(-1, target.shape[-1])


def _value_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a loss that is a sum over all values, such as a divergence from a teacher's probabilities."""
    args, kwargs = tuple(args), dict(kwargs)
    if len(args) > 2 or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return None
    reduction = kwargs.pop("reduction", "mean")
    if reduction not in ("none", "sum", "mean", "batchmean"):
        return None
    if reduction == "none":
        noted = _applied(func, args, {**kwargs, "reduction": "none"})
        return None if noted is None else noted.not_computed()

    def of_tile(*given: Any, **options: Any) -> Tensor:
        loss: Tensor = func(*given, **options, reduction="none")
        return loss.sum(-1)

    noted = _applied(of_tile, args, kwargs)
    if noted is None:
        return None
    total = noted.computed().sum()
    if reduction == "sum":
        return total
    one = _first((*args, *kwargs.values()))
    return total / (noted.token_shape[0] if reduction == "batchmean" else noted.token_shape.numel() * one.width)


_LOSSES: dict[str, Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = {
    "cross_entropy": _class_loss,
    "nll_loss": _class_loss,
    "kl_div": _value_loss,
    "mse_loss": _value_loss,
    "l1_loss": _value_loss,
    "smooth_l1_loss": _value_loss,
    "huber_loss": _value_loss,
    "binary_cross_entropy": _value_loss,
    "binary_cross_entropy_with_logits": _value_loss,
}


def is_not_computed(tensor: Tensor) -> bool:
    """Return whether `tensor` is a token tensor that has no memory."""
    return isinstance(tensor, TokenTensor) and not tensor.is_computed
