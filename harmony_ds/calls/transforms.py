"""`torch.func` and forward-mode derivatives around calls of the engine, which they cannot see into."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad

from harmony_ds.errors import UnsupportedError


def refuse_transforms() -> None:
    """Raises UnsupportedError where the caller has opened one: a call of the engine runs later, on another thread."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        what = "a transform of torch.func (grad, vmap, jvp, jacrev, functional_call within one)"
    elif torch.autograd.forward_ad._current_level >= 0:
        what = "torch.autograd.forward_ad.dual_level (jvp)"
    else:
        return
    raise UnsupportedError(
        f"the engine was called inside {what}: its micro-batches run later and layer by layer, and their derivatives are "
        "not the transform's to take. Call the model instead, which computes on the host: engine.module(...)."
    )
