"""Tensors that enter or leave a layer by another way than its arguments and results: what they carry is what it is in
plain PyTorch, or an error that names the layer.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harmony_ds import HarmonyEngine, ModelError, UsageError
from tests.cover import pairs
from tests.engine.drive import adamw, config_of, engine_for, seed_of, sgd, weights_of
from tests.oracle import assert_same, train_plainly

WIDTH = 6
STEPS, ACCUMULATION = 3, 3
Batch = dict[str, Tensor]


def batch_of(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    return {"x": torch.randn(2, WIDTH, generator=generator), "y": torch.randn(2, WIDTH, generator=generator)}


GROUPS = [[batch_of(10 * step + i) for i in range(ACCUMULATION)] for step in range(STEPS)]


class Block(nn.Module):
    """A residual layer; what tests change is derived from it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Four blocks and a head; `run` is what tests override."""

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(number) for number in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": F.mse_loss(self.head(self.run(x)), y)}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().train()


@contextmanager
def training(make: Callable[[], nn.Module], **harmony: Any) -> Iterator[tuple[nn.Module, HarmonyEngine]]:
    """An engine over a fresh model, one layer in each pack."""
    model = built(make)
    config = config_of(ACCUMULATION, None, {"pack_layers": 1, **harmony})
    with engine_for(model, adamw, config) as engine:
        yield model, engine


def assert_equals_plain(make: Callable[[], nn.Module], bitwise: bool = True, **harmony: Any) -> nn.Module:
    """Losses, weights and buffers after some steps; returns the engine's model.

    Args:
        bitwise: False where a tensor has several consumers, whose gradients are added up in another order.
    """
    plain = built(make)
    losses = train_plainly(plain, GROUPS, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    with training(make, **harmony) as (model, engine):
        actual = [engine.train_batch(iter(group)).item() for group in GROUPS]
    assert_same(model, plain, bitwise)
    expected = [torch.tensor(group).mean().item() for group in losses]
    assert actual == (expected if bitwise else pytest.approx(expected, rel=1e-6))
    return model


def assert_refused(
    make: Callable[[], nn.Module], match: str, error: type[Exception] = ModelError, **harmony: Any
) -> None:
    """Training ends with `error` before a weight has changed."""
    with training(make, **harmony) as (model, engine):
        before = weights_of(model)
        with pytest.raises(error, match=match):
            engine.train_batch(iter(GROUPS[0]))
        engine.finish_updates()
        assert_same(model, before, bitwise=True)


# ---- the caller's own graph


def test_measuring_leaves_no_gradient_on_an_input() -> None:
    plain = built(Net)
    inputs = [[{**batch, "x": batch["x"].clone().requires_grad_()} for batch in group] for group in GROUPS]
    expected = [[{**batch, "x": batch["x"].clone().requires_grad_()} for batch in group] for group in GROUPS]
    train_plainly(plain, expected, sgd(plain.parameters()), clip=None, seed_of=seed_of)
    model = built(Net)
    with engine_for(model, sgd, config_of(ACCUMULATION)) as engine:
        for group in inputs:
            engine.train_batch(iter(group))
    for ours, theirs in zip(inputs, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a["x"].grad, b["x"].grad)
    assert_same(model, plain, bitwise=True)


def test_a_trainable_module_in_front_of_the_engine_gets_its_gradients_and_no_others() -> None:
    fronts, models = [built(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2)], [built(Net), built(Net)]
    for step, batch in enumerate(GROUPS[0]):
        models[0].zero_grad()
        models[0](x=fronts[0](batch["x"]), y=batch["y"])["loss"].backward()
        sgd(models[0].parameters()).step()
        del step
    with engine_for(models[1], sgd, config_of(1)) as engine:
        for batch in GROUPS[0]:
            loss = engine(x=fronts[1](batch["x"]), y=batch["y"])["loss"]
            engine.backward(loss)
            engine.step()
    assert_same(models[1], models[0], bitwise=True)
    for a, b in zip(fronts[1].parameters(), fronts[0].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# ---- objects in and out


class Carrier:
    """Knows nothing of torch."""

    def __init__(self, hidden: Tensor, label: str = "x") -> None:
        self.hidden = hidden
        self.label = label


@dataclass(slots=True)
class Slotted:
    hidden: Tensor
    label: str = "x"


def namespace(hidden: Tensor) -> SimpleNamespace:
    return SimpleNamespace(hidden=hidden, more={"twice": [hidden]})


class CarryingBlock(Block):
    """Takes and gives an object."""

    def __init__(self, number: int, make: Callable[[Tensor], Any]) -> None:
        super().__init__(number)
        self.make = make

    def forward(self, carried: Any) -> Any:
        return self.make(super().forward(carried.hidden))


class CarryingNet(Net):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__(lambda number: CarryingBlock(number, make))
        self.make = make

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.make(x)).hidden


@pytest.mark.parametrize("make", [Carrier, Slotted, namespace], ids=lambda make: make.__name__)
def test_objects_carry_tensors_between_layers(make: Callable[[Tensor], Any]) -> None:
    assert_equals_plain(lambda: CarryingNet(make))


# ---- what layers write into what they are given


class Notes:
    def __init__(self) -> None:
        self.total: Any = 0.0
        self.number = 0


class WritingBlock(Block):
    """Leaves a number in something that it was given, and takes what layers before have left there."""

    def forward(self, x: Tensor, into: Any) -> Tensor:
        x = super().forward(x)
        aux = x.pow(2).mean()
        if isinstance(into, list):
            x = x + 0.1 * sum(into, torch.zeros(()))
            into.append(aux)
        elif isinstance(into, Notes):
            x = x + 0.1 * into.total
            into.total, into.number = into.total + aux, into.number + 1
        elif isinstance(into, tuple):
            into[0].setdefault("all", []).append(aux)
        else:
            x = x + 0.1 * sum(into.values(), torch.zeros(()))
            into[self.number] = aux
        return x


class WritingNet(Net):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(WritingBlock)
        self.make = make

    def forward(self, x: Tensor, y: Tensor) -> Any:
        into = self.make()
        for block in self.blocks:
            x = block(x, into)
        if isinstance(into, Notes):
            assert into.number == 4
            total = into.total
        elif isinstance(into, tuple):
            assert len(into[0]["all"]) == 4
            total = sum(into[0]["all"])
        else:
            assert len(into) == 4
            total = sum(into if isinstance(into, list) else into.values())
        return {"loss": F.mse_loss(self.head(x), y) + 0.1 * total}


@pytest.mark.parametrize(
    "make", [list, dict, UserDict, Notes, lambda: ({},)], ids=["list", "dict", "UserDict", "object", "nested"]
)
def test_layers_write_into_what_they_are_given(make: Callable[[], Any]) -> None:
    # A sum of several gradients of one number is added up in another order than autograd's.
    assert_equals_plain(lambda: WritingNet(make), bitwise=False)


def test_what_a_layer_returns_is_what_it_was_given() -> None:
    class Returning(Block):
        def forward(self, x: Tensor, notes: Notes) -> tuple[Tensor, Notes]:
            notes.number += 1
            return super().forward(x), notes

    class ReturningNet(Net):
        def run(self, x: Tensor) -> Tensor:
            first = notes = Notes()
            for block in self.blocks:
                x, notes = block(x, notes)
            assert notes is first
            assert notes.number == 4
            return x

    assert_equals_plain(lambda: ReturningNet(Returning))


# ---- attributes of modules


class TwiceBlock(Block):
    """Returns one tensor twice, or a view of it as well."""

    view = False

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x, {"again": x.view(-1) if self.view else x}


class ViewingBlock(TwiceBlock):
    view = True


class PassingBlock(Block):
    """Returns a view of its input as well."""

    def forward(self, x: Tensor) -> Any:
        return x.view(-1, WIDTH), {"again": self.linear(x.clone())}


class ChangingNet(Net):
    """Writes in place into what a block returned, and goes on from what it returned beside."""

    def run(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x, other = block(x)
            x.mul_(2)
            x = torch.tanh(other["again"].view(-1, WIDTH)) + 1
        return x


@pytest.mark.parametrize(
    "harmony",
    [{}, {"residency": "kept", "device_memory_gib": 1.0}, {"micro_batch": 1}],
    ids=["swapped", "kept", "slices"],
)
def test_one_tensor_that_a_layer_returns_twice_is_one_tensor(harmony: dict[str, Any]) -> None:
    # In slices its gradients are sums over rows, which are regrouped.
    assert_equals_plain(lambda: ChangingNet(TwiceBlock), bitwise="micro_batch" not in harmony, **harmony)


@pytest.mark.parametrize("block", [ViewingBlock, PassingBlock])
@pytest.mark.parametrize("residency", ["off", "kept"])
def test_writing_into_a_result_whose_memory_another_or_an_input_shows_is_refused(block: Any, residency: str) -> None:
    match = "changed in place after"
    assert_refused(lambda: ChangingNet(block), match, residency=residency, device_memory_gib=1.0)


class HalvesBlock(Block):
    """Returns parts of one tensor that have no element in common."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x[:, :2], x[:, 2:]


