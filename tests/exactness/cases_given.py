"""What the layers of a model are given alike: masks and the like, that somebody changes on the way, or leaves a mark on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import FOUR, Found, case
from tests.exactness.models import WIDTH, Block, Net, batches, by_both_ways, sgd, weights
from tests.exactness.sides import Side

RECOMPUTED: dict[str, Any] = {"pack_layers": 2, "fuse_last_pack": False, "residency": "off"}
Change = Callable[[int, Tensor], object]


def nothing(number: int, mask: Tensor) -> None:
    """Nobody changes it."""


class Adding(Block):
    """Adds a mask, scales by whether there is a mark on it, and may do something to it."""

    def __init__(self, number: int, behind: Change) -> None:
        super().__init__()
        self.number, self.behind = number, behind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = (super().forward(x) + mask) * (2.0 if hasattr(mask, "done") else 1.0)
        self.behind(self.number, mask)
        return x


class Attending(Block):
    """Attends under a bias, whose kernel is chosen by whether that requires a gradient."""

    def __init__(self, number: int, behind: Change) -> None:
        super().__init__()
        self.number, self.behind = number, behind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        heads = self.linear(x).view(1, 2, -1, WIDTH // 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, mask[: heads.shape[2], None]).reshape(x.shape)
        self.behind(self.number, mask)
        return x


class Given(Net):
    """Blocks that are all given one mask, which `between` may change behind each."""

    def __init__(self, between: Change = nothing, behind: Change = nothing, block: Any = Adding) -> None:
        super().__init__(depth=4)
        self.blocks = nn.ModuleList(block(number, behind) for number in range(4))
        self.between = between

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        mask = torch.linspace(-1.0, 1.0, WIDTH)
        for number, block in enumerate(self.blocks):
            x = block(x, mask)
            self.between(number, mask)
        return x


def trained(side: Side, model: nn.Module) -> Found:
    engine = side.initialize(model, sgd(model))
    losses = by_both_ways(engine, batches(4 * side.accumulation))
    return {**weights(model), "losses": losses}


@case(*FOUR, **RECOMPUTED)
def data_of_a_mask_exchanged_between_layers(side: Side) -> Found:
    """Between the blocks the model assigns `mask.data`, which changes no version."""

    def exchange(number: int, mask: Tensor) -> None:
        mask.data = torch.full((WIDTH,), 0.1 * number)

    return trained(side, Given(between=exchange))


@case(*FOUR, **RECOMPUTED)
def mask_exchanged_with_swap_tensors(side: Side) -> Found:
    """Between the blocks the mask becomes another tensor by torch.utils.swap_tensors."""

    def exchange(number: int, mask: Tensor) -> None:
        torch.utils.swap_tensors(mask, torch.full((WIDTH,), 0.1 * number))

    return trained(side, Given(between=exchange))


@case(*FOUR, **RECOMPUTED)
def mark_on_a_mask_left_by_the_last_layer(side: Side) -> Found:
    """The last block sets an attribute of the mask; blocks that find it compute otherwise."""

    def leave(number: int, mask: Tensor) -> None:
        if number == 3:
            mask.done = True  # type: ignore[attr-defined]

    return trained(side, Given(behind=leave))


@case(*FOUR, **RECOMPUTED)
def attention_bias_that_the_last_layer_lets_require_a_gradient(side: Side) -> Found:
    """The last block calls `bias.requires_grad_()` behind its attention, whose kernel that would change."""

    def let(number: int, mask: Tensor) -> None:
        if number == 3:
            mask.requires_grad_()

    return trained(side, Given(behind=let, block=Attending))


@case(*FOUR, **RECOMPUTED)
def gradient_of_a_mask_asked_by_one_layer_before_others(side: Side) -> Found:
    """The second block calls `mask.requires_grad_()`; the blocks behind it are given that mask too."""

    def let(number: int, mask: Tensor) -> None:
        if number == 1:
            mask.requires_grad_()

    return trained(side, Given(behind=let))


class Switching(Block):
    """The first turns gradients off, the second turns them on behind itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if self.number == 0:
            torch.set_grad_enabled(False)
        x = super().forward(x)
        if self.number == 1:
            torch.set_grad_enabled(True)
        return x


