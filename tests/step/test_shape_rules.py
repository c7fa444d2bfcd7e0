"""Shapes of outputs that follow from those of arguments."""

from __future__ import annotations

import pytest
import torch

from harmony_ds.step.output_structure import TensorLeaf
from harmony_ds.step.shape_rules import ShapeRules

Sizes = tuple[int, ...]


def learned(*calls: tuple[tuple[Sizes, ...], Sizes]) -> ShapeRules:
    rules = ShapeRules()
    for inputs, output in calls:
        rules.learn(inputs, TensorLeaf((), torch.Size(output), torch.float32, True))
    return rules


@pytest.mark.parametrize(
    ("calls", "inputs", "expected"),
    [
        ([(((8, 12),), (8, 12, 50)), (((4, 15),), (4, 15, 50))], ((6, 20),), (6, 20, 50)),
        ([(((8, 12), (8,)), (8, 11)), (((4, 15), (4,)), (4, 14))], ((6, 20), (6,)), (6, 19)),
        ([(((8, 12),), (96, 50)), (((4, 15),), (60, 50))], ((6, 20),), (120, 50)),
        ([(((8, 12),), (8, 24)), (((4, 16),), (4, 32))], ((6, 20),), (6, 40)),
        ([(((8, 12),), (8, 3)), (((4, 16),), (4, 4))], ((6, 20),), (6, 5)),
        ([(((8, 12),), (8, 3)), (((4, 16),), (4, 4))], ((6, 21),), None),
        ([(((8, 12),), (8, 12, 50))], ((8, 13),), None),
        ([(((8, 12),), (8, 12, 50)), (((8, 15),), (8, 15, 50))], ((4, 20),), None),
        ([(((8, 12),), (8, 12, 50)), (((8, 15),), (8, 15, 50))], ((8, 20),), (8, 20, 50)),
        ([(((8, 12),), (8, 7)), (((4, 15),), (4, 7)), (((4, 16),), (4, 9))], ((6, 20),), None),
        ([(((8, 12),), (8, 12)), (((4, 15),), (4, 15, 1))], ((6, 20),), None),
        ([(((8, 12),), (8, 12)), (((4, 15),), (4, 15))], ((6, 20, 1),), None),
    ],
)
def test_sizes_follow_the_arguments_where_all_rules_that_calls_leave_agree(
    calls: list[tuple[tuple[Sizes, ...], Sizes]], inputs: tuple[Sizes, ...], expected: Sizes | None
) -> None:
    assert learned(*calls).shape(inputs, ()) == expected


def test_a_number_is_one_whatever_is_given_until_it_is_none() -> None:
    assert learned((((1, 4),), ())).number(()) == ()
    assert learned((((1, 4),), ()), (((2, 4),), (2,)), (((1, 4),), ())).number(()) is None
