"""Arguments are taken over when a call is made: its micro-batch runs later, and loops use their buffers again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmony_ds.errors import UnsupportedError
from harmony_ds.runtime.pending import PendingLoss
from harmony_ds.runtime.trees import flatten, unflatten


def take_over(tree: Any) -> Any:
    """`tree` with containers and arrays of its own. What is one tensor stays one, and its gradients reach the caller's."""
    leaves, shape = flatten(tree)
    taken = {id(leaf): _own(leaf) for leaf in leaves}
    return unflatten([taken[id(leaf)] for leaf in leaves], shape)


def _own(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not isinstance(leaf, PendingLoss):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def check_saved_tensors() -> None:
    """Layers are recomputed outside of the call, so hooks on what it saves for backward are not asked.

    Raises:
        UnsupportedError: those around the call change values, other than torch.autograd.graph.save_on_cpu.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__.startswith("torch."):
        return
    pack, unpack = hooks
    tried = torch.linspace(-1.0, 1.0, 7)
    if not torch.equal(torch.as_tensor(unpack(pack(tried))).cpu(), tried):
        raise UnsupportedError(
            "saved_tensors_hooks around a call of the engine change what is saved for backward. Layers are recomputed for "
            "their backward pass, which does not ask these hooks: open the context inside a layer's forward."
        )
