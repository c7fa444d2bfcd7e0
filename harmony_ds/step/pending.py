"""Tensors that have not been computed yet, so that a loop that hands over micro-batches one by one is still grouped.

The outputs of a queued call are pending, and so is what is made of them: arithmetic, views, losses (`_LAZY`). `backward` is
noted. Everything else looks at the value, and looking computes it at once: `item`, `float(...)`, `if loss > 5`, formatting,
collectives, writing in place where another tensor may share the memory, adding in place to a plain tensor.

    outputs of the model ──read──> Node ──function──> Node ──> ...       when the group runs: `Evaluation`
                                    ↑                  ↑               when the program looks: `Node.materialize`
                              PendingTensor      PendingTensor          what the program holds
"""

from __future__ import annotations

import enum
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten

from harmony_ds.errors import BatchError, UnsupportedError, UsageError
from harmony_ds.model.graph_cut import in_autograd_function, next_nodes, reachable_nodes, targets_of
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.torch_functions import name_of

_VIEWS = frozenset(
    "to float double half bfloat16 cpu type_as detach data contiguous view view_as reshape reshape_as flatten".split()
    + "unflatten permute transpose t T mT squeeze unsqueeze expand expand_as select __getitem__ split chunk unbind".split()
    + "swapaxes movedim narrow diagonal unfold".split()
)
"""Functions whose results may share memory with their operand."""
_ADDITIVE = _VIEWS.union("add sub neg clone mean sum stack cat __rsub__".split())
_LAZY = _ADDITIVE.union(
    "mul div exp __rdiv__ pow square sqrt rsqrt abs log log1p sigmoid tanh relu gelu silu clamp clamp_min where".split(),
    "maximum minimum max min amax amin masked_fill softmax log_softmax log_sigmoid softplus logsumexp norm".split(),
    "normalize cosine_similarity matmul mm bmm linear einsum gather index_select cumsum var std diag".split(),
    "cross_entropy nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss".split(),
    "binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss margin_ranking_loss".split(),
    "cosine_embedding_loss hinge_embedding_loss triplet_margin_loss soft_margin_loss multi_margin_loss".split(),
    "multilabel_margin_loss multilabel_soft_margin_loss gaussian_nll_loss pairwise_distance cdist interpolate pad".split(),
    "gt ge lt le eq ne isnan isinf isfinite logical_and logical_or logical_not".split(),
    "roll repeat repeat_interleave cos sin cosh erf logaddexp nan_to_num diff tril triu adaptive_avg_pool1d".split(),
    "argmax argmin argsort sort topk kthvalue median nanmedian mode aminmax msort all any count_nonzero isin".split(),
    "vector_norm matrix_norm dist prod cumprod cummax cummin quantile nanmean nansum std_mean var_mean".split(),
    "long int short char byte bool type floor ceil round trunc frac sign neg sgn flip fmod remainder".split(),
    "floor_divide true_divide rsub lerp addmm addcmul addcdiv dot outer baddbmm mv expm1 log2 log10 exp2".split(),
    "logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ __invert__ isclose".split(),
    "positive absolute multiply subtract divide negative greater greater_equal less less_equal not_equal".split(),
    "take take_along_dim one_hot layer_norm rms_norm hardtanh elu selu leaky_relu relu6 mish".split(),
    "tan asin acos atan atan2 sinh asinh acosh atanh softsign logit erfc heaviside xlogy hypot trace".split(),
    "__eq__ __ne__ __floordiv__ __rfloordiv__ __rpow__ isfinite linalg_vector_norm linalg_norm linalg_matrix_norm".split(),
    "scatter scatter_add index_add index_fill index_copy masked_scatter tensor_split hsplit vsplit ravel".split(),
)
"""Functions that may run later: they draw no random numbers, and write nothing."""
_LIKE = frozenset("zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full".split())
"""Functions that read nothing of their operand but what is known."""
_ENTRANCE = "harmony_ds: an output as the program was given it"
"""Key in the metadata of its node in autograd's graph."""
_MOST_PARTS = 16
"""Results of one function that may wait; where there are more (rows of a batch), they are computed at once."""
_SHAPE = frozenset("shape ndim dim size numel nbytes __len__".split())
_DTYPE = frozenset("dtype is_floating_point is_complex element_size nbytes".split())
_METADATA = _SHAPE | _DTYPE | frozenset("device layout is_cuda is_cpu is_meta is_sparse is_quantized".split())


