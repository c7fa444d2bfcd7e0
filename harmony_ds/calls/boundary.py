"""Where the autograd graph is cut, and how gradients cross the cut.

    layer call k            |   inter-layer operations   |          layer call k+1
    ... -> output  ==cut==> Boundary ->  ... -> input  ==cut==> Boundary -> recomputed layer -> ...

A `Boundary` is an autograd node whose outputs are fresh tensors over given memory. When a backward pass reaches it, it
hands each output's gradient to a `GradientTarget` and stops. The same node stands on both sides of a layer call: in the
micro-batch's own graph its targets collect the gradients of the layer's outputs; in front of a recomputed layer they pass
the gradients of its inputs on to where those came from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction

from harmony_ds.calls.taking import Taking
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.offload.residency import Leaves


class GradientTarget(Protocol):
    """Takes gradients of one tensor."""

    def add(self, gradient: Tensor) -> None: ...

    def take(self) -> Tensor | None: ...


class Origin:
    """One micro-batch's forward pass of one model. (Graphs hold its output gradients, which must not refer to graphs.)"""

    __slots__ = ("model",)

    def __init__(self) -> None:
        self.model = 0
        """Identifies the layer calls that it is of."""


class GradientSum:
    """The gradient of one tensor: the sum of what its consumers hand back."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        # Out of place: autograd may hand the same tensor to several consumers.
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> Tensor | None:
        gradient, self.gradient = self.gradient, None
        return gradient


class OutputGradient(GradientSum):
    """The gradient of one output of a layer call.

    Attributes:
        call: the number of the call in its micro-batch.
        shape: of the output, and so of its gradient.
        propagated: whether the call has been propagated through, so that a gradient would come too late.
        origin: the micro-batch that the call belongs to.
    """

    __slots__ = ("call", "dtype", "origin", "propagated", "shape")

    def __init__(self, call: int, output: Tensor, origin: Origin | None = None) -> None:
        super().__init__()
        self.origin = origin
        self.call = call
        self.shape = output.shape
        self.dtype = output.dtype
        self.propagated = False

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def add(self, gradient: Tensor) -> None:
        if self.propagated:
            raise ModelError(
                f"a gradient came to an output of layer call {self.call} of a micro-batch after that had been propagated "
                f"through, and would be lost: {_FROM_ANOTHER}"
            )
        super().add(gradient)


class InterLayerGradient(GradientSum):
    """The gradient of what inter-layer operations gave a layer, until it is due: before backward of call `deadline`."""

    __slots__ = ("deadline", "nbytes")

    def __init__(self, deadline: int, nbytes: int) -> None:
        super().__init__()
        self.deadline = deadline
        self.nbytes = nbytes


class DeadEnd:
    """Where the graph of a forward pass ends that is thrown away: a gradient that comes here came by a way of its own."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def add(self, gradient: Tensor) -> None:
        raise ModelError(
            f"a gradient reaches layer {self.layer} by a tensor that left it neither as a result nor in an argument or "
            "an attribute of a module (a hook, a closure or a global variable holds it), and would be lost: the graph of "
            "a layer lives only while the layer runs. Let the layer return that tensor, or detach it."
        )

    def take(self) -> Tensor | None:
        return None

    def unless(self, expected: Callable[[], bool], target: GradientTarget) -> GradientTarget:
        """`target` of a graph that is kept, in which other gradients than those of the backward pass of its layer
        come by a way of their own.
        """
        return _Guarded(self, expected, target)

    def guarded(self, copies: Iterable[tuple[str, nn.Parameter]]) -> Leaves:
        """Aliases of `copies` for forward passes whose graphs are thrown away."""
        return Leaves({name: self._guard(copy) for name, copy in copies})

    def _guard(self, copy: nn.Parameter) -> nn.Parameter:
        alias = nn.Parameter(copy.detach(), requires_grad=copy.requires_grad)
        if copy.requires_grad:
            alias.register_hook(self.add)
        return alias


class _Guarded:
    """Takes the gradients of `target` while they are expected."""

    __slots__ = ("_dead_end", "_expected", "_target")

    def __init__(self, dead_end: DeadEnd, expected: Callable[[], bool], target: GradientTarget) -> None:
        self._dead_end, self._expected, self._target = dead_end, expected, target

    def add(self, gradient: Tensor) -> None:
        (self._target if self._expected() else self._dead_end).add(gradient)

    def take(self) -> Tensor | None:
        return self._target.take()


_FROM_ANOTHER = (
    "another micro-batch was computed from it, or its step is over. Detach what goes from one micro-batch to another "
    "(state = state.detach())."
)


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
            "backward with create_graph=True runs through a model that an engine trains: its layers are propagated "
            "through one by one, without a graph of their gradients. Gradient penalties need a plain model."
        )


class _Outlet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        if not torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
            raise UnsupportedError(
                "torch.autograd.grad through a model that an engine trains, with respect to its inputs: the backward pass "
                "runs layer by layer, outside that graph, and gathers the gradients of all parameters. Call "
                "engine.backward(loss) and read .grad of the inputs."
            )
        return gradient, *(None for _ in ctx.next_functions[1:])


