"""`torch.compile` around layers: it cannot trace into a layer call, so the layer's own forward is compiled instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class CompileRequests:
    """Compilers wanted for layers of one model: by `torch.compile(module)` or `module.compile()` of modules around them."""

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        # The innermost first. A layer that is a `torch.compile(module)` has a compiled forward already.
        self._around = {
            layer: [modules[name] for name in _around(layer) if name in modules]
            for layer in layers
            if "dynamo_ctx" not in vars(modules[layer])
        }
        self._all = set().union(*self._around.values())

    def compilers(self) -> dict[str, Compiler | None]:
        """Return each layer's compiler as of now; empty if none is wanted."""
        found = {module: compiler for module in self._all if (compiler := _compiler_of(module)) is not None}
        if not found:
            return {}
        return {layer: next((found[m] for m in around if m in found), None) for layer, around in self._around.items()}


def _around(layer: str) -> list[str]:
    parts = layer.split(".") if layer else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _compiler_of(module: nn.Module) -> Compiler | None:
    """Return the compiler of a `torch.compile(module)`, or after `module.compile()`; dynamo is not imported (seconds)."""
    own = vars(module)
    compiled = own.get("_compiled_call_impl")
    if compiled is None or "dynamo_ctx" in own:
        return own.get("dynamo_ctx")
    in_place: Compiler = inspect.getclosurevars(compiled).nonlocals["self"]
    return in_place
