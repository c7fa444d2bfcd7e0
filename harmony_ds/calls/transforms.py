"""Refusal of `torch.func`, forward-mode derivatives and saved-tensor hooks around calls of the engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad

from harmony_ds.errors import UnsupportedError


def refuse_transforms(layer: str | None = None) -> None:
    """Raise UnsupportedError if one is open around a call of the engine, or of `layer`, which runs later.

    Hooks on saved tensors that change no values are allowed (torch.autograd.graph.save_on_cpu).
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and torch.is_grad_enabled() and not hooks[0].__module__.startswith("torch."):
        _check_values(*hooks, "a call of the engine" if layer is None else f"the call of layer {layer}")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        what = "a transform of torch.func (grad, vmap, jvp, jacrev, functional_call within one)"
    elif torch.autograd.forward_ad._current_level >= 0:
        what = "torch.autograd.forward_ad.dual_level (jvp)"
    else:
        return
    call, instead = "the engine was called", "Call the model instead, which computes on the host: engine.module(...)."
    if layer is not None:
        call = f"layer {layer} is called"
        instead = "Transform within one layer's forward, or name a module that contains all of it in harmony.layers."
    raise UnsupportedError(
        f"{call} inside {what}, which cannot differentiate micro-batches that run later, layer by layer. {instead}"
    )


def _check_values(pack: Any, unpack: Any, what: str) -> None:
    tried = torch.linspace(-1.0, 1.0, 7, device="cpu")
    if not torch.equal(torch.as_tensor(unpack(pack(tried)), device="cpu"), tried):
        raise UnsupportedError(
            f"saved_tensors_hooks around {what} change what is saved for backward. Layers are recomputed for their "
            "backward pass, which does not ask these hooks: open the context inside a layer's forward."
        )
