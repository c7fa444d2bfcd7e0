"""Gradients stop at a cut, and go to its targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harmony_ds.errors import ModelError
from harmony_ds.model.graph_cut import cut, in_autograd_function
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


ANSWERS: list[bool] = []  # of `in_autograd_function`, in the order of the calls that asked


def ask(x: Tensor) -> Tensor:
    ANSWERS.append(in_autograd_function())
    return x.clone()


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ask(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ask(gradient)


class Inheriting(WithContext):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ask(gradient)


class CastFirst(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ask(x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ask(gradient)


class WithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ask(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ask(gradient)


class AskingFirst(WithoutContext):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ask(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass


@pytest.mark.parametrize("function", [WithContext, Inheriting, CastFirst, WithoutContext, AskingFirst])
def test_forwards_of_autograd_functions_are_known_while_they_run(function: type[torch.autograd.Function]) -> None:
    ANSWERS.clear()
    x = torch.ones(2, requires_grad=True)
    y = function.apply(x)  # type: ignore[no-untyped-call]
    assert ANSWERS == [True]
    y.sum().backward()
    assert ANSWERS == [True, False]  # a backward pass is another matter


def test_a_function_defined_later_is_known_and_a_modules_forward_is_none() -> None:
    class Asking(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ask(x)

    ANSWERS.clear()
    Asking()(torch.ones(2))

    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return Asking()(x)

    Later.apply(torch.ones(2))  # type: ignore[no-untyped-call]
    ask(torch.ones(2))
    assert ANSWERS == [False, True, False]