class OutputsGiven(enum.Enum):
    """What the engine gave its caller as a micro-batch's outputs."""

    NONE = "none: the call has not returned, or the engine itself propagates back from its loss, as in train_batch()"
    REAL = "the outputs, for which its forward pass ran"
    STAND_INS = "stand-ins, which are computed when the group runs"
    ON_TRIAL = "stand-ins, and the outputs once one with dimensions is asked for: it is to show what its loss uses"


class Source(Protocol):
    """A queued micro-batch, as far as tensors that are computed from its outputs need to know it."""

    nodes: weakref.WeakSet[Node]
    """All that is made of its outputs."""

    def outputs(self) -> Any:
        """Return the model's outputs, with their graph; computed now if need be."""

    @property
    def has_run(self) -> bool:
        """Whether its forward pass has run."""

    outputs_given: OutputsGiven
    """What its caller was given as its outputs."""
    stand_ins: Callable[[], object | None]
    """Weak reference to the maker of stand-ins for parts of its outputs, where its caller was given such."""
    is_of_outputs: bool
    """Whether the program propagates back now from a loss that is made of outputs alone."""
    joins_other_graphs: bool
    """Whether the program has joined its outputs to a tensor with a graph of layers that is no output."""

    @property
    def evaluates(self) -> bool:
        """Whether the model was in evaluation mode when it was called."""

    def check_not_propagated(self) -> None:
        """Raise UsageError if its backward pass is over."""

    def share_loss(self, sources: Sequence[Source]) -> bool:
        """Propagate back together with `sources`, from a loss of all their outputs; False: they cannot run together."""

    def note_backward(self, node: Node) -> None:
        """Let the group propagate back from `node`, to this source and those that share its loss, when it runs."""


