"""Gradients stop at a cut, go to its sinks, and run through the code between the cuts once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from harmony_ds.calls.boundary import InterLayerGraph, InterLayerSink, Slot, cut, sinks_of
from harmony_ds.errors import ModelError


def slots_for(*tensors: Tensor) -> list[Slot]:
    return [Slot(call, tensor) for call, tensor in enumerate(tensors)]


def test_cut_tensors_require_gradients_and_share_memory() -> None:
    x = torch.ones(3)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)

    assert y.requires_grad
    assert y.data_ptr() == x.data_ptr()
    assert not y.is_leaf
    assert sinks_of(y.grad_fn) is slots
    assert not x.requires_grad


def test_a_backward_pass_stops_at_the_cut_with_each_gradient_in_its_sink() -> None:
    weight = torch.ones(3, requires_grad=True)
    made = [weight * 2, weight * 3, weight * 4]
    slots = slots_for(*made)
    first, second, _ = cut([t.detach() for t in made], slots)
    (first * 5 + second * 7).sum().backward()

    assert weight.grad is None
    gradients = [slot.take() for slot in slots]
    assert gradients[0].tolist() == [5.0] * 3
    assert gradients[1].tolist() == [7.0] * 3
    assert gradients[2] is None


def test_a_slot_sums_out_of_place_and_is_empty_once_taken() -> None:
    slot = Slot(4, torch.ones(2, dtype=torch.float64))
    shared = torch.ones(2)
    slot.add(shared)
    slot.add(shared)

    assert slot.take().tolist() == [2.0, 2.0]
    assert slot.take() is None
    assert shared.tolist() == [1.0, 1.0]
    assert (slot.call, slot.nbytes) == (4, 16)


def test_a_cut_works_while_gradients_are_off() -> None:
    x = torch.ones(2)
    with torch.no_grad():
        (y,) = cut([x.detach()], slots_for(x))

    assert y.requires_grad


def test_cutting_nothing_gives_nothing() -> None:
    assert cut([], []) == ()


def test_a_cut_tensor_may_be_changed_in_place() -> None:
    x = torch.ones(2)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)
    y.mul_(3).sum().backward()

    assert slots[0].take().tolist() == [3.0, 3.0]


def test_an_untouched_output_leads_straight_to_its_slot() -> None:
    x = torch.ones(2)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)
    inter_layer = InterLayerGraph()

    assert inter_layer.sink(y) is slots[0]
    assert inter_layer.is_trivial


def test_the_inter_layer_graph_passes_a_gradient_on_when_it_is_due() -> None:
    x = torch.ones(2)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)
    inter_layer = InterLayerGraph()
    sink = inter_layer.sink(y * 3)
    assert isinstance(sink, InterLayerSink)
    assert (inter_layer.is_trivial, sink.deadline, sink.nbytes) == (False, 0, 8)

    sink.add(torch.ones(2))
    inter_layer.settle(1)
    assert slots[0].gradient is None
    inter_layer.settle(0)
    assert slots[0].take().tolist() == [3.0, 3.0]
    inter_layer.settle(0)
    assert slots[0].take() is None


def test_what_is_made_from_several_calls_is_due_before_the_newest() -> None:
    x = torch.ones(2)
    slots = slots_for(x, x, x)
    first, _, third = (cut([x.detach()], [slot])[0] for slot in slots)
    inter_layer = InterLayerGraph()

    assert inter_layer.sink(first * third + first).deadline == 2
    assert inter_layer.sink(first + 1).deadline == 0
    assert inter_layer.sink(torch.ones(2, requires_grad=True) * 2).deadline == -1


def test_a_tensor_that_feeds_several_layers_has_one_sink() -> None:
    x = torch.ones(2)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)
    inter_layer = InterLayerGraph()
    made = y * 3
    sink = inter_layer.sink(made)
    assert inter_layer.sink(made) is sink

    sink.add(torch.ones(2))
    sink.add(torch.ones(2))
    inter_layer.settle(-1)
    assert slots[0].take().tolist() == [6.0, 6.0]


def test_inputs_that_share_a_graph_are_settled_one_after_another() -> None:
    x = torch.full((2,), 0.5)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)
    inter_layer = InterLayerGraph()
    common = y.exp()
    left, right = inter_layer.sink(common * 2), inter_layer.sink(common * 3)
    left.add(torch.ones(2))
    inter_layer.settle(0)
    right.add(torch.ones(2))
    inter_layer.settle(0)

    torch.testing.assert_close(slots[0].take(), 5 * x.exp())


def test_gradients_reach_leaves_of_the_inter_layer_graph() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    x = torch.full((3,), 4.0)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)
    inter_layer = InterLayerGraph()
    inter_layer.sink(y * scale).add(torch.ones(3))
    inter_layer.settle(-1)

    assert scale.grad.item() == 12.0
    assert slots[0].take().tolist() == [2.0] * 3


@pytest.mark.parametrize(("made_from_input", "touched"), [(True, True), (False, False)])
def test_whether_a_loss_runs_through_the_inter_layer_graph(made_from_input: bool, touched: bool) -> None:
    x = torch.ones(2)
    (y,) = cut([x.detach()], slots_for(x))
    inter_layer = InterLayerGraph()
    made = y * 3
    inter_layer.sink(made)

    assert inter_layer.touches((made if made_from_input else y * 2).sum()) == touched
    assert not inter_layer.touches(torch.ones(1))


def test_a_gradient_that_comes_too_late_is_an_error() -> None:
    x = torch.ones(2)
    slots = slots_for(x)
    (y,) = cut([x.detach()], slots)
    slots[0].propagated = True
    with pytest.raises(ModelError, match="another micro-batch was computed from it"):
        y.sum().backward()


def test_a_micro_batch_that_is_over_is_kept_by_no_cycle() -> None:
    gc.disable()
    try:
        inter_layer = InterLayerGraph()
        (y,) = cut([torch.ones(2)], [Slot(0, torch.ones(2), inter_layer.origin)])
        made = y.exp()
        inter_layer.sink(made)
        seen = weakref.ref(inter_layer)
        del inter_layer, y, made
        assert seen() is None
    finally:
        gc.enable()


def test_a_tensor_with_the_graph_of_another_micro_batch_is_refused() -> None:
    first, second, other = InterLayerGraph(), InterLayerGraph(), InterLayerGraph()
    first.origin.model = second.origin.model = 1
    other.origin.model = 2
    (y,) = cut([torch.ones(2)], [Slot(0, torch.ones(2), first.origin)])
    for tensor in (y, y * 2):
        first.sink(tensor)
        other.sink(tensor)
        with pytest.raises(ModelError, match="graph of another micro-batch"):
            second.sink(tensor)
