"""Arguments are taken over when a call is made: its micro-batch runs later, and loops use their buffers again."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

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
