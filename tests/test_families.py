"""The test models themselves: every family trains, deterministically, and depends on its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.families import FAMILIES, MODULES, Family
from tests.oracle import assert_same, largest_difference, loss_in, train_plainly, train_plainly_half

EVERY_FAMILY = [pytest.param(family, id=family.name) for family in FAMILIES + MODULES]
WITHOUT_DROPOUT = {"resnet", "mamba"}
MAIN_INPUTS = ("input_ids", "input_features", "pixel_values", "inputs", "left", "words")


def seed_of(step: int, position: int) -> int:
    return 100 * step + position


def forward_loss(model: nn.Module, batch: dict[str, Any]) -> float:
    torch.manual_seed(0)
    with torch.no_grad():
        return loss_in(model(**batch)).item()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_family_trains_and_looks_at_all_that_it_is_given(family: Family) -> None:
    """Or what the engine is compared with would be equal whatever the engine did."""
    torch.manual_seed(7)
    without, with_dropout = family.build(0.0), family.build(0.5)
    batches = [family.batch(index) for index in range(4)]
    drawn = torch.rand(4)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(4)), "building moves the global random numbers"

    assert_same(without, with_dropout, bitwise=True)
    losses = [forward_loss(without, batch) for batch in batches]
    assert len(set(losses)) == 4
    assert (losses[0] == forward_loss(with_dropout, batches[0])) == (family.name in WITHOUT_DROPOUT)
    main_input = next(name for name in MAIN_INPUTS if name in batches[0])
    assert losses[0] != forward_loss(without, batches[0] | {main_input: batches[0][main_input].flip(-1)})
    for once, again in zip(batches, [family.batch(index) for index in range(4)], strict=True):
        assert_same_batches(once, again)


def assert_same_batches(once: dict[str, Any], again: dict[str, Any]) -> None:
    assert once.keys() == again.keys()
    for name, value in once.items():
        assert torch.equal(value, again[name]) if isinstance(value, Tensor) else value == again[name]


class Line(nn.Module):
    """slope * x, squared: small enough to train by hand."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.slope * x, torch.zeros_like(x))


def test_plain_training_by_hand() -> None:
    """Gradient of (slope x)^2 is 2 slope x^2: the mean over x = 1 and x = 2 is 5 slope = 10, clipped to 1."""
    model = Line(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    group = [{"x": torch.tensor(1.0)}, {"x": torch.tensor(2.0)}]

    losses = train_plainly(model, [group, group], optimizer, clip=1.0, seed_of=seed_of, scheduler=scheduler)

    assert losses == [[4.0, 16.0], [pytest.approx(2.25), pytest.approx(9.0)]]
    assert model.slope.item() == pytest.approx(2.0 - 0.5 - 0.25)


def test_bf16_masters_keep_what_the_model_rounds_away_and_gradients_are_summed_in_fp32() -> None:
    """Below 1.0 bf16 counts in steps of 2^-8: a step of 2^-10 is invisible, three of them are not. 256 + 1 is 256."""

    def run(start: float, squares: tuple[float, ...], steps: int, rate: float) -> tuple[float, float]:
        model = Line(start)
        # Each gradient is twice the square, over their number.
        group = [{"x": torch.tensor(value**0.5, dtype=torch.bfloat16)} for value in squares]
        ran = train_plainly_half(
            model, [group] * steps, lambda masters: torch.optim.SGD(masters, lr=rate), clip=None, seed_of=seed_of
        )
        return ran.masters["slope"].item(), model.slope.item()

    assert run(1.0, (1.0,), 3, 2.0**-11) == (1.0 - 3 * 2.0**-10, 1.0 - 2.0**-8)
    assert run(1.0, (256.0, 1.0), 1, 1.0)[0] == 1.0 - 257.0
    assert run(1.0 + 2.0**-12, (), 0, 1.0) == (1.0 + 2.0**-12, 1.0)


def test_assert_same_names_the_worst_tensor() -> None:
    expected = {"a": torch.ones(2, 3), "b": torch.full((4,), 100.0), "c": torch.tensor(3)}
    actual = {name: tensor.clone() for name, tensor in expected.items()}
    actual["a"][1, 2] += 0.5
    actual["b"][0] += 1.0

    assert largest_difference(actual, expected) == {"a": (0.5, 0.5), "b": (1.0, 0.01), "c": (0.0, 0.0)}
    with pytest.raises(AssertionError, match=r"2 of 3 tensors differ.*Worst is a\[1, 2\]: 1\.5, expected 1\.0"):
        assert_same(actual, expected, bitwise=True)
    with pytest.raises(AssertionError, match=r"1 of 3 tensors differ"):
        assert_same(actual, expected, bitwise=False, relative=0.1)
    assert_same(actual, expected, bitwise=False, relative=0.5)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("actual", "expected", "bitwise"),
    [(0.0, -0.0, True), (1.0, 1.0 + 2.0**-23, True)]
    + [(*pair, bitwise) for pair in ((NAN, 1.0), (1.0, NAN), (INF, 1.0)) for bitwise in (True, False)],
)
def test_bitwise_sees_every_bit_and_a_tolerance_forgives_no_nan(actual: float, expected: float, bitwise: bool) -> None:
    with pytest.raises(AssertionError, match="1 of 1 tensors differ"):
        assert_same({"a": torch.tensor(actual)}, {"a": torch.tensor(expected)}, bitwise)


def test_assert_same_wants_the_same_names_shapes_and_dtypes() -> None:
    with pytest.raises(AssertionError, match=r"missing tensors: \['b'\]; unexpected tensors: \['a'\]"):
        assert_same({"a": torch.ones(1)}, {"b": torch.ones(1)}, bitwise=True)
    for other in (torch.ones(2), torch.ones(1, dtype=torch.bfloat16)):
        with pytest.raises(AssertionError, match=r"a is .*expected"):
            assert_same({"a": torch.ones(1)}, {"a": other}, bitwise=True)
