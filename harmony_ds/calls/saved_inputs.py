"""Inputs of layer calls, saved for their recomputation: those that require gradients in the stash, others where they are.

Outputs of layers are large and belong to one micro-batch; masks, position ids and rotary tables are small and used by
every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.errors import UnsupportedError
from harmony_ds.offload.stash import Stash, StashEntry, check_unwritten


@dataclass(slots=True, eq=False)  # not frozen: made for each layer call, and that is faster
class SavedTensor:
    """Alias of a tensor argument of `layer` that is not stashed, and its version when the layer was called."""

    tensor: Tensor
    version: int
    layer: str

    def check(self) -> None:
        """Raise ModelError if the argument has been changed in place, so that the layer cannot be recomputed."""
        check_unwritten(self.tensor, self.version, self.layer)


def save_input(stash: Stash, tensor: Tensor, layer: str) -> StashEntry | SavedTensor:
    """Save `tensor`, an input of `layer`; raise UnsupportedError if it is not dense."""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"layer {layer} is given a tensor of layout {tensor.layout}, which the engine cannot keep for backward. "
            "Give it a dense one, or indices and values of a sparse one, to be put together in the layer's forward."
        )
    if tensor.requires_grad:
        return stash.put(tensor, layer)
    return SavedTensor(tensor.detach(), tensor._version, layer)


def saved_inputs(stash: Stash, kept: Iterable[StashEntry | SavedTensor], apart: bool) -> list[Tensor]:
    """Return the saved inputs, detached; raise ModelError if one was changed in place. `apart`: return copies."""
    tensors = []
    for one in kept:
        if isinstance(one, StashEntry):
            tensors.append(stash.tensor(one).detach())
        else:
            one.check()
            tensors.append(one.tensor)
    return [t.detach().clone() for t in tensors] if apart else tensors
