"""Which layers can be cut into rows: found out by running them, and said where they cannot."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.model.slices import slicing_of
from harmony_ds.profiling.row_probe import RowProbe
from harmony_ds.profiling.sample import Sample
from harmony_ds.scheduler.rows import RowDims, Rows
from tests.families import InjectedLoss
from tests.runtime.scripted import ScriptedDevice, assembled

SHARED = "its rows depend on each other"
UNTOLD = "where its tensors hold the rows cannot be told from their shapes"
CHANGES = "it changes an input, a buffer or an object that it is given"


class Base(nn.Module):
    """A layer, as it has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class RowByRow(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Centred(Base):
    """Looks at all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(dim=0)) * self.weight


class CentredInTraining(Base):
    """Draws, too, so that slices are compared in evaluation mode; may take the mean as a number."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x * self.weight, 0.5, self.training)
        mean = x.mean(dim=0) if self.training else 0.0
        return x - (mean.detach() if self.detached and isinstance(mean, Tensor) else mean)


class Mean(torch.autograd.Function):
    """Adds `share` of the mean of all rows to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.share * gradient.mean(0), None


class CentredBackward(Base):
    """Looks at all rows when it is propagated through."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return Mean.apply(x * self.weight, self.share)


class Balanced(Base):
    """Has a small loss over all rows of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return InjectedLoss.apply(x * self.weight, 1e-6 * (x * self.weight).softmax(-1).mean(0).square().sum())


class ByFrequency(Base):
    """Its gradient counts how often a row comes."""

    def forward(self, x: Tensor) -> Tensor:
        ids = x.detach().gt(-100.0).long()
        return nn.functional.embedding(ids, self.weight[:, None].expand(4, 2), scale_grad_by_freq=True)


class Numbering(Base):
    """Gives a number beside its rows, which is made of all of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x * self.weight, float(x.detach().abs().mean())


class Noting(Base):
    """Notes a number, or a tensor, that is made of all rows, for the code after it."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        self.mean = mean.item() if self.kind is float else mean
        return x * self.weight


class NotingItsWeight(Base):
    """Notes what is made of its weight alone."""

    def forward(self, x: Tensor) -> Tensor:
        self.largest = self.weight.detach().amax()
        return x * self.weight


class OuterProduct(Base):
    """(rows, rows): two dimensions grow."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight) @ x.T


class Noisy(Base):
    """Draws while it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, self.training)


class Counting(Base):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight


class Constant(Base):
    """Takes nothing with rows."""

    def forward(self, table: Tensor) -> Tensor:
        return table * self.weight


class Net(nn.Module):
    """One layer under test, on x; or on what has no rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.table if isinstance(self.layer, Constant) else x)


def sample_of(model: nn.Module, x: Tensor) -> Sample:
    return Sample(x, model, lambda outputs: None, seed=1)