def outlet(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """`output`, which layers computed from `inputs`, such that autograd knows that and does not find the way itself."""
    # Copies of leaves alone: what else is behind an input would be propagated through, and lost, twice.
    leaves = [t for t in inputs if t.requires_grad and _copies_a_leaf(t)]
    guarded: Tensor = _Outlet.apply(output, *leaves) if leaves and output.requires_grad else output  # type: ignore[no-untyped-call]
    return guarded


def _copies_a_leaf(tensor: Tensor) -> bool:
    behind = () if tensor.grad_fn is None else tensor.grad_fn.next_functions
    return len(behind) == 1 and behind[0][0] is not None and not behind[0][0].next_functions


def targets_of(node: Node | None) -> Sequence[GradientTarget] | None:
    """The targets of `node` if it is a Boundary."""
    return getattr(node, "harmony_targets", None)


class _Begins(threading.local):
    by_engine = False


_begins = _Begins()


class backward_of_engine:  # noqa: N801 - used as a function; a class, because it is entered for each layer call
    """Around a backward pass that is the engine's: what begins within it is the program's.

    Raises:
        ModelError: something that was saved for it has been written to since.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _begins.by_engine = True

    def __exit__(self, cls: object, error: BaseException | None, trace: object) -> None:
        _begins.by_engine = False
        if isinstance(error, RuntimeError):
            _refuse_changed(error)


def _refuse_changed(error: RuntimeError) -> None:
    """Raises ModelError if torch says so in its own words."""
    if "modified by an inplace operation" in str(error):
        raise ModelError(
            "a tensor that a micro-batch's backward pass needs was changed in place after its forward pass had used it: by "
            "the model itself, or by the forward pass of a later micro-batch of the same step, which comes before this "
            "backward pass (a buffer or an attribute that each forward pass fills anew). Make a new tensor each time: "
            f"self.mask = ... instead of self.mask.copy_(...). torch says: {error}"
        ) from error


def propagate(edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], retain_graph: bool = False) -> None:
    """A backward pass of the engine's from `edges`, which are of tensors of the shapes and dtypes of `gradients`.

    Raises:
        ModelError: something that was saved for it has been written to since.
    """
    # torch.autograd.backward without its checks of shapes, which take as long as a small layer does; and past whoever
    # watches it for passes that are not the engine's.
    try:
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(edges), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
        )
    except RuntimeError as error:
        _refuse_changed(error)
        raise


def is_of_engine() -> bool:
    """Whether the backward pass that begins now is the engine's."""
    by_engine, _begins.by_engine = _begins.by_engine, False
    return by_engine


def nodes_behind(node: Node | None) -> list[Node]:
    """The nodes that `node` hands its gradients to."""
    return [] if node is None else [following for following, _ in node.next_functions if following is not None]


class InterLayerGraph:
    """Gradients on their way back through the inter-layer operations of one micro-batch.

    A layer input that is not itself an output of an earlier layer was computed by inter-layer operations. Its gradient
    must run through their graph to the Boundaries behind it: once, when everything that uses it has been propagated,
    and before the newest call behind it is. Graphs are kept until the micro-batch is done, since several inputs may
    share parts.

    Attributes:
        taking: takes what layer calls are given here.
    """

    def __init__(self) -> None:
        self._edges: dict[tuple[Node, int], tuple[GradientEdge, InterLayerGradient]] = {}
        self._newest: dict[Node, int] = {}
        self._hooked: set[GradientEdge] = set()
        self._checked = False
        self.origin = Origin()
        self.taking = Taking()

    @property
    def is_trivial(self) -> bool:
        """Whether every layer input was an output of an earlier layer, untouched."""
        return not self._edges

    def target(self, tensor: Tensor, hooked: bool = False) -> GradientTarget:
        """Where the gradient of the layer input `tensor` (which requires one) goes; `hooked`: it may still get hooks."""
        targets = targets_of(tensor.grad_fn)
        if targets is not None:
            self._check(targets)
        if targets is not None and not (hooked or tensor._backward_hooks or tensor.retains_grad):
            return targets[tensor.output_nr]
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        if key not in self._edges:
            nbytes = tensor.numel() * tensor.element_size()
            self._edges[key] = (edge, InterLayerGradient(self._newest_call_behind(edge.node), nbytes))
        return self._edges[key][1]

    def note_hook(self, tensor: Tensor) -> None:
        """The program has put a hook on `tensor`, which is to see its gradient."""
        if tensor.grad_fn is not None:
            self._hooked.add(get_gradient_edge(tensor))

    def check_whole(self, loss: Tensor | None = None) -> None:
        """To be called before anything is propagated back, from `loss` first if there is one; looks once.

        Raises:
            UnsupportedError: code of the program's would see a gradient in parts that come one after another (each by way
                of another layer), where autograd would hand it their sum. What autograd does itself adds up.
        """
        if self._checked or self.is_trivial:
            return
        self._checked = True
        roots: dict[int, list[Node]] = {_OF_LOSS: [] if loss is None or loss.grad_fn is None else [loss.grad_fn]}
        for edge, target in self._edges.values():
            roots.setdefault(target.deadline, []).append(edge.node)
        seen: set[Node] = set()
        several: set[Node] = set()
        for nodes in roots.values():
            reached = _nodes_behind(nodes)
            reached.update(*map(nodes_behind, reached), nodes)  # and Boundaries
            several |= seen & reached
            seen |= reached
        what = "a hook on a tensor" if any(edge.node in several for edge in self._hooked) else None
        what = what or next((told for node in several if (told := _code_of_program(node)) is not None), None)
        if what is not None:
            raise UnsupportedError(
                f"{what} between the layers sees the gradient of a tensor that several layers take (a residual stream): it "
                "comes in parts here, one by way of each layer, and would be handed over part by part instead of their "
                "sum. Nothing has been updated. Name a module that contains all of them in harmony.layers, or put the "
                "code into a layer's forward."
            )

    def settle(self, call: int) -> None:
        """Runs gradients through every part whose newest call is `call` or later (-1: all)."""
        due = [
            (edge, target)
            for edge, target in self._edges.values()
            if target.gradient is not None and target.deadline >= call
        ]
        if due:
            propagate([edge for edge, _ in due], [target.take() for _, target in due], retain_graph=True)

    def touches(self, tensor: Tensor) -> bool:
        """Whether the graph of `tensor` shares a node with one that feeds a layer, so that it must be kept."""
        if tensor.grad_fn is None:
            return False
        return not _nodes_behind(node for node, _ in self._edges).isdisjoint(_nodes_behind([tensor.grad_fn]))

    def spans(
        self, consumers: Mapping[InterLayerGradient, tuple[int, int]], last: Tensor | None, end: int
    ) -> set[tuple[int, int]]:
        """Places that share a part of the graph: (earliest, latest) per node that more than one place uses.

        Args:
            consumers: per tensor that comes of it, the first and the last place that takes it.
            last: what is propagated back from, at place `end`.
        """
        used: dict[Node, tuple[int, int]] = {}
        roots = [(edge.node, *consumers[target]) for edge, target in self._edges.values() if target in consumers]
        if last is not None and last.grad_fn is not None:
            roots.append((last.grad_fn, end, end))
        for root, first, latest in roots:
            for node in _nodes_behind([root]):
                known = used.get(node, (first, latest))
                used[node] = (min(known[0], first), max(known[1], latest))
        return {(first, latest) for first, latest in used.values() if first < latest}

    def _check(self, targets: Sequence[GradientTarget]) -> None:
        # Gradients go from one micro-batch to another only between different models.
        for target in targets:
            origin = target.origin if isinstance(target, OutputGradient) else None
            if origin is not None and origin is not self.origin and origin.model == self.origin.model:
                raise ModelError(f"a layer was given a tensor with the graph of another micro-batch: {_FROM_ANOTHER}")

    def _newest_call_behind(self, root: Node) -> int:
        """The largest call number among the Boundaries that `root` leads to; -1 if there is none."""
        todo = [root]
        while todo:
            node = todo[-1]
            following = nodes_behind(node)
            missing = [n for n in following if n not in self._newest]
            if missing and targets_of(node) is None:
                todo += missing
                continue
            todo.pop()
            targets = targets_of(node)
            self._check(targets or ())
            own = [target.call for target in targets or () if isinstance(target, OutputGradient)]
            self._newest[node] = max([*own, *(self._newest[n] for n in following if n in self._newest)], default=-1)
        return self._newest[root]


_OF_LOSS = 2**31


def _code_of_program(node: Node) -> str | None:
    """The program's own code that runs in `node`, named."""
    if getattr(getattr(node, "variable", None), "_backward_hooks", None):  # of a leaf
        return "a hook on a parameter that is used"
    function: Any = getattr(node, "_forward_cls", None)  # of an autograd.Function
    if function is None:
        return None
    if function is BackwardHookFunction:
        return "a backward hook of a module"
    module = function.__module__
    ours = module.partition(".")[0] in ("harmony_ds", "torch") and not module.startswith("torch._library")
    return None if ours else f"the backward pass of {function.__qualname__}"


def _nodes_behind(roots: Iterable[Node]) -> set[Node]:
    """Every node that `roots` lead to, up to the Boundaries."""
    seen: set[Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in seen and targets_of(node) is None:
            seen.add(node)
            todo += nodes_behind(node)
    return seen


def targets_behind(tensors: Iterable[Tensor]) -> set[GradientTarget]:
    """Where gradients of `tensors` would go."""
    roots = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    ends = roots.union(*map(nodes_behind, _nodes_behind(roots)))
    return {target for end in ends for target in targets_of(end) or ()}
