"""What is kept of the tensors that a layer call was given, so that the layer can be run over them again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.offload.stash import Stash, StashEntry


@dataclass(slots=True, eq=False)  # not frozen, as what else is made for each layer call
class SavedTensor:
    """A tensor argument of `layer` that stays where it is, and its version when the layer was called.

    Attributes:
        tensor: an alias of the argument, which the layer is run over.
    """

    tensor: Tensor
    version: int
    layer: str

    def check(self) -> None:
        """Raises ModelError if it has been changed in place, so that the layer cannot be run again over it."""
        if self.tensor._version != self.version:
            raise ModelError(
                f"an argument of layer {self.layer} was changed in place after the layer was called, so the layer cannot "
                "be recomputed. Make the operation out of place."
            )


class SavedInputs:
    """Keeps what gradients flow through in the stash, and the rest where it is.

    What a layer made is large and its micro-batch's alone; what inter-layer operations made (masks, position ids, rotary
    tables) is small and taken by every layer.
    """

    def __init__(self, stash: Stash) -> None:
        self._stash = stash

    def keep(self, tensor: Tensor, layer: str) -> StashEntry | SavedTensor:
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
        return (
            self._stash.put(tensor, layer)
            if tensor.requires_grad
            else SavedTensor(tensor.detach(), tensor._version, layer)
        )

    def tensors(self, kept: Iterable[StashEntry | SavedTensor], apart: bool) -> list[Tensor]:
        """What the layer is run again over; `apart`: in memory of its own, as the layer writes into it.

        Raises:
            ModelError: one has been changed in place since.
        """
        tensors = [self._tensor(one) for one in kept]
        return [t.detach().clone() for t in tensors] if apart else tensors

    def _tensor(self, kept: StashEntry | SavedTensor) -> Tensor:
        if isinstance(kept, StashEntry):
            return self._stash.tensor(kept).detach()
        if kept.tensor._version != kept.version:
            kept.check()
        return kept.tensor

    def release(self, entry: StashEntry) -> None:
        """One call is done with `entry`."""
        self._stash.release(entry)