def probed(model: nn.Module, rows: tuple[int, int] = (2, 3)) -> tuple[Rows, dict[int, str]]:
    """What is found of `model` with so many rows."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    with assembled(model, ScriptedDevice()) as assembly:
        probe = RowProbe(assembly.runtime, assembly.layers)
        probe.probe(sample_of(model, x), rows)
        return probe.found


@pytest.mark.parametrize(
    ("layer", "dims"),
    [(layer, RowDims((0,), (0,), 0)) for layer in (RowByRow(), Noisy(), NotingItsWeight())],
    ids=lambda value: type(value).__name__,
)
def test_layers_whose_rows_are_their_own_can_be_cut(layer: nn.Module, dims: RowDims) -> None:
    found, refused = probed(Net(layer))
    assert found.dims == {0: {((0,), ()): dims}}
    assert refused == {}
    assert found.drawing == ({0} if isinstance(layer, Noisy) else set())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Centred(), SHARED),
        (CentredBackward(0.5), SHARED),
        (ByFrequency(), SHARED),
        (Numbering(), SHARED),
        (Noting(float), SHARED),
        (Noting(Tensor), SHARED),
        (OuterProduct(), UNTOLD),
        (Counting(), CHANGES),
        (Constant(), ""),  # there is nothing to cut, and so nothing to say
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_others_cannot_and_it_is_said_why(layer: nn.Module, reason: str) -> None:
    found, refused = probed(Net(layer))
    assert found.dims == {}
    assert refused == {0: reason}


@pytest.mark.parametrize(
    "layer", [CentredInTraining(detached=False), CentredInTraining(detached=True), CentredBackward(1e-6), Balanced()]
)
def test_rows_that_look_at_others_a_little_or_in_training_alone_are_told(layer: nn.Module) -> None:
    found, refused = probed(nn.Sequential(RowByRow(), layer))
    assert found.dims.keys() == {0}
    assert refused == {1: SHARED}


def test_slices_are_of_the_sizes_asked_for_and_of_the_layers_found() -> None:
    found, _ = probed(Net(Noisy()))
    rows = replace(found, forward=3, backward=2)
    x = torch.ones(5, 4)
    cut = slicing_of(rows, 0, ((0,), ()), [x])
    assert cut is not None
    assert (cut.rows, cut.forward, cut.backward) == (5, 2, 2)  # what draws has the same slices both ways
    assert slicing_of(rows, 1, ((0,), ()), [x]) is None
    assert slicing_of(rows, 0, ((1,), ()), [x]) is None
    assert slicing_of(rows, 0, ((0,), ((1, True),)), [x]) is None  # with a flag that no call has had


class Twice(nn.Module):
    """Calls its layer on x, and on x with the rows elsewhere."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.turned = turned

    def forward(self, x: Tensor) -> Any:
        x = x[:, :, None]
        return self.layer(x).sum() + self.layer(x.transpose(0, 1) if self.turned else x).sum()


@pytest.mark.parametrize("turned", [False, True])
def test_all_calls_of_a_layer_hold_the_rows_in_one_place(turned: bool) -> None:
    found, refused = probed(Twice(turned))
    assert refused == ({0: "its calls hold the rows in different places"} if turned else {})
    assert found.dims == ({} if turned else {0: {((0,), ()): RowDims((0,), (0,), 0)}})


class Alternating(nn.Module):
    """Which layer comes second depends on how many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RowByRow() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1 + x.shape[0] % 2](self.layers[0](x))


def test_calls_that_depend_on_the_rows_are_not_compared() -> None:
    found, refused = probed(Alternating())
    assert found.dims == {0: {((0,), ()): RowDims((0,), (0,), 0)}}
    assert refused == {2: UNTOLD}


def test_probing_leaves_nothing_behind_and_nothing_for_the_garbage_collector() -> None:
    device = ScriptedDevice()
    model = Net(Noisy())
    with assembled(model, device) as assembly:
        before = torch.get_rng_state()
        probe = RowProbe(assembly.runtime, assembly.layers)
        probe.probe(sample_of(model, torch.ones(3, 4)), (2, 3))
        assert device.allocated_bytes() == 0
        assert torch.equal(torch.get_rng_state(), before)
        assert model.layer.training
        gc.collect()
        gc.disable()
        try:
            seen = weakref.ref(probe)
            del probe
            assert seen() is None  # it would hold memory of the device until then
        finally:
            gc.enable()


def test_a_few_rows_are_the_first_ones_repeated_if_need_be_and_what_is_no_row_stays() -> None:
    def few_rows(inputs: Any, rows: int) -> Any:
        return Sample(inputs, lambda inputs: None, lambda outputs: None, seed=1).few(rows).inputs

    table, number = torch.arange(7), torch.tensor(1.0)
    few = few_rows({"x": torch.arange(8).reshape(4, 2), "n": 3, "y": [torch.arange(4)], "rest": (table, number)}, 2)
    assert few["x"].tolist() == [[0, 1], [2, 3]]
    assert few["y"][0].tolist() == [0, 1]
    assert few["n"] == 3
    assert few["rest"][0] is table and few["rest"][1] is number
    assert few_rows((torch.tensor([5, 6]),), 5)[0].tolist() == [5, 6, 5, 6, 5]
    assert few_rows((torch.empty(0, 3),), 2)[0].shape == (0, 3)
