"""Where the autograd graph is cut, and how gradients cross the cut.

    layer call k            |   inter-layer operations   |          layer call k+1
    ... -> output  ==cut==> Boundary ->  ... -> input  ==cut==> Boundary -> recomputed layer -> ...

A `Boundary` is an autograd node whose outputs are fresh tensors over given memory. When a backward pass reaches it, it
hands each output's gradient to a `GradientTarget` and stops. The same node stands on both sides of a layer call: in the
micro-batch's own graph its targets collect the gradients of the layer's outputs; in front of a recomputed layer they pass
the gradients of its inputs on to where those came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from harmony_ds.calls.intercept import is_between_layers
from harmony_ds.calls.targets import GradientTarget
from harmony_ds.errors import ModelError, UnsupportedError


class _BoundaryNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensors: Sequence[Tensor], targets: Sequence[GradientTarget]
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.harmony_targets = targets
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        _refuse_second_order()
        if is_between_layers():
            raise UnsupportedError(
                "forward propagates back (torch.autograd.grad, backward) through layers, whose graphs are not kept while "
                "it runs. Take such gradients within one layer's forward, or of what comes behind the last one."
            )
        for target, gradient in zip(ctx.harmony_targets, gradients, strict=True):
            if gradient is not None:
                target.add(gradient)
        return None, None, None


_apply: Any = super(torch.autograd.Function, _BoundaryNode).apply  # past what is for torch.func, which is refused
with torch.inference_mode(False), torch.enable_grad():
    _ANCHOR = torch.empty((), device="cpu", requires_grad=True)
"""Behind every Boundary, so that autograd takes its outputs to require gradients; none ever comes here."""


def cut(tensors: Sequence[Tensor], targets: Sequence[GradientTarget]) -> tuple[Tensor, ...]:
    """`tensors` (detached) as outputs of a Boundary: they require gradients, which go to `targets`."""
    if not tensors:
        return ()
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return cut(tensors, targets)
    cut_tensors: tuple[Tensor, ...] = _apply(_ANCHOR, tensors, targets)
    return cut_tensors


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "backward with create_graph=True through a model that an engine trains, whose layers are propagated through "
            "one by one, without a graph of their gradients. Gradient penalties need a plain model."
        )


class _InputLink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        if not torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
            raise UnsupportedError(
                "torch.autograd.grad with respect to inputs of a model that an engine trains, whose backward pass runs "
                "layer by layer, outside that graph. Call engine.backward(loss) and read .grad of the inputs."
            )
        return gradient, *(None for _ in ctx.next_functions[1:])


def link_to_inputs(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """`output`, which layers computed from `inputs`, such that autograd knows that and does not find the way itself."""
    # Copies of leaves alone: what else is behind an input would be propagated through, and lost, twice.
    leaves = [t for t in inputs if t.requires_grad and _copies_a_leaf(t)]
    guarded: Tensor = _InputLink.apply(output, *leaves) if leaves and output.requires_grad else output  # type: ignore[no-untyped-call]
    return guarded


def _copies_a_leaf(tensor: Tensor) -> bool:
    behind = () if tensor.grad_fn is None else tensor.grad_fn.next_functions
    return len(behind) == 1 and behind[0][0] is not None and not behind[0][0].next_functions


def targets_of(node: Node | None) -> Sequence[GradientTarget] | None:
    """The targets of `node` if it is a Boundary."""
    return getattr(node, "harmony_targets", None)


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Around a backward pass that is the engine's.

    Raises:
        ModelError: something that was saved for it has been written to since, or its graph is gone.
    """
    try:
        yield
    except RuntimeError as error:
        _explain(error)
        raise


def _explain(error: RuntimeError) -> None:
    for said, meant in _MEANT.items():
        if said in str(error):
            raise ModelError(f"{meant} torch says: {error}") from error


_MEANT = {
    "modified by an inplace operation": "a tensor that a micro-batch's backward pass needs was changed in place after its "
    "forward pass had used it: by the model, or by the forward pass of a later micro-batch of the step, which comes before "
    "this backward pass (a buffer or an attribute that each forward pass fills anew). Make a new tensor each time: "
    "self.mask = ... instead of self.mask.copy_(...).",
    "Trying to backward through the graph a second time": "a gradient reaches the graph of a layer by a tensor that left "
    "it otherwise than as a result (an attribute: self.aux_loss = ..., a hook, a global variable). That graph lives only "
    "while the layer runs, so the gradient would be lost. Let the layer return the tensor.",
}


def propagate(edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], retain_graph: bool = False) -> None:
    """A backward pass of the engine's from `edges`, which are of tensors of the shapes and dtypes of `gradients`."""
    # torch.autograd.backward without its checks of shapes, which take as long as a small layer does.
    try:
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(edges), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
        )
    except RuntimeError as error:
        _explain(error)
        raise


def next_nodes(node: Node | None) -> list[Node]:
    """The nodes that `node` hands its gradients to."""
    return [] if node is None else [following for following, _ in node.next_functions if following is not None]


def reachable_nodes(roots: Iterable[Node | None]) -> set[Node]:
    """Every node that `roots` lead to, up to the Boundaries."""
    seen: set[Node] = set()
    todo = [node for node in roots if node is not None]
    while todo:
        node = todo.pop()
        if node not in seen and targets_of(node) is None:
            seen.add(node)
            todo += next_nodes(node)
    return seen