class HalvesNet(Net):
    """Writes into one of them."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            few, more = block(x)
            few += 1
            more[:, 0].mul_(2)
            x = torch.tanh(torch.cat([few, more], 1))
        return x


@pytest.mark.parametrize("residency", ["off", "kept"])
def test_results_without_an_element_in_common_may_be_written_to(residency: str) -> None:
    assert_equals_plain(lambda: HalvesNet(HalvesBlock), residency=residency, device_memory_gib=1.0)


class AuxiliaryBlock(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.aux_loss = x.pow(2).mean()
        return x


class AuxiliaryNet(Net):
    def __init__(self) -> None:
        super().__init__(AuxiliaryBlock)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = super().forward(x, y)["loss"]
        return {"loss": loss + 0.1 * sum(block.aux_loss for block in self.blocks)}


class ListingNet(Net):
    """Layers append to a list of the model; the model keeps every hidden state on an attribute."""

    def __init__(self) -> None:
        listed: list[Tensor] = []

        class Listing(Block):
            def __init__(self, number: int) -> None:
                super().__init__(number)
                self.losses = listed

            def forward(self, x: Tensor) -> Tensor:
                x = super().forward(x)
                self.losses.append(x.pow(2).mean())
                return x

        super().__init__(Listing)
        self.losses = listed
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.losses.clear()
        self.hidden = []
        for block in self.blocks:
            x = block(x)
            self.hidden.append(x)
        assert len(self.losses) == len(self.hidden) == 4
        return {"loss": F.mse_loss(self.head(x), y) + 0.1 * sum(self.losses) + 0.1 * self.hidden[1].mean()}


class ContextNet(Net):
    """Tells its layers what to do by attributes that it sets for the time of a forward pass."""

    class Told(Block):
        scale: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    def __init__(self) -> None:
        super().__init__(self.Told)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale = x.detach().abs().mean()
        x = super().run(x)
        for block in self.blocks:
            del block.scale
        return x


@pytest.mark.parametrize(
    ("make", "pack"),
    [(AuxiliaryNet, 1), (AuxiliaryNet, 100), (ListingNet, 1), (ListingNet, 2), (ContextNet, 1), (ContextNet, 100)],
)
def test_tensors_on_attributes(make: Callable[[], nn.Module], pack: int) -> None:
    assert_equals_plain(make, bitwise=make is ContextNet, pack_layers=pack)


def test_attributes_hold_in_the_end_what_the_last_forward_pass_left() -> None:
    model = assert_equals_plain(AuxiliaryNet, bitwise=False)
    assert all(block.aux_loss.shape == () for block in model.blocks)


# ---- activations that a hook or a closure carries out of a layer


class CapturingNet(Net):
    """The loss takes an activation that a hook on an inner module of block `of` has seen."""

    def __init__(self, of: int, detached: bool = False) -> None:
        super().__init__()
        self.of = of
        self.detached = detached
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Any:
        seen: list[Tensor] = []

        def look(module: nn.Module, given: Any, made: Tensor) -> None:
            seen.append(made.detach() if self.detached else made)

        handle = self.blocks[self.of].linear.register_forward_hook(look)
        loss = super().forward(x, y)["loss"]
        handle.remove()
        return {"loss": loss + 0.1 * seen[0].pow(2).mean()}


def test_an_activation_that_a_hook_carries_out_without_its_graph() -> None:
    assert_equals_plain(lambda: CapturingNet(1, detached=True))


def test_an_activation_that_a_hook_carries_out_is_refused_by_the_layers_name() -> None:
    assert_refused(lambda: CapturingNet(1), match=r"blocks\.1")


# ---- torch.utils.checkpoint


class CheckpointingBlock(Block):
    def __init__(self, number: int, reentrant: bool) -> None:
        super().__init__(number)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return torch.sigmoid(made) * 2 - 1

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2) + torch.tanh(self.linear(x))


class CheckpointingNet(Net):
    """Checkpoints around its layers, within them, or around several; with operations behind them."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__(lambda number: CheckpointingBlock(number, reentrant) if where == "within" else Block(number))
        self.where = where
        self.reentrant = reentrant
        self.entry = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks[:2] if self.where == "several" else self.blocks:
            x = block(x) if self.where == "within" else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x * 1.5 + 0.1
        if self.where == "several":
            x = checkpoint(lambda h: self.blocks[3](self.blocks[2](h)).exp(), x, use_reentrant=self.reentrant) + 1
        return x


