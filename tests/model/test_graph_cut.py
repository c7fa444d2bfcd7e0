"""Gradients stop at a cut, and go to its targets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harmony_ds.errors import ModelError
from harmony_ds.model.graph_cut import cut
from harmony_ds.model.targets import OutputGradient


def output_gradients_for(*tensors: Tensor) -> list[OutputGradient]:
    return [OutputGradient(call, tensor) for call, tensor in enumerate(tensors)]


def test_a_backward_pass_stops_at_the_cut_with_each_gradient_at_its_target() -> None:
    weight = torch.ones(3, requires_grad=True)
    made = [weight * 2, weight * 3, weight * 4]
    output_gradients = output_gradients_for(*made)
    first, second, third = cut([t.detach() for t in made], output_gradients)
    assert third.requires_grad and not third.is_leaf
    assert third.data_ptr() == made[2].data_ptr()
    (first * 5 + second * 7).sum().backward()

    assert weight.grad is None
    gradients = [output_gradient.pop() for output_gradient in output_gradients]
    assert gradients[0].tolist() == [5.0] * 3
    assert gradients[1].tolist() == [7.0] * 3
    assert gradients[2] is None


def test_an_output_gradient_sums_out_of_place_and_is_empty_once_taken() -> None:
    output_gradient = OutputGradient(4, torch.ones(2, dtype=torch.float64))
    shared = torch.ones(2)
    output_gradient.add(shared)
    output_gradient.add(shared)

    assert output_gradient.pop().tolist() == [2.0, 2.0]
    assert output_gradient.pop() is None
    assert shared.tolist() == [1.0, 1.0]
    assert (output_gradient.call, output_gradient.nbytes) == (4, 16)


def test_a_gradient_that_comes_too_late_is_an_error() -> None:
    x = torch.ones(2)
    output_gradients = output_gradients_for(x)
    (y,) = cut([x.detach()], output_gradients)
    output_gradients[0].propagated = True
    with pytest.raises(ModelError, match="another micro-batch was computed from it"):
        y.sum().backward()
