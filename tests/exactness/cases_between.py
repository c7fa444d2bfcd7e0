"""Code of the program between the layers: in backward passes, around layers, and models without layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import ALL, ONE, PAIRS, Found, case
from tests.exactness.models import (
    WIDTH,
    Block,
    Graph,
    Neighbours,
    Net,
    Sigmoids,
    by_both_loops,
    sgd,
    trained,
)
from tests.exactness.sides import Side


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Chain(Net):
    """Clamps the gradient between its blocks, past which no stream goes."""

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(Clamped.apply(x))
        return x


@case(*PAIRS)
def gradient_of_a_chain_clamped_by_a_function(side: Side) -> Found:
    """An autograd function between blocks clamps a gradient that comes by one way alone."""
    return by_both_loops(side, Chain())


class Functional(nn.Module):
    """Uses all of its weights by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2)])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for weight in self.layers:
            x = torch.tanh(x @ weight)
        return x if labels is None else F.cross_entropy(x, labels)


@case(*ONE)
def no_module_is_called(side: Side) -> Found:
    """All weights are in an nn.ParameterList, and forward multiplies with them itself."""
    return by_both_loops(side, Functional())


@case(*PAIRS)
def sparse_matrix_given_to_all_layers(side: Side) -> Found:
    """A graph network multiplies with one sparse adjacency matrix in each block."""
    return by_both_loops(side, Graph(Neighbours))


class GraphWithBuffer(Net):
    """Mixes its rows by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(2).to_sparse())

    def body(self, x: Tensor) -> Tensor:
        return super().body(torch.sparse.mm(self.edges, x))


@case(*ONE)
def sparse_buffer(side: Side) -> Found:
    """A graph network keeps its adjacency matrix in a sparse buffer."""
    return by_both_loops(side, GraphWithBuffer())


class Indexed(nn.Module):
    """A graph network: of its inputs, one holds places in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.front(x)
        x = torch.zeros_like(x).index_add(0, target, x[source])
        return F.cross_entropy(self.head(x), labels % 3)


@case(*PAIRS, micro_batch=1)
def rows_that_other_inputs_name(side: Side) -> Found:
    """Rows are taken one at a time through layers, of inputs that hold each other's indices."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        source = torch.arange(2 * len(x)) % len(x)
        return engine(x, labels, source=source, target=source.flip(0))

    return trained(side, Indexed(), sgd, loss)


# ---- contexts around layers, in which lanes are suspended


class Around(Net):
    """The second block is called within `context`."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.context = context

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.front(x))
        with self.context():
            x = self.blocks[1](x)
            x = torch.tanh(x) @ torch.eye(WIDTH)
        return self.blocks[2](x.float())


@case(*PAIRS)
def block_without_gradients(side: Side) -> Found:
    """`with torch.no_grad():` around a block and the code after it."""
    return by_both_loops(side, Around(torch.no_grad))


@case(*PAIRS)
def block_in_autocast(side: Side) -> Found:
    """`with torch.autocast("cpu", torch.bfloat16):` around a block and a product after it."""
    return by_both_loops(side, Around(lambda: torch.autocast("cpu", torch.bfloat16)))


@case(*ALL)
def block_under_a_function_mode(side: Side) -> Found:
    """`with` a TorchFunctionMode that exchanges functions around a block and the code after it."""
    return by_both_loops(side, Around(Sigmoids))


class ReadsSwitches(Block):
    """Computes otherwise where oneDNN is off, or algorithms are deterministic."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.5 if torch.backends.mkldnn.enabled else 1.0
        return super().forward(x) * (factor if torch.are_deterministic_algorithms_enabled() else 1.0)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@case(*ALL)
def block_under_switches(side: Side) -> Found:
    """`torch.use_deterministic_algorithms(True)` around a block that reads it; as before after it."""
    model = Around(deterministic)
    model.blocks[1] = ReadsSwitches()
    return {**by_both_loops(side, model), "after": torch.are_deterministic_algorithms_enabled()}


@case(*PAIRS)
def backbone_in_inference_mode(side: Side) -> Found:
    """`with torch.inference_mode():` around the frozen front and a block; `x.clone()` goes on."""

    class Backbone(Net):
        def body(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                x = self.blocks[0](self.front(x))
            return self.blocks[2](self.blocks[1](x.clone()))

    model = Backbone()
    model.front.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return by_both_loops(side, model)


class Mapped(Net):
    def body(self, x: Tensor) -> Tensor:
        return torch.vmap(self.blocks[0])(self.front(x))


@case(*ONE)
def block_in_vmap(side: Side) -> Found:
    """`torch.vmap(block)(x)` in forward."""
    return by_both_loops(side, Mapped())


class Falling(Net):
    """A net that calls the fourth block where the second one raises."""

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.front(x))
        try:
            x = self.blocks[1](x)
        except ValueError:
            x = self.blocks[3](x)
        return self.blocks[2](x)


class Refusing(Block):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 0:
            raise ValueError("what this block does not take")
        return super().forward(x)


@case(*ALL)
def another_block_where_one_raises(side: Side) -> Found:
    """`try: x = a(x)`, `except ValueError: x = b(x)` in forward; a block raises for half of the data."""
    model = Falling(Block, depth=4)
    model.blocks[1] = Refusing()
    return by_both_loops(side, model)