@pytest.mark.parametrize(
    ("where", "reentrant", "pack"), pairs(["around", "within", "several"], [True, False], [1, 100])
)
def test_checkpoints_within_a_model(where: str, reentrant: bool, pack: int) -> None:
    assert_equals_plain(lambda: CheckpointingNet(where, reentrant), pack_layers=pack)


def test_a_reentrant_checkpoint_gives_no_gradient_without_an_argument_that_needs_one() -> None:
    class First(Net):
        def run(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model = assert_equals_plain(First)
    assert torch.equal(model.blocks[0].linear.weight, built(First).blocks[0].linear.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_elsewhere_are_recomputed_as_ever(reentrant: bool) -> None:
    runs = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert len(runs) == 2


# ---- inputs that are changed in place


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_inputs_that_layers_change_in_place(returned: bool, first: bool) -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Any:
            x += torch.tanh(self.linear(x * 1.0))
            return x if returned else None

    class InPlaceNet(Net):
        def __init__(self) -> None:
            super().__init__(InPlace)
            self.entry = nn.Linear(WIDTH, WIDTH)

        def run(self, x: Tensor) -> Tensor:
            x = x.clone() if first else self.entry(x)
            for block in self.blocks:
                made = block(x)
                assert made is (x if returned else None)
            return x * 2

    assert_equals_plain(InPlaceNet)


class GivenBlock(Block):
    """Plain PyTorch saves neither of its arguments for the backward pass."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.relu(x)) + shift)


class WrittenBehindNet(Net):
    """Writes into what it has given to its blocks, behind each call; `later`: not for the first micro-batch."""

    def __init__(self, later: bool = False) -> None:
        super().__init__(GivenBlock)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.later = later

    def run(self, x: Tensor) -> Tensor:
        writes = not (self.later and torch.equal(x, GROUPS[0][0]["x"]))
        x, shift = self.entry(x), torch.zeros(1)
        for block in self.blocks:
            made = block(x, shift)
            if writes:
                x += made
                shift += 0.5
        return x * 2


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize(
    "harmony", [{}, {"residency": "kept", "device_memory_gib": 1.0}], ids=["swapped", "graphs kept"]
)
def test_what_layers_were_given_may_be_changed_in_place_behind_them(pack: int, harmony: dict[str, Any]) -> None:
    assert_equals_plain(WrittenBehindNet, pack_layers=pack, **harmony)


def test_slices_of_layers_whose_input_is_changed_in_place_behind_them() -> None:
    assert_equals_plain(WrittenBehindNet, bitwise=False, micro_batch=1)


def test_an_input_changed_in_place_behind_its_layer_that_was_not_when_the_model_was_measured_is_refused() -> None:
    assert_refused(lambda: WrittenBehindNet(later=True), "was changed in place after the layer was called")


def test_a_checkpoint_around_the_engine_is_refused() -> None:
    with training(Net) as (model, engine):
        before = weights_of(model)
        batch = GROUPS[0][0]
        with pytest.raises(UsageError, match="called within a checkpoint of"):
            checkpoint(lambda x: engine(x=x, y=batch["y"]), batch["x"].clone().requires_grad_(), use_reentrant=False)
        assert_same(model, before, bitwise=True)
        engine.train_batch(iter(GROUPS[0]))


def test_layers_that_are_skipped_by_chance_from_within() -> None:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand(()) < 0.5 else super().forward(x + torch.randn_like(x))

    class DroppedNet(Net):
        def __init__(self) -> None:
            super().__init__(Dropped)
            self.entry = nn.Linear(WIDTH, WIDTH)

        def run(self, x: Tensor) -> Tensor:
            return super().run(self.entry(x))

    assert_equals_plain(DroppedNet)
