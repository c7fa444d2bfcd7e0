"""`torch.compile` around layers. It cannot see into a layer call, which is the engine's; so the forward that the engine
runs there is compiled in its place, by the same settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class AskedToCompile:
    """Who asks for layers of one model to be compiled: a `torch.compile(module)` or `module.compile()` around them."""

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        # The innermost first. A layer that is a `torch.compile(module)` has a compiled forward already.
        self._around = {
            layer: [modules[name] for name in _around(layer) if name in modules]
            for layer in layers
            if not _is_compiled(modules[layer])
        }
        self._all = set().union(*self._around.values())

    def by_anybody(self) -> bool:
        """Whether there is a compiler for any layer, as of now."""
        return any(_is_compiled(m) or m.__dict__.get("_compiled_call_impl") is not None for m in self._all)

    def compiler(self, layer: str) -> Compiler | None:
        """What `layer` is to be compiled with, as of now."""
        for module in self._around.get(layer, ()):
            if _is_compiled(module):
                wrapped: Compiler = module.__dict__["dynamo_ctx"]
                return wrapped
            compiled = module.__dict__.get("_compiled_call_impl")
            if compiled is not None:
                in_place: Compiler = inspect.getclosurevars(compiled).nonlocals["self"]
                return in_place
        return None


def _around(layer: str) -> list[str]:
    parts = layer.split(".") if layer else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` returns. (Without importing dynamo, which takes seconds.)"""
    return "dynamo_ctx" in module.__dict__
