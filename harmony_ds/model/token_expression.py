"""Functions of the values that a model's head gives each token, evaluated a tile of tokens at a time.

    hidden states of a tile --head--> values of its tokens --the program's functions--> what is left of each token

An `Expression` says what the program has computed of the head's output, for each token by itself. `compute_in_tiles` runs
it tile by tile and puts together what is left of each token; its backward pass runs head and expression again, tile by
tile, so that neither pass ever holds the values of all tokens. The graph of the tile that ran last is kept: the backward
pass begins with that tile, which need not run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_unflatten

from harmony_ds.device.base import PartsToRun
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.graph_cut import ANCHOR, cut, propagate
from harmony_ds.model.intercept import Autocast, handled_by
from harmony_ds.model.targets import GradientSum


class HeadClosedError(ModelError):
    """The output of a head is used, and has not been computed while the head's weights were on the device."""


class HeadCall:
    """The call of a model's head, made for some of its tokens at a time: the layer that gives each token many values.

    Attributes:
        hidden: (tokens, H) its argument, with its graph; the tokens of all rows, one after the other.
        rank: how many dimensions of the argument count tokens.
        tile: how many tokens run at a time.
        gather: called after each tile of a backward pass: adds up the gradients that the tile has left on parameters.
        record: makes the results of a work without a graph, and notes how gradients go back from them later; None: they
            have a graph.
        entrance: weak reference to the hook of gradients that come to what the program makes of the head's output: what it
            makes keeps the hook; None: there is none.
        computed_whole_for: functions that needed all tokens at once, and the shape that they were given.
    """

    def __init__(
        self,
        hidden: Tensor,
        run: Callable[[Tensor, Any], Tensor],
        tile: int,
        weights: Callable[[], AbstractContextManager[Any]],
        gather: Callable[[], None],
        parts_to_run: PartsToRun,
    ) -> None:
        """Make it of (..., H) `hidden` states.

        Args:
            run: from (1, ..., n, H) hidden states of n tokens, and the head's weights, to the output.
            weights: makes a context with the weights on the device.
        """
        with torch.enable_grad():
            self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.rank = hidden.dim() - 1
        self.token_shape = hidden.shape[:-1]
        self.tile = tile
        self.gather = gather
        self.parts_to_run = parts_to_run
        self.record: Callable[[TiledWork], list[Tensor]] | None = None
        self.entrance: weakref.WeakMethod[Callable[[Tensor], Tensor]] | None = None
        self.computed_whole_for: dict[str, tuple[int, ...]] = {}
        self._run = run
        self._weights: Callable[[], AbstractContextManager[Any]] | None = weights
        self._open_weights: list[Any] = []  # of the contexts that are open now
        self._kept: weakref.ref[KeptGraph] | None = None

    def run(self, hidden: Tensor) -> Tensor:
        """Return the (n, V) output for (n, H) hidden states; the weights are held."""
        made = self._run(hidden.view(*[1] * (self.rank - 1), *hidden.shape), self._open_weights[-1])
        return made.view(hidden.shape[0], made.shape[-1])

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """Hold the weights on the device while open, to run tiles: no graph of another tile is kept beside theirs.

        Raises:
            HeadClosedError: they have left it, and may have changed.
        """
        self._drop_kept_graph()
        if self._open_weights:
            yield
            return
        if self._weights is None:
            raise HeadClosedError(
                "the output of the model's last layer is used after its backward pass or its step, and has not been "
                "computed: it is computed in tiles of tokens, with the weights that it was made with. Use it before "
                'engine.step(), keep what is made of it (a loss, the largest values), or set "harmony": {"tokens": "off"}.'
            )
        with self._weights() as weights, self.using(weights, self.gather):
            yield

    @contextmanager
    def using(self, weights: Any, gather: Callable[[], None]) -> Iterator[None]:
        """Run on `weights`, and `gather` their gradients, while open."""
        self._open_weights.append(weights)
        before, self.gather = self.gather, gather
        try:
            yield
        finally:
            self.gather = before
            self._open_weights.pop()

    def entrance_hook(self) -> Callable[[Tensor], Tensor] | None:
        """Return the hook of gradients that come to what the program makes of the output, if there is one."""
        return None if self.entrance is None else self.entrance()

    def keep(self, graph: TileGraph) -> KeptGraph:
        """Return a holder of the graph of the tile that ran last, which holds it until another tile runs."""
        kept = KeptGraph(graph)
        self._kept = weakref.ref(kept)
        return kept

    def _drop_kept_graph(self) -> None:
        kept = None if self._kept is None else self._kept()
        if kept is not None:
            kept.graph = None

    def close(self) -> None:
        """Let go of the head's weights, which leave the device."""
        self._drop_kept_graph()
        self._weights = None
        self.gather = _nothing
        self.record = None  # which refers to the head


