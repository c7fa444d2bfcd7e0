"""What is kept of the tensors that a layer call was given, so that the layer can be run over them again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.own_memory import memory
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.offload.stash import Stash, StashEntry


@dataclass(slots=True, eq=False)  # not frozen, as what else is made for each layer call
class Kept:
    """A tensor argument of `layer` that stays where it is, and its version and its memory when the layer was called.

    Attributes:
        tensor: an alias of the argument, which layers are run over.
    """

    tensor: Tensor
    version: int
    layer: str
    memory: int | None

    @staticmethod
    def of(tensor: Tensor, layer: str) -> Kept:
        """`tensor`, as it is now."""
        return Kept(tensor.detach(), tensor._version, layer, memory(tensor))

    def to_run_over(self) -> Tensor:
        """What a layer is run over: the same alias for all, unless a layer has left something on it."""
        tensor = self.tensor
        if tensor.requires_grad or tensor.grad is not None or tensor.__dict__:
            tensor = self.tensor = tensor.detach()
        return tensor

    def still_is(self, tensor: Tensor) -> bool:
        """Whether an alias of `tensor`, of which it was one, would be the same now.

        Raises:
            UnsupportedError: a layer that was given it has asked for its gradient.
        """
        own = self.tensor
        if own.is_leaf and (own.requires_grad or own.grad is not None):
            raise UnsupportedError(
                f"several layers are given one tensor ({self.layer} first), and one of them asks for its gradient "
                "(requires_grad_() or .grad of it), which the next ones would not see: layers run over tensors of their "
                "own. Let it require a gradient in the model's forward, before the first layer that takes it, or ask for "
                "that of a detached one in the layer (m = m.detach().requires_grad_())."
            )
        if tensor.requires_grad or tensor._version != self.version or self.memory is None:
            return False
        # tensor.data = ... changes no version
        return tensor.data_ptr() == own.data_ptr() and tensor.shape == own.shape and tensor.stride() == own.stride()

    def check(self) -> None:
        """Raises ModelError if it has been changed in place, so that the layer cannot be run again over it."""
        if self.tensor._version != self.version or memory(self.tensor) != self.memory:
            raise ModelError(
                f"an argument of layer {self.layer} was changed in place after the layer was called, so the layer cannot "
                "be recomputed. Make the operation out of place."
            )


class Keeping:
    """Keeps what gradients flow through in the stash, and the rest where it is.

    What a layer made is large and its micro-batch's alone; what inter-layer operations made (masks, position ids, rotary
    tables) is small and taken by every layer.
    """

    def __init__(self, stash: Stash) -> None:
        self._stash = stash

    def keep(self, tensor: Tensor, layer: str) -> StashEntry | Kept:
        """`tensor`, which `layer` is called with.

        Raises:
            UnsupportedError: it is not dense.
        """
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"layer {layer} is given a tensor of layout {tensor.layout}, whose memory the engine cannot keep for the "
                "layer's backward pass. Give it a dense one, or the parts of a sparse one (indices and values), and put "
                "them together in the layer's forward."
            )
        return self._stash.put(tensor, layer) if tensor.requires_grad else Kept.of(tensor, layer)

    def keep_all(
        self, tensors: list[Tensor], known: Iterable[Kept | None], layer: str
    ) -> tuple[list[StashEntry | Kept], list[Tensor]]:
        """All of `tensors`, and what the layer runs over.

        Args:
            known: for each, what is kept of it for an earlier call that was given it too; empty: nothing is known of one.
        """
        kept: list[Any] = [*known] or [None] * len(tensors)
        inputs: list[Any] = [None] * len(tensors)
        for place, tensor in enumerate(tensors):
            one = kept[place]
            if one is None or not one.still_is(tensor):
                one = kept[place] = self.keep(tensor, layer)
            inputs[place] = one.to_run_over() if type(one) is Kept else tensor.detach()
        return kept, inputs

    def tensors(self, kept: Iterable[StashEntry | Kept], apart: bool) -> list[Tensor]:
        """What the layer is run again over; `apart`: in memory of its own, as the layer writes into it.

        Raises:
            ModelError: one has been changed in place since.
        """
        tensors = [self._tensor(one) for one in kept]
        return [t.clone() for t in tensors] if apart else tensors

    def _tensor(self, kept: StashEntry | Kept) -> Tensor:
        if isinstance(kept, StashEntry):
            return self._stash.tensor(kept).detach()
        if kept.tensor._version != kept.version:
            kept.check()
        return kept.to_run_over()

    def release(self, entry: StashEntry) -> None:
        """One call is done with `entry`."""
        self._stash.release(entry)
