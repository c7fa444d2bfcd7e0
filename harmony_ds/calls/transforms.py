"""`torch.func`, forward-mode derivatives and hooks on saved tensors, which cannot see into calls of the engine."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad

from harmony_ds.errors import UnsupportedError

_PLAINLY = "Call the model instead, which computes on the host: engine.module(...)."


def refuse_transforms(call: str = "the engine was called", instead: str = _PLAINLY) -> None:
    """Raises UnsupportedError where the caller has opened one: what it calls runs later, or layer by layer."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        what = "a transform of torch.func (grad, vmap, jvp, jacrev, functional_call within one)"
    elif torch.autograd.forward_ad._current_level >= 0:
        what = "torch.autograd.forward_ad.dual_level (jvp)"
    else:
        return
    raise UnsupportedError(
        f"{call} inside {what}: micro-batches run later and layer by layer, and their derivatives are not the transform's "
        f"to take. {instead}"
    )


def check_saved_tensors(what: str) -> None:
    """Layers are run elsewhere than where they are called, so hooks there on what is saved for backward are not asked.

    Raises:
        UnsupportedError: those around `what` change values, other than torch.autograd.graph.save_on_cpu.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__.startswith("torch."):
        return
    pack, unpack = hooks
    tried = torch.linspace(-1.0, 1.0, 7, device="cpu")
    if not torch.equal(torch.as_tensor(unpack(pack(tried)), device="cpu"), tried):
        raise UnsupportedError(
            f"saved_tensors_hooks around {what} change what is saved for backward. Layers are recomputed for their "
            "backward pass, which does not ask these hooks: open the context inside a layer's forward."
        )