@case(*FOUR, **{**RECOMPUTED, "pack_layers": 3})
def grad_mode_left_by_one_layer_for_the_next(side: Side) -> Found:
    """The first block turns grad mode off and leaves it so, the second turns it on again."""
    model = Net(depth=4)
    model.blocks = nn.ModuleList(map(Switching, range(4)))
    return trained(side, model)


class Stopping(Block):
    """Raises what is no Exception where the caller expects it."""

    def forward(self, x: Tensor) -> Tensor:
        raise GeneratorExit


class Caught(Net):
    """Goes another way where the second block gives up."""

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.front(x))
        try:
            return self.blocks[1](x)  # type: ignore[no-any-return]
        except GeneratorExit:
            return self.blocks[2](x)  # type: ignore[no-any-return]


@case(*FOUR)
def exception_of_a_kind_of_its_own_caught_around_a_layer(side: Side) -> Found:
    """A block raises a BaseException, around which the model has a handler."""
    model = Caught()
    model.blocks[1] = Stopping()
    return trained(side, model)


class Neighbours(Block):
    """Mixes rows by a sparse matrix."""

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.sparse.mm(matrix, x))


class Graph(Net):
    """All blocks are given one sparse matrix."""

    def body(self, x: Tensor) -> Tensor:
        matrix = torch.eye(len(x)).to_sparse() * 0.5
        x = self.front(x)
        for block in self.blocks:
            x = block(x, matrix)
        return x


@case(*FOUR, **RECOMPUTED)
def sparse_matrix_given_to_all_layers(side: Side) -> Found:
    """A graph network multiplies with one sparse adjacency matrix in each block."""
    return trained(side, Graph(Neighbours))


class Marking(Block):
    """Notes on the mask that it has come by."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        times = getattr(mask, "times", 0)
        mask.times = times + 1  # type: ignore[attr-defined]
        return super().forward(x * mask) / (1 + times)


class Marked(Net):
    """All blocks are given one mask."""

    def body(self, x: Tensor) -> Tensor:
        x, mask = self.front(x), torch.full((len(x), 1), 0.5)
        for block in self.blocks:
            x = block(x, mask)
        return x


@case(*FOUR, **RECOMPUTED)
def attribute_set_on_an_argument(side: Side) -> Found:
    """Blocks count on the mask, by an attribute, how often it was used."""
    return trained(side, Marked(Marking))


class Telling(Block):
    """Hands a loss of its own over on its result."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        result.aux = result.square().mean()  # type: ignore[attr-defined]
        return result


class Told(Net):
    """Adds up what blocks have told, where they have."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x, told = self.front(x), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            told = told + getattr(x, "aux", 0.0)
        logits = self.head(x) * (1 + told)
        return logits if labels is None else F.cross_entropy(logits, labels)


@case(*FOUR, **RECOMPUTED)
def attribute_set_on_a_result(side: Side) -> Found:
    """Blocks hand an auxiliary loss over as an attribute of their result (`x.aux`)."""
    return trained(side, Told(Telling))


class TableCache:
    """The program's own, which only has the name in common with what layers fill in generation."""

    def __init__(self) -> None:
        self.scale = torch.linspace(0.5, 1.5, WIDTH)


class Prefixed(Block):
    """Takes a table, and a prefix that is trained."""

    def forward(self, x: Tensor, table: Any = None, past_key_values: Any = None) -> Tensor:  # type: ignore[override]
        if table is not None:
            x = x * table.scale
        return super().forward(x if past_key_values is None else x + past_key_values[0][1])


class OwnCaches(Net):
    """Blocks are given a table of a class of that name, and a tuple of trained tensors as `past_key_values`."""

    def __init__(self) -> None:
        super().__init__(Prefixed)
        self.prefix = nn.Parameter(torch.full((WIDTH,), 0.1))

    def body(self, x: Tensor) -> Tensor:
        x, table, prefix = self.front(x), TableCache(), ((self.prefix * 2, self.prefix),)
        x = self.blocks[0](x, table, prefix)
        for block in self.blocks[1:]:
            x = block(x, table=table, past_key_values=prefix)
        return x


@case(*FOUR, **RECOMPUTED)
def caches_of_its_own_given(side: Side) -> Found:
    """A trained prefix (`past_key_values=((key, value),)`), and an object whose class the program calls `...Cache`."""
    return trained(side, OwnCaches())