def _nothing() -> None:
    """Add up no gradients."""


# ---- expressions


class Expression(Protocol):
    """Values of tokens, or what the program has made of them, at places that are numbered from 0."""

    def evaluate(self, places: Tensor, tile: Tile) -> Tensor:
        """Return (n, W): the values at n `places`."""


class HeadOutput:
    """The expression of the head's output itself; its places are the tokens."""

    def evaluate(self, places: Tensor, tile: Tile) -> Tensor:
        return tile.head_output(places)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An operand of a function: the values of `expression` at `of`, (tokens' shape) places of the expression."""

    expression: Expression
    of: Tensor

    def at(self, places: Tensor, tile: Tile, rank: int) -> Tensor:
        """Return its values at `places` of the function that it is an operand of: (1, ..., n, W), `rank` + 1 dimensions."""
        values = tile.evaluate(self.expression, self.of.reshape(-1)[places])
        return values.view(*[1] * (rank - 1), *values.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """An operand of a function: a tensor beside the tokens' values, such as labels, a mask, or a teacher's logits.

    Attributes:
        value: the tensor.
        token_shape: of the tokens, if it has values for each; None: all tokens share it.
    """

    value: Tensor
    token_shape: torch.Size | None

    def at(self, places: Tensor, tile: Tile, rank: int) -> Tensor:
        """Return its part for `places`: (1, ..., n, W)."""
        value = tile.beside(self)
        if self.token_shape is None:
            return value
        whole = value.expand(*self.token_shape, value.shape[-1])
        # Worked out on the host: on the device, torch would copy the sizes there, and wait for that.
        taken = whole[tuple(_moved(one, value.device) for one in torch.unravel_index(places, self.token_shape))]
        return taken.view(*[1] * (rank - 1), *taken.shape)


@dataclass(slots=True, eq=False)
class Applied:
    """The expression of a function that the program has applied to values of tokens, to each token by itself.

    Attributes:
        function: is called with tensors of the program's number of dimensions, whose tokens all lie in the last but one.
        operands: its arguments, flat: `Placed`, `Beside`, and what is no tensor.
        structure: how the arguments are put together again.
        rank: how many dimensions counted tokens where the program called it.
        grad, autocast: the modes that it was called in.
    """

    function: Callable[..., Any]
    operands: Sequence[Any]
    structure: TreeSpec
    rank: int
    grad: bool
    autocast: Autocast | None

    def evaluate(self, places: Tensor, tile: Tile) -> Tensor:
        (values,) = self.results(places, tile)
        return values

    def results(self, places: Tensor, tile: Tile) -> list[Tensor]:
        """Return all that the function gives at n `places`, each as (n, ...)."""

        def stands_in(operand: Any) -> Any:
            return operand.at(places, tile, self.rank) if isinstance(operand, Placed | Beside) else operand

        made = self.call(stands_in)
        several = made if isinstance(made, tuple) else (made,)
        return [one.reshape(places.numel(), *one.shape[self.rank :]) for one in several]

    def call(self, stands_in: Callable[[Any], Any]) -> Any:
        """Call the function with what `stands_in` returns for each operand, in the modes that the program called it in."""
        args, kwargs = tree_unflatten([stands_in(operand) for operand in self.operands], self.structure)
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), Autocast.entered(self.autocast):
            return self.function(*args, **kwargs)


def tensors_beside(expression: Expression) -> list[Beside]:
    """Return the operands of `expression` that may get gradients of their own, each once."""
    found: dict[Beside, None] = {}
    seen: set[int] = set()
    todo = [expression]
    while todo:
        one = todo.pop()
        if not isinstance(one, Applied) or id(one) in seen:
            continue
        seen.add(id(one))
        found |= {own: None for own in one.operands if isinstance(own, Beside) and own.value.requires_grad}
        todo += [own.expression for own in one.operands if isinstance(own, Placed)]
    return list(found)


# ---- tiles


class Tile:
    """Some tokens, or all, while an expression is evaluated for them: what is known of it, and where its graph begins.

    Attributes:
        hidden_gradients: per run of the head: the tokens, and what gets the gradient of their hidden states.
        known_beside: by operand, what stands for it.
    """

    def __init__(self, head: HeadCall, hidden: Tensor, known_beside: dict[Beside, Tensor], is_cut: bool) -> None:
        """`hidden`: of all tokens. `is_cut`: the graph of the tile begins at the hidden states of its tokens."""
        self._head = head
        self._all_hidden = hidden
        self._is_cut = is_cut
        self.known_beside = known_beside
        self.hidden_gradients: list[tuple[Tensor, GradientSum]] = []
        self._known: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def evaluate(self, expression: Expression, places: Tensor) -> Tensor:
        """Return the values of `expression` at `places`: those that are known, if it has been evaluated there already."""
        known = self._known.setdefault(id(expression), [])
        for others, values in known:
            if torch.equal(others, places):
                return values
        values = expression.evaluate(places, self)
        known.append((places, values))
        return values

    def head_output(self, tokens: Tensor) -> Tensor:
        """Run the head on the hidden states of `tokens`."""
        hidden = _taken(self._all_hidden, tokens)
        if self._is_cut:
            target = GradientSum(hidden)
            hidden = hidden.detach()
            if self._all_hidden.requires_grad and torch.is_grad_enabled():
                (hidden,) = cut([hidden], [target])
            self.hidden_gradients.append((tokens, target))
        return self._head.run(hidden)

    def beside(self, operand: Beside) -> Tensor:
        """Return the tensor of `operand`."""
        return self.known_beside.get(operand, operand.value)


def _taken(hidden: Tensor, tokens: Tensor) -> Tensor:
    """Return the hidden states of `tokens`: a view, if they lie one after the other."""
    first = _first_of_run(tokens)
    return hidden[_moved(tokens, hidden.device)] if first is None else hidden.narrow(0, first, tokens.numel())


def _moved(places: Tensor, device: torch.device) -> Tensor:
    """Return places of the host on a device, without waiting for it: of ordinary memory, CUDA reads before it returns."""
    return places.to(device, non_blocking=True)


def _first_of_run(tokens: Tensor) -> int | None:
    """Return the first of `tokens` (on the host), if each is the one after the one before; else None."""
    if not tokens.numel():
        return 0
    first = int(tokens[0])
    return first if torch.equal(tokens, torch.arange(first, first + tokens.numel())) else None


@dataclass(slots=True, eq=False)
class TileGraph:
    """What has been computed of a tile, with the graph that gradients go back through.

    Attributes:
        made: what is left of each of its places; empty once gradients have gone through.
        hidden_gradients: see `Tile`.
        beside_gradients: what gets the gradients of the tensors beside the tokens' values.
    """

    made: list[Tensor]
    hidden_gradients: list[tuple[Tensor, GradientSum]]
    beside_gradients: list[GradientSum]

    def propagate(self, gradients: Sequence[Tensor | None]) -> None:
        """Propagate the gradients of what is left of each place."""
        edges, arrived = [], []
        for one, gradient in zip(self.made, gradients, strict=True):
            if gradient is not None and one.requires_grad:
                edges.append(get_gradient_edge(one))
                arrived.append(gradient)
        self.made.clear()  # autograd frees what it does not need any more on its way
        if edges:
            propagate(edges, arrived)


@dataclass(slots=True, weakref_slot=True, eq=False)
class KeptGraph:
    """Holder of the graph of the tile that a head's forward pass ran last; None: other tiles have run since."""

    graph: TileGraph | None

    def pop(self) -> TileGraph | None:
        """Return the graph, and hold it no longer."""
        graph, self.graph = self.graph, None
        return graph


@dataclass(frozen=True, slots=True, eq=False)
class TiledWork:
    """An expression to be evaluated at places, tile by tile.

    Attributes:
        places: (n), on the host.
        has_graph: whether gradients flow through it.
    """

    head: HeadCall
    expression: Expression
    places: Tensor
    has_graph: bool

    def tiles(self, last_first: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of the first place of each tile among all, and the tile's places."""
        parts = self.places.split(self.head.tile)
        numbers = range(len(parts))[:: -1 if last_first else 1]
        for number in self.head.parts_to_run([len(parts[number]) for number in numbers]):
            yield numbers[number] * self.head.tile, parts[numbers[number]]

    def results(self, tile: Tile, places: Tensor) -> list[Tensor]:
        """Return what is left of each of `places`."""
        with self._modes():
            if isinstance(self.expression, Applied):
                return self.expression.results(places, tile)
            return [tile.evaluate(self.expression, places)]

    @contextmanager
    def _modes(self) -> Iterator[None]:
        # With a graph in forward, too: whether one is built decides which kernels run, and both passes must agree.
        with torch.set_grad_enabled(self.has_graph), handled_by(None):
            yield

    def compute(self, hidden: Tensor) -> list[Tensor]:
        """Return what is left of each place: (n, ...) tensors without a graph."""
        with self.head.holding_weights():
            return self._compute(hidden, {})[0]

    def compute_and_keep(self, hidden: Tensor, beside: dict[Beside, Tensor]) -> tuple[list[Tensor], KeptGraph]:
        """Return what `compute` returns, and the graph of one tile, with which `propagate` begins."""
        with self.head.holding_weights():
            whole, graph = self._compute(hidden, beside)
        return whole, self.head.keep(graph)

    def _compute(self, hidden: Tensor, beside: dict[Beside, Tensor]) -> tuple[list[Tensor], TileGraph]:
        """Return what is left of each place, and the graph of the first tile, which runs last."""
        whole: list[Tensor] = []
        graph: TileGraph | None = None
        for first, places in self.tiles(last_first=True):
            graph = None
            graph = self._run(hidden, beside, places)
            if not whole:
                shapes = [(self.places.numel(), *one.shape[1:]) for one in graph.made]
                whole = [one.detach().new_empty(shape) for one, shape in zip(graph.made, shapes, strict=True)]
            for all_places, one in zip(whole, graph.made, strict=True):
                all_places.narrow(0, first, places.numel()).copy_(one.detach())
            del one
        assert graph is not None
        return whole, graph

    def _run(self, hidden: Tensor, beside: dict[Beside, Tensor], places: Tensor) -> TileGraph:
        """Run everything for some places, in a graph that begins at the hidden states and at the tensors `beside`."""
        targets = [GradientSum(value) for value in beside.values()]
        values = cut([value.detach() for value in beside.values()], targets)
        tile = Tile(self.head, hidden, dict(zip(beside, values, strict=True)), is_cut=True)
        return TileGraph(self.results(tile, places), tile.hidden_gradients, targets)

    def propagate(
        self,
        hidden: Tensor,
        beside: dict[Beside, Tensor],
        gradients: Sequence[Tensor | None],
        kept: TileGraph | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run everything again, tile by tile, and propagate `gradients` of the results through each.

        Args:
            kept: the graph of the first tile, which is not run again.

        Returns:
            The gradients of `hidden` and of the tensors `beside`. Those of parameters have been gathered.
        """
        total = torch.zeros_like(hidden) if hidden.requires_grad else None
        sums: list[Tensor | None] = [None] * len(beside)
        with self.head.holding_weights():
            for first, places in self.tiles():
                graph, kept = kept or self._run(hidden, beside, places), None
                graph.propagate([None if one is None else one.narrow(0, first, places.numel()) for one in gradients])
                self.head.gather()
                if total is not None:
                    _add_of_tile(total, graph.hidden_gradients)
                _add_beside(sums, graph.beside_gradients)
                del graph
        return total, sums


def _add_of_tile(total: Tensor, runs: list[tuple[Tensor, GradientSum]]) -> None:
    """Add the gradients of the hidden states of one tile to those of all tokens; `runs`: `Tile.hidden_gradients`."""
    for tokens, target in runs:
        gradient = target.pop()
        if gradient is None:
            continue
        first = _first_of_run(tokens)
        if first is None:
            total.index_add_(0, _moved(tokens, total.device), gradient)
        else:
            total.narrow(0, first, tokens.numel()).add_(gradient)


def _add_beside(sums: list[Tensor | None], targets: Sequence[GradientSum]) -> None:
    """Add the gradients that one tile has left of tensors beside the tokens' values to `sums`."""
    for place, target in enumerate(targets):
        known, gradient = sums[place], target.pop()
        if gradient is not None:
            sums[place] = gradient if known is None else known + gradient


# ---- in autograd's graph


def compute_in_tiles(work: TiledWork) -> list[Tensor]:
    """Return what is left of each place, as (n, ...) tensors whose backward pass runs in tiles, too."""
    if not work.has_graph:
        return work.compute(work.head.hidden)
    if work.head.record is not None:
        return _recorded(work, work.head.record)
    beside = tensors_beside(work.expression)
    made: tuple[Tensor, ...] = _ComputedInTiles.apply(  # type: ignore[no-untyped-call]
        ANCHOR, work, beside, work.head.hidden, *[operand.value for operand in beside]
    )
    return list(made)


def loss_of_works(works: Sequence[TiledWork], head: HeadCall) -> Tensor | None:
    """Return a loss of all that `works` leave, of the same functions of the output of `head`, a call with as many tokens.

    To be measured: each value gets a gradient of its own, as from the program's loss. None: gradients may go to tensors
    beside the tokens' values, or nothing gets any.
    """
    if any(tensors_beside(work.expression) for work in works):
        return None
    made = [one for work in works for one in compute_in_tiles(replace(work, head=head)) if one.requires_grad]
    sums = [one.float().square().sum() for one in made]
    return sum(sums[1:], sums[0]) if sums else None


def stand_in_with_graph(work: TiledWork, make: Callable[[], Tensor], values_dim: int) -> Tensor:
    """Return what `make` returns, a stand-in for all results of `work`, as a tensor that gradients may come to.

    Args:
        values_dim: dimension of the stand-in that holds a token's values.
    """
    beside = tensors_beside(work.expression)
    made: Tensor = _NotComputed.apply(  # type: ignore[no-untyped-call]
        ANCHOR, work, make, values_dim, beside, work.head.hidden, *[operand.value for operand in beside]
    )
    return made


class _ComputedInTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, work: TiledWork, beside: list[Beside], hidden: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.harmony_work, ctx.harmony_beside = work, beside
        ctx.save_for_backward(hidden, *values)
        made, ctx.harmony_kept = work.compute_and_keep(hidden, dict(zip(beside, values, strict=True)))
        ctx.mark_non_differentiable(*[one for one in made if not one.is_floating_point()])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        hidden, *values = ctx.saved_tensors
        beside = dict(zip(ctx.harmony_beside, values, strict=True))
        total, sums = ctx.harmony_work.propagate(hidden, beside, gradients, ctx.harmony_kept.pop())
        return (None, None, None, total, *sums)


class _NotComputed(torch.autograd.Function):
    """Autograd's node of a stand-in: for gradients that come to it by code that took it for a tensor with memory."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        work: TiledWork,
        make: Callable[[], Tensor],
        values_dim: int,
        beside: list[Beside],
        hidden: Tensor,
        *values: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.harmony_work, ctx.harmony_beside, ctx.harmony_dim = work, beside, values_dim
        ctx.save_for_backward(hidden, *values)
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return (None,) * (6 + len(ctx.harmony_beside))
        if ctx.harmony_work.head.record is not None:
            raise UnsupportedError(
                "a gradient comes to the output of the model's last layer by an autograd.Function, after a forward pass "
                "that ran by itself since a loss or an output was read: it is computed in tiles of tokens. "
                'Read losses after engine.step(), or set "harmony": {"tokens": "off"}.'
            )
        hidden, *values = ctx.saved_tensors
        gradient = gradient.movedim(ctx.harmony_dim, -1)
        gradient = gradient.reshape(-1, gradient.shape[-1])
        beside = dict(zip(ctx.harmony_beside, values, strict=True))
        total, sums = ctx.harmony_work.propagate(hidden, beside, [gradient])
        return (None, None, None, None, None, total, *sums)


def _recorded(work: TiledWork, record: Callable[[TiledWork], list[Tensor]]) -> list[Tensor]:
    made = record(work)
    hook = work.head.entrance_hook()
    if hook is not None:
        for one in made:
            if one.requires_grad:
                one.register_hook(hook)
    return made


def evaluate_whole(work: TiledWork) -> Tensor:
    """Return (n, W): the values at all places at once, with their graph."""
    if work.has_graph and work.head.record is not None:
        (made,) = _recorded(work, work.head.record)
        return made
    return evaluate_here(work)


def evaluate_here(work: TiledWork) -> Tensor:
    """Return (n, W): the values at all places at once, in the graph of the hidden states."""
    with torch.set_grad_enabled(work.has_graph), handled_by(None), work.head.holding_weights():
        return Tile(work.head, work.head.hidden, {}, is_cut=False).evaluate(work.expression, work.places)