@dataclass(eq=False)
class Node:
    """How to compute a tensor later: as an output of a queued micro-batch, or by a function of other nodes.

    Attributes:
        sources: the micro-batches that it depends on.
        shape: as far as calls of the same form tell.
        read: of an output: from all outputs to it.
        function, operands: of others: nodes, tensors and anything else, flat.
        is_separable: each source can propagate a part of its own, since it is a sum of parts.
        divisors: what the program has divided it by.
        shape_was_read, dtype_was_read: the program knows it.
        value: with its graph if the program has looked, else what is kept of it; what is written into it stays.
        was_propagated: the program has propagated back from it, without retaining the graph.
        owner: the tensor that the program has, or had.
        memory: the same for tensors that may share theirs.
        number: in the order that nodes are made in; gradients add up in the same bits only if functions run in it.
    """

    sources: tuple[Source, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = True
    read: Callable[[Any], Tensor] | None = None
    function: Callable[[Iterable[Any]], Tensor] | None = None
    operands: Sequence[Any] = ()
    is_separable: bool = True
    divisors: frozenset[float] = frozenset()
    shape_was_read: bool = False
    dtype_was_read: bool = False
    value: Tensor | None = None
    was_propagated: bool = False
    owner: Callable[[], PendingTensor | None] = lambda: None
    memory: object = field(default_factory=object)
    number: int = field(default_factory=itertools.count().__next__)

    def check_not_propagated(self) -> None:
        """Raise UsageError if the step is over, or autograd would miss the graph, which a first backward pass has freed."""
        for source in self.sources:
            source.check_not_propagated()
        if self.was_propagated:
            raise UsageError(
                "Trying to backward through the graph a second time: backward() of this loss was called before, and its "
                "gradients would count twice. Call it once, or with retain_graph=True the first time."
            )

    @property
    def is_available(self) -> bool:
        """Whether its value is known, or can be had without a forward pass."""
        return self.value is not None or all(source.has_run for source in self.sources)

    def materialize(self) -> Tensor:
        """Return its value, computed now if need be."""
        with torch.inference_mode(False), torch.enable_grad():  # though the reader may want no gradient now
            evaluation = Evaluation(Node._known_value_now)
            value = evaluation.value_of(self)
        for node, one in evaluation.values.items():
            node.value = one
        return value

    def _known_value_now(self) -> Tensor | None:
        if self.value is not None:
            return self.value.to(self.device)  # large ones are kept on the host
        value = None if self.read is None else self.read(self.sources[0].outputs())
        return value if value is None or value.ndim else value.clone()  # the step's own loss stays as it is

    def dependencies(self, known: Callable[[Node], bool]) -> list[Node]:
        """Return it and all that it is made of, in the program's order, but for nodes that are `known`."""
        found, waiting = set(), [self]
        while waiting:
            node = waiting.pop()
            if node not in found and not known(node):
                found.add(node)
                waiting += [one for one in node.operands if isinstance(one, Node)]
        return sorted(found, key=lambda node: node.number)

    def evaluate(self, values: Mapping[Node, Tensor], detached: bool) -> Tensor:
        """Return what its function makes of its operands' values; `detached`: no gradient leads to the program's own."""
        assert self.function is not None
        given = [one.detach() if detached and isinstance(one, Tensor) else one for one in self.operands]
        value = self.function([values[one] if isinstance(one, Node) else one for one in given])
        return value if self.requires_grad else value.detach()


class Evaluation:
    """Values of nodes, each computed once. `given`: the values that are known; `detached`: see `Node.evaluate`."""

    def __init__(self, given: Callable[[Node], Tensor | None], detached: bool = False) -> None:
        self._known_value, self._detached = given, detached
        self.values: dict[Node, Tensor] = {}

    def value_of(self, node: Node) -> Tensor:
        """Return the value of `node`; raise BatchError if it has not the shape that the program was told."""
        for one in node.dependencies(self._is_known):
            self._put(one, one.evaluate(self.values, self._detached))
        return self.values[node]

    def _is_known(self, node: Node) -> bool:
        value = None if node in self.values else self._known_value(node)
        if value is not None:
            self._put(node, value)
        return node in self.values

    def _put(self, node: Node, value: Tensor) -> None:
        if node.shape_was_read and value.shape != node.shape:
            raise BatchError(
                f"the program was told the shape {tuple(node.shape)} of an output, or of what it made of one, as calls "
                f"with arguments of the same shapes had given, and now it is {tuple(value.shape)}. Read a value of the "
                "output before its shape, so that it is computed at once, or let the model compute the loss."
            )
        if node.dtype_was_read and value.dtype != node.dtype:
            raise BatchError(
                f"the program was told that an output, or what it made of one, is {node.dtype}, as calls of the same form "
                f"had given, and now it is {value.dtype}. Read a value of the output before its dtype, so that it is "
                "computed at once, or let the model compute the loss."
            )
        self.values[node] = value


class PendingTensor(torch.Tensor):
    """Stand-in for a tensor that is computed when the group runs, or when somebody looks."""

    node: Node
    requires_grad: bool = True

    @staticmethod
    @_disable_dynamo
    def __new__(cls, node: Node) -> PendingTensor:
        made: PendingTensor = torch.Tensor._make_wrapper_subclass(
            cls, node.shape, dtype=node.dtype, device=node.device, requires_grad=node.requires_grad
        )
        made.node, made.requires_grad = node, node.requires_grad
        node.owner = weakref.ref(made)
        if node.requires_grad:  # code that bypasses Python's functions (autograd.Function) propagates back to it
            now = vars(made)
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(lambda gradient: now["node"].materialize().backward(gradient))  # type: ignore[no-untyped-call]
        for source in node.sources:
            source.nodes.add(node)
        return made

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Note that the group has to propagate back from it; what is known already is propagated at once."""
        node = self.node
        node.check_not_propagated()
        if any(args[3:]) or kwargs.get("inputs") is not None:
            raise UnsupportedError(
                "backward(inputs=...) of what an engine computes: all parameters get their gradients when the group runs. "
                "Freeze those that shall get none (requires_grad_(False)) before backward()."
            )
        plain = not args and not any(kwargs.values()) and node.shape.numel() == 1 and node.requires_grad
        waits = plain and not any(source.has_run for source in node.sources)
        if waits and (node.is_separable or node.sources[0].share_loss(node.sources)):
            for source in node.sources:
                source.note_backward(node)
            node.was_propagated = True
        else:
            loss = node.materialize()
            for source in node.sources:
                source.is_of_outputs = True
            try:
                loss.backward(*args, **kwargs)
            finally:
                for source in node.sources:
                    source.is_of_outputs = False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        waiting = f"PendingTensor(of shape {tuple(self.node.shape)}, not computed yet)"
        return repr(self.node.materialize()) if self.node.is_available else waiting

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _METADATA:
            node = (args[0] if args else next(iter(kwargs.values()))).node
            node.shape_was_read |= name in _SHAPE
            node.dtype_was_read |= name in _DTYPE
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _LIKE and args and isinstance(args[0], PendingTensor):
            node, args[0].node.shape_was_read = args[0].node, True
            return func(torch.empty((), dtype=node.dtype, device=node.device).expand(node.shape), *args[1:], **kwargs)
        if func is torch.autograd.grad:
            raise UnsupportedError(
                "torch.autograd.grad of what an engine computes, outside autograd's graph: call engine.backward(loss) and "
                "read .grad, of parameters or inputs. For a penalty on gradients engine.module(...) computes at once."
            )
        later = None
        if kwargs.get("out") is None and not kwargs.get("inplace"):
            later = _defer(name, func, args, kwargs) if name in _LAZY else _defer_write(name, args, kwargs)
        return _compute_now(func, args, kwargs) if later is None else later

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached by C++ code that never asked __torch_function__.
        return _compute_now(func, args, kwargs or {})


def _compute_now(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    pending = [one for one in leaves if isinstance(one, PendingTensor)]
    # With all that was made so far: what is written from here on must reach that by views alone.
    held: list[Node] = []
    for one in pending:
        for source in one.node.sources:
            held += [node for node in source.nodes if node.owner() is not None]
    for node in held:
        node.materialize()
    args, kwargs = tree_unflatten(
        [one.node.materialize() if isinstance(one, PendingTensor) else one for one in leaves], spec
    )
    made = func(*args, **kwargs)
    return next((one for one in pending if one.node.value is made), made)  # what is written in place stays what it was


def _defer_write(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingTensor | None:
    """Let the first operand be what it is after `name`; None: now, since another tensor may share its memory."""
    if name[:-1] not in _LAZY or not args or not isinstance(args[0], PendingTensor):
        return None
    tensor, node = args[0], args[0].node
    held = {one for source in node.sources for one in source.nodes if one.owner() is not None} - {node}
    may_be_aliased = bool(node.shape and node.read is not None) or any(one.memory is node.memory for one in held)
    later = None if may_be_aliased else _defer(name[:-1], getattr(Tensor, name[:-1]), args, kwargs)
    made = later.node if isinstance(later, PendingTensor) else node
    alike = (made.shape, made.dtype) == (node.shape, node.dtype) and made.requires_grad >= tensor.requires_grad
    if made is node or not alike:
        return None
    tensor.node, tensor.requires_grad = made, made.requires_grad
    node.owner, made.owner = made.owner, node.owner
    return tensor


def _defer(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `func` will return; None if it cannot wait: an operand leads gradients elsewhere, values decide, or an
    `autograd.Function` is at work, which returns real tensors.
    """
    if name == "__getitem__":
        args = args[0], _index_without_masks(args[1])
    leaves, spec = tree_flatten((args, kwargs))
    operands = [_copied_operand(leaf) for leaf in leaves]
    nodes = [one for one in operands if isinstance(one, Node)]
    others = [one for one in operands if isinstance(one, Tensor)]
    grad = torch.is_grad_enabled()
    elsewhere = [other for other in others if other.requires_grad and _leads_elsewhere(other)]
    if any(map(_reaches_layers, elsewhere)):
        _note_other_graphs(nodes)
    if not nodes or elsewhere or (not grad and in_autograd_function()):
        return None
    autocast = Autocast.current(nodes[0].device.type)

    def function(operands: Iterable[Any]) -> Any:
        args, kwargs = tree_unflatten(operands, spec)
        with torch.inference_mode(False), torch.set_grad_enabled(grad), Autocast.entered(autocast):
            return func(*args, **kwargs)

    like = _predicted_result(function, operands)
    if isinstance(like, (tuple, list)) and len(like) <= _MOST_PARTS:
        for node in nodes:  # their shapes say how many parts there are
            node.shape_was_read = True
        return _defer_parts(name, func, args, kwargs, like)
    if not isinstance(like, Tensor):
        return None
    loses_gradient = not like.requires_grad and name != "detach" and any(node.requires_grad for node in nodes)
    if loses_gradient and any(source.evaluates for node in nodes for source in node.sources):
        return None  # predictions of an evaluation without no_grad, which may be read when its engine is gone
    sources = tuple(dict.fromkeys(source for one in nodes for source in one.sources))
    made = Node(sources, like.shape, like.dtype, like.device, like.requires_grad, function=function, operands=operands)
    made.is_separable = len(sources) == 1 or _adds_parts(name, operands, nodes, others)
    divided_by = operands[-1:] if name == "div" and not others else ()
    made.divisors = frozenset(divided_by).union(*(one.divisors for one in nodes))
    if name in _VIEWS:
        made.memory = nodes[0].memory
    return PendingTensor(made)


def _index_without_masks(index: Any) -> tuple[Any, ...]:
    """Return an index with the places that its masks have: a mask does not show how many there are."""
    found: list[Any] = []
    for one in index if isinstance(index, tuple) else (index,):
        if type(one) is Tensor and one.dtype is torch.bool and one.ndim > 0:
            found += one.nonzero(as_tuple=True)  # as torch does, too
        else:
            found.append(one)
    return tuple(found)


def _note_other_graphs(nodes: Sequence[Node]) -> None:
    """Note that the program joins to `nodes` a tensor with a graph of layers, which it was not given as an output.

    Raises:
        BatchError: some of `nodes` are not computed, so that the tensor may be of another forward pass.
    """
    for node in nodes:
        for source in node.sources:
            source.joins_other_graphs = True
    if not all(node.is_available for node in nodes):
        raise BatchError(
            "a loss is made of outputs that have not been computed, and of a tensor that an earlier forward pass has left "
            "elsewhere (an attribute of a module, or what a hook has kept). Let the model return that tensor; or read a "
            "value of the outputs first (loss.item()): then forward has run, and has left the one of this call."
        )


def _defer_parts(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], like: Sequence[Any]
) -> Any:
    """Return the several results of `func`, which runs once for each; None: one cannot wait. `like`: stand-ins of them."""
    parts = []
    for place in range(len(like)):
        part = _defer(name, functools.partial(_part, func, place), args, kwargs)
        if part is None:
            return None
        parts.append(part)
    return type(like)(parts)  # type: ignore[call-arg]


