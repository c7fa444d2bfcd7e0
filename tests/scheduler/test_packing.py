"""Packs are contiguous, counted from the last call, and know their bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.decomposer import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.scheduler.costs import CallCost, CostTable
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Pack
from tests.scheduler.examples import FP32, costs_of, graph_of, pack_uniformly


def pack(graph: LayerGraph, pack_layers: int, element: ElementBytes = FP32) -> tuple[Pack, ...]:
    return pack_uniformly(graph, costs_of(graph.calls), element, pack_layers)


@pytest.mark.parametrize(
    ("pack_layers", "positions"),
    [
        (1, [(0,), (1,), (2,), (3,), (4,)]),
        (2, [(0,), (1, 2), (3, 4)]),
        (3, [(0, 1), (2, 3, 4)]),
        (5, [(0, 1, 2, 3, 4)]),
        (99, [(0, 1, 2, 3, 4)]),
    ],
)
def test_only_the_first_pack_is_smaller(pack_layers: int, positions: list[tuple[int, ...]]) -> None:
    packs = pack(graph_of([16] * 5), pack_layers)

    assert [one.positions for one in packs] == positions
    assert [one.index for one in packs] == list(range(len(positions)))


def test_bytes_are_those_of_aligned_slabs_and_of_a_layer_called_twice_once() -> None:
    (one,) = pack(graph_of([16, 17, 1]), 3, ElementBytes(weight=2, gradient=4))
    (twice,) = pack(graph_of([16, 16], calls=(0, 1, 0)), 3)

    assert one.weight_bytes == 64 + 64 + 64
    assert one.gradient_bytes == 64 + 128 + 64
    assert (twice.layers, twice.weight_bytes) == ((0, 1), 2 * 64)


def test_a_layer_called_in_two_packs_is_owned_by_the_first() -> None:
    first, second = pack(graph_of([16, 16], calls=(0, 1, 0, 1)), 2)

    assert first.parameters == second.parameters == first.owned == ("p0", "p1")
    assert second.owned == ()
    assert second.weight_bytes == second.gradient_bytes == 2 * 64


def tied() -> LayerGraph:
    """An embedding that is the head too, with a block between."""
    layers = (LayerSpec(0, "embed", ("e",)), LayerSpec(1, "block", ("b",)), LayerSpec(2, "head", ("e", "h")))
    specs = tuple(ParameterSpec(name, (16,), True) for name in "ebh")
    return LayerGraph(layers, specs, (0, 1, 2), ())


def test_a_tied_parameter_is_swapped_with_both_packs_and_owned_by_the_first_and_counts_once_in_a_common_one() -> None:
    packs, (one,) = pack(tied(), 1), pack(tied(), 3)

    assert [one.parameters for one in packs] == [("e",), ("b",), ("e", "h")]
    assert [one.owned for one in packs] == [("e",), ("b",), ("h",)]
    assert one.parameters == one.owned == ("e", "b", "h")
    assert one.weight_bytes == 3 * 64


def test_resident_parameters_are_in_no_pack() -> None:
    packs = pack(replace(tied(), unlayered=("e",)), 1)

    assert [one.parameters for one in packs] == [(), ("b",), ("h",)]
    assert [one.weight_bytes for one in packs] == [0, 64, 64]


def test_frozen_parameters_send_no_gradients() -> None:
    graph = graph_of([16, 16])
    frozen = replace(graph, parameters=(graph.parameters[0], replace(graph.parameters[1], trainable=False)))
    (one,) = pack(frozen, 2)

    assert (one.weight_bytes, one.gradient_bytes) == (128, 64)


def test_a_pack_without_any_backward_sends_no_gradients() -> None:
    graph = graph_of([16] * 3)
    costs = CostTable(graph.calls, tuple(CallCost(needs_backward=needs) for needs in (False, False, True)), 0)
    first, second, third = pack_uniformly(graph, costs, FP32, 1)

    assert [one.needs_backward for one in (first, second, third)] == [False, False, True]
    assert [one.gradient_bytes for one in (first, second, third)] == [0, 0, 64]
    assert pack_uniformly(graph, costs, FP32, 2)[1].gradient_bytes == 128


def test_a_pack_without_any_backward_leaves_its_parameters_to_the_first_pack_with_one() -> None:
    """A layer that is called under no_grad first, and for training later."""
    graph = graph_of([16], calls=(0, 0))
    costs = CostTable(graph.calls, (CallCost(), CallCost(needs_backward=True)), 0)

    assert [one.owned for one in pack_uniformly(graph, costs, FP32, 1)] == [(), ("p0",)]
