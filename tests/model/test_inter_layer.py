"""Gradients run through the code between the cuts once, when they are due."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor

from harmony_ds.model.graph_cut import cut
from harmony_ds.model.inter_layer import InterLayerGraph
from harmony_ds.model.targets import InterLayerGradient, OutputGradient


def one_output(x: Tensor) -> tuple[Tensor, OutputGradient, InterLayerGraph]:
    """Return the output of a call, cut for the next one, its gradient, and an empty inter-layer graph."""
    output_gradient = OutputGradient(0, x)
    (y,) = cut([x.detach()], [output_gradient])
    return y, output_gradient, InterLayerGraph()


def test_an_untouched_output_leads_straight_to_its_gradient() -> None:
    y, output_gradient, inter_layer = one_output(torch.ones(2))

    assert inter_layer.target(y) is output_gradient
    assert inter_layer.is_trivial


def test_the_inter_layer_graph_passes_a_gradient_on_when_it_is_due() -> None:
    y, output_gradient, inter_layer = one_output(torch.ones(2))
    made = y * 3
    target = inter_layer.target(made)
    assert isinstance(target, InterLayerGradient)
    assert inter_layer.target(made) is target
    assert (inter_layer.is_trivial, target.deadline, target.nbytes) == (False, 0, 8)

    target.add(torch.ones(2))
    inter_layer.propagate_due(1)
    assert output_gradient.gradient is None
    inter_layer.propagate_due(0)
    assert output_gradient.pop().tolist() == [3.0, 3.0]
    inter_layer.propagate_due(0)
    assert output_gradient.pop() is None


def test_a_tensor_made_from_several_calls_is_due_before_the_newest() -> None:
    x = torch.ones(2)
    output_gradients = [OutputGradient(call, x) for call in range(3)]
    first, _, third = (cut([x.detach()], [output_gradient])[0] for output_gradient in output_gradients)
    inter_layer = InterLayerGraph()

    assert inter_layer.target(first * third + first).deadline == 2
    assert inter_layer.target(first + 1).deadline == 0
    assert inter_layer.target(torch.ones(2, requires_grad=True) * 2).deadline == -1


def test_inputs_that_share_a_graph_are_propagated_one_after_another() -> None:
    y, output_gradient, inter_layer = one_output(torch.full((2,), 0.5))
    common = y.exp()
    left, right = inter_layer.target(common * 2), inter_layer.target(common * 3)
    left.add(torch.ones(2))
    inter_layer.propagate_due(0)
    right.add(torch.ones(2))
    inter_layer.propagate_due(0)

    torch.testing.assert_close(output_gradient.pop(), torch.full((2,), 5 * math.exp(0.5)))


@pytest.mark.parametrize(("made_from_input", "touched"), [(True, True), (False, False)])
def test_whether_a_loss_runs_through_the_inter_layer_graph(made_from_input: bool, touched: bool) -> None:
    y, _, inter_layer = one_output(torch.ones(2))
    made = y * 3
    inter_layer.target(made)

    assert inter_layer.touches((made if made_from_input else y * 2).sum()) == touched
    assert not inter_layer.touches(torch.ones(1))


def test_a_finished_micro_batch_is_freed_without_garbage_collection() -> None:
    gc.disable()
    try:
        inter_layer = InterLayerGraph()
        (y,) = cut([torch.ones(2)], [OutputGradient(0, torch.ones(2))])
        made = y.exp()
        inter_layer.target(made)
        seen = weakref.ref(inter_layer)
        del inter_layer, y, made
        assert seen() is None
    finally:
        gc.enable()