def _adds_parts(name: str, operands: Sequence[Any], nodes: Sequence[Node], others: Sequence[Tensor]) -> bool:
    """Return whether the gradient of each micro-batch's part of the result is known without the other micro-batches."""
    if any(other.requires_grad for other in others) or not all(node.is_separable for node in nodes):
        return False
    scales = name in ("mul", "div") and len(nodes) == 1 and operands[0] is nodes[0]
    return scales or name in _ADDITIVE


def _part(func: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> Any:
    """Return one of several results of `func`, which runs once for each of them."""
    return func(*args, **kwargs)[place]


def _predicted_result(function: Callable[[Iterable[Any]], Any], operands: Sequence[Any]) -> Any:
    """Return what shows the shape and dtype of `function`'s result; None: it needs values, or fails."""
    without_values: Any = nullcontext()
    if any(one.shape for one in operands if isinstance(one, (Node, Tensor))):
        from torch._subclasses.fake_tensor import FakeTensorMode  # which imports the compiler

        without_values = FakeTensorMode()
    try:
        with without_values:
            return function(map(_stand_in, operands))
    except Exception:  # noqa: BLE001 - the program's own, too: the values will raise it
        return None


def _leads_elsewhere(tensor: Tensor) -> bool:
    """Return whether its gradients go to anything but parameters of an engine, which keep them for the step."""
    reached = reachable_nodes([tensor.grad_fn])
    ends = all(node in reached for one in reached for node in next_nodes(one))  # in no layer's output
    own = all(hasattr(node.variable, "_hp_mapping") for node in reached if hasattr(node, "variable"))
    return not (reached and ends and own)


def mark_entrance(node: Any) -> None:
    """Note in autograd's graph that a program was given the output that `node` makes."""
    node.metadata[_ENTRANCE] = True


def is_entrance(node: Any) -> bool:
    return _ENTRANCE in node.metadata


def _reaches_layers(tensor: Tensor) -> bool:
    """Return whether gradients of `tensor` reach layers otherwise than by outputs that the program was given."""
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or is_entrance(node):
            continue
        if targets_of(node) is not None:
            return True
        seen.add(node)
        waiting += next_nodes(node)
    return False


def _copied_operand(operand: Any) -> Any:
    """Return an operand as it is now: a tensor or an array may be written into before its micro-batch runs."""
    if isinstance(operand, PendingTensor):
        is_on_trial = any(source.outputs_given is OutputsGiven.ON_TRIAL for source in operand.node.sources)
        return operand.node.materialize() if operand.node.is_available and not is_on_trial else operand.node
    operand = operand.copy() if isinstance(operand, np.ndarray) else operand
    return operand.clone() if isinstance(operand, Tensor) else operand


def _stand_in(operand: Any) -> Any:
    """Return a tensor that shows what a result will look like."""
    if not isinstance(operand, (Node, Tensor)):
        return operand
    return torch.zeros(operand.shape, dtype=operand.dtype, device=operand.device, requires_grad=operand.requires_grad)
