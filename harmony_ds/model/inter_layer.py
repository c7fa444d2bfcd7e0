"""Gradients through the operations of a model between its layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from harmony_ds.model.graph_cut import next_nodes, propagate, reachable_nodes, targets_of
from harmony_ds.model.targets import GradientTarget, InterLayerGradient, OutputGradient


class InterLayerGraph:
    """Graph of the inter-layer operations of one micro-batch, and gradients that wait to go back through it.

    A layer input that code between layers computed has its gradient sent back once, to the outputs of layers that it was
    computed from: after the last layer that uses it has run backward, and before the backward of the newest call whose
    outputs it was computed from.
    Graphs are kept until the micro-batch is done, since several inputs may share parts.
    """

    def __init__(self) -> None:
        self._edges: dict[tuple[Node, int], tuple[GradientEdge, InterLayerGradient]] = {}
        self._newest: dict[Node, int] = {}

    @property
    def is_trivial(self) -> bool:
        """Whether every layer input was an output of an earlier layer, untouched."""
        return not self._edges

    def target(self, tensor: Tensor) -> GradientTarget:
        """Return the target of the gradient of the layer input `tensor`, which requires one."""
        targets = targets_of(tensor.grad_fn)
        if targets is not None and not (tensor._backward_hooks or tensor.retains_grad):
            return targets[tensor.output_nr]
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        if key not in self._edges:
            self._edges[key] = (edge, InterLayerGradient(self.newest_call_before(edge.node), tensor))
        return self._edges[key][1]

    def propagate_due(self, call: int) -> None:
        """Propagate gradients of all inputs that were computed from call `call` or a later one."""
        self._propagate([(e, t) for e, t in self._edges.values() if t.gradient is not None and t.deadline >= call])

    def propagate_all(self) -> None:
        """Propagate gradients of all inputs."""
        self._propagate([(e, t) for e, t in self._edges.values() if t.gradient is not None])

    def _propagate(self, due: list[tuple[GradientEdge, InterLayerGradient]]) -> None:
        if due:
            propagate([edge for edge, _ in due], [target.pop() for _, target in due], retain_graph=True)

    def waiting(self) -> list[InterLayerGradient]:
        """Return the targets at which gradients wait."""
        return [target for _, target in self._edges.values() if target.gradient is not None]

    def touches(self, tensor: Tensor) -> bool:
        """Return whether the graph of `tensor` shares a node with one that feeds a layer, so that it must be kept."""
        if tensor.grad_fn is None:
            return False
        return not reachable_nodes(node for node, _ in self._edges).isdisjoint(reachable_nodes([tensor.grad_fn]))

    def spans(
        self, consumers: Mapping[InterLayerGradient, tuple[int, int]], last: Tensor | None, end: int
    ) -> set[tuple[int, int]]:
        """Return (earliest, latest) places of use of every node that more than one place uses.

        Args:
            consumers: per tensor that the graph makes, the first and the last place that takes it.
            last: the tensor that backward begins at, at place `end`.
        """
        used: dict[Node, tuple[int, int]] = {}
        roots = [(edge.node, *consumers[target]) for edge, target in self._edges.values() if target in consumers]
        if last is not None and last.grad_fn is not None:
            roots.append((last.grad_fn, end, end))
        for root, first, latest in roots:
            for node in reachable_nodes([root]):
                known = used.get(node, (first, latest))
                used[node] = (min(known[0], first), max(known[1], latest))
        return {(first, latest) for first, latest in used.values() if first < latest}

    def newest_call_before(self, root: Node) -> int:
        """Return the largest call number among the cut nodes that `root` leads to; -1: there is none."""
        todo = [root]
        while todo:
            node = todo[-1]
            following = next_nodes(node)
            missing = [n for n in following if n not in self._newest]
            if missing and targets_of(node) is None:
                todo += missing
                continue
            todo.pop()
            own = [target.call for target in targets_of(node) or () if isinstance(target, OutputGradient)]
            self._newest[node] = max([*own, *(self._newest[n] for n in following if n in self._newest)], default=-1)
        return self._newest[root]
