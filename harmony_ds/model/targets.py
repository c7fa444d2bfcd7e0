"""Where gradients go that leave one piece of a cut graph: the targets of cut nodes, one for each tensor.

OutputGradient       an output of a layer call: its gradient is kept until the call's backward pass, which begins from it
InterLayerGradient   an input that code between layers has computed: kept until that code's graph is propagated through
SliceTarget          an input of a call in slices (`slices`): puts the slices' gradients together for one of the above
GradientSum          only adds up; what the others are made of, and the inputs of a call that is run to be measured
RejectGradient       an end of a graph that is discarded: a gradient that arrives there is an error
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from harmony_ds.errors import ModelError


class GradientTarget(Protocol):
    """What a cut node hands the gradients of one tensor to, one from each use of the tensor."""

    def add(self, gradient: Tensor) -> None:
        """Receive a gradient, during a backward pass."""

    def pop(self) -> Tensor | None:
        """Return the sum of what was received, and keep it no longer; None: nothing was."""


Targets = list[GradientTarget | None]


class GradientSum:
    """The gradient of one tensor, added up from the gradients of its uses; it has the tensor's shape, dtype and device."""

    __slots__ = ("device", "dtype", "gradient", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.gradient: Tensor | None = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def add(self, gradient: Tensor) -> None:
        # Out of place: autograd may hand the same tensor to several targets.
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def pop(self) -> Tensor | None:
        gradient, self.gradient = self.gradient, None
        return gradient


class OutputGradient(GradientSum):
    """The gradient of one output of a layer call, with which the backward pass of that call begins.

    Attributes:
        call: the number of the call in its micro-batch.
        propagated: whether the call has been propagated through, so that another gradient would be lost.
    """

    __slots__ = ("call", "propagated")

    def __init__(self, call: int, output: Tensor) -> None:
        super().__init__(output)
        self.call = call
        self.propagated = False

    def add(self, gradient: Tensor) -> None:
        if self.propagated:
            raise ModelError(
                f"a gradient came to an output of layer call {self.call} of a micro-batch after that had been propagated "
                f"through, and would be lost: another micro-batch was computed from it, or its step is over. Detach what "
                "goes from one micro-batch to another (state = state.detach())."
            )
        super().add(gradient)


class InterLayerGradient(GradientSum):
    """The gradient of a layer input that code between layers has computed; due before the backward of call `deadline`."""

    __slots__ = ("deadline",)

    def __init__(self, deadline: int, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.deadline = deadline


class RejectGradient:
    """Target that raises, at the ends of a graph that is discarded: a gradient there has bypassed the layer's outputs."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def add(self, gradient: Tensor) -> None:
        raise ModelError(
            f"a gradient reaches layer {self.layer} by a tensor that left it neither as a result nor in an argument (an "
            "attribute of a module, a hook, a closure, a global variable or torch.nn.utils.parametrize.cached() holds it), "
            "and would be lost: the graph of a layer lives only while the layer runs. Let the layer return that tensor, or "
            "detach it (a state for the next call: use_cache=False); open parametrize.cached() within the layer."
        )

    def pop(self) -> Tensor | None:
        return None
