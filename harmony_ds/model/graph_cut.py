"""Cuts of the autograd graph at layer calls, and how gradients are carried across them.

    layer call k            |   inter-layer operations   |          layer call k+1
    ... -> output  ==cut==> CutNode ->  ... -> input  ==cut==> CutNode -> recomputed layer -> ...

A cut node is an autograd node whose outputs are fresh tensors over given memory. When a backward pass reaches it, it
hands each output's gradient to a `GradientTarget` and stops. Cut nodes stand on both sides of a layer call: in the
micro-batch's own graph their targets collect the gradients of the layer's outputs; at the inputs of a recomputed layer
they pass the inputs' gradients on to where those came from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from harmony_ds.errors import HarmonyError, ModelError, UnsupportedError
from harmony_ds.model.intercept import is_between_layers
from harmony_ds.model.targets import GradientTarget
from harmony_ds.model.untouched import is_for_measuring


class _CutNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: Sequence[Tensor], targets: Sequence[GradientTarget]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.harmony_targets = targets
        ctx.harmony_made_for = is_for_measuring()
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward with create_graph=True through a model that an engine trains, whose layers are propagated "
                "through one by one, without a graph of their gradients. Gradient penalties need a plain model."
            )
        if is_between_layers():
            raise UnsupportedError(_BACK_IN_FORWARD)
        if is_for_measuring() is not ctx.harmony_made_for:  # a loss that is measured leads to another engine
            return None, None, None
        for target, gradient in zip(ctx.harmony_targets, gradients, strict=True):
            if gradient is not None:
                target.add(gradient)
        return None, None, None


_apply: Any = super(torch.autograd.Function, _CutNode).apply  # past what is for torch.func, which is refused
with torch.inference_mode(False), torch.enable_grad():
    ANCHOR = torch.empty((), device="cpu", requires_grad=True)
"""An input of every `autograd.Function` of the engine: autograd takes its outputs to require gradients, whatever its other
inputs are. It never gets one itself."""
_BACK_IN_FORWARD = (
    "forward propagates back (torch.autograd.grad, backward) through layers, whose graphs are not kept while it runs. Take "
    "such gradients within one layer's forward (harmony.layers names the module that does so), or of what is computed "
    "after the last layer."
)
_EXPLANATIONS_IN_FORWARD = {"not have been used in the graph": _BACK_IN_FORWARD}
_EXPLANATIONS = {
    "modified by an inplace operation": "a tensor that a micro-batch's backward pass needs was changed in place after its "
    "forward pass had used it: by the model, or by the forward pass of a later micro-batch of the step, which comes before "
    "this backward pass (a buffer or an attribute that each forward pass fills anew). Make a new tensor each time: "
    "self.mask = ... instead of self.mask.copy_(...).",
    "Trying to backward through the graph a second time": "a gradient reaches the graph of a layer by a tensor that left "
    "it otherwise than as a result (an attribute: self.aux_loss = ..., a hook, a global variable). That graph lives only "
    "while the layer runs, so the gradient would be lost. Let the layer return the tensor.",
    "derivative for ": "the model calls an operator that has no backward pass, so that nothing before it can be trained. "
    "If it multiplies by a quantized weight (torchao's int4 on CPUs has none), quantize the base otherwise: bitsandbytes "
    "NF4 and int8, and torchao's int8, float8 and NF4 can be trained through.",
}


def cut(tensors: Sequence[Tensor], targets: Sequence[GradientTarget]) -> tuple[Tensor, ...]:
    """Return `tensors` (detached) as outputs of a cut node: they require gradients, which go to `targets`."""
    if not tensors:
        return ()
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return cut(tensors, targets)
    cut_tensors: tuple[Tensor, ...] = _apply(ANCHOR, tensors, targets)
    return cut_tensors


def on_one_thread() -> AbstractContextManager[None]:
    """Return a context in which backward passes run on the thread that starts them, which knows what code it runs.

    Autograd has a thread for each accelerator: several would add up gradients of one tensor in their order of arrival.
    """
    return torch.autograd.set_multithreading_enabled(False)


def is_of_autograd_function(node: object) -> bool:
    """Return whether a node of a graph is an `autograd.Function`'s, which may keep and propagate back anything."""
    return isinstance(node, BackwardCFunction)


def in_autograd_function() -> bool:
    """Return whether the forward of an `autograd.Function` runs on this thread."""
    running = set()  # identities: equal code may be another function's
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.add(id(frame.f_code))
        frame = frame.f_back
    todo: list[type[torch.autograd.Function]] = [torch.autograd.Function]  # whose `apply` may be C++, without a frame
    while todo:
        kind = todo.pop()
        if id(_code_of(kind.forward)) in running or id(_code_of(kind.setup_context)) in running:
            return True
        todo += kind.__subclasses__()
    return False


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of what is decorated: `torch.amp.custom_fwd` puts the same code around every forward."""
    if hasattr(function, "__wrapped__"):
        function = unwrap(function)
    return getattr(function, "__code__", None)


def targets_of(node: Node | None) -> Sequence[GradientTarget] | None:
    return getattr(node, "harmony_targets", None)


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Turn torch's errors of a backward pass into ModelErrors that say what to change in the model."""
    try:
        yield
    except RuntimeError as error:
        raise_explained(error)


@contextmanager
def explaining_errors_in_forward() -> Iterator[None]:
    """Turn torch's error about a gradient that forward takes through layers into an UnsupportedError."""
    try:
        yield
    except HarmonyError:
        raise
    except RuntimeError as error:
        raise_explained(error, _EXPLANATIONS_IN_FORWARD, UnsupportedError)


def raise_explained(
    error: RuntimeError, explanations: Mapping[str, str] = _EXPLANATIONS, kind: type[HarmonyError] = ModelError
) -> NoReturn:
    """Raise one of `explanations`, by what torch's `error` says, or the error itself if none is of it."""
    for said, explanation in explanations.items():
        if said in str(error):
            raise kind(f"{explanation} torch says: {error}") from error
    raise error


def propagate(edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], retain_graph: bool = False) -> None:
    """Run a backward pass from `edges`, whose tensors have the shapes and dtypes of `gradients`."""
    if (measuring := is_for_measuring()) is not None and measuring.looks_into_layers:
        retain_graph |= measuring.set_aside(reachable_nodes(edge.node for edge in edges))
    # torch.autograd.backward without its checks of shapes, which take as long as a small layer does.
    try:
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(edges), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
        )
    except RuntimeError as error:
        raise_explained(error)


def next_nodes(node: Node | None) -> list[Node]:
    return [] if node is None else [following for following, _ in node.next_functions if following is not None]


def reachable_nodes(roots: Iterable[Node | None]) -> set[Node]:
    """Return every node that `roots` lead to, up to the cut nodes."""
    seen: set[Node] = set()
    todo = [node for node in roots if node is not None]
    while todo:
        node = todo.pop()
        if node not in seen and targets_of(node) is None:
            seen.add(node)
            todo += next_nodes(node)
    return seen
