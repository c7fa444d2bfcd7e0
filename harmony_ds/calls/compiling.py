"""`torch.compile` around layers: it cannot trace into a layer call, so the layer's own forward is compiled instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from torch import nn

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class CompileRequests:
    """Compilers wanted for layers of one model: by `torch.compile(module)` or `module.compile()` of modules around them."""

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._inside: dict[nn.Module, list[str]] = {}  # layers by modules around them, outer modules first
        for layer in layers:
            if "dynamo_ctx" not in vars(modules[layer]):  # else it has a compiled forward already
                for around in accumulate(["", *layer.split(".")], lambda outer, name: f"{outer}.{name}".strip(".")):
                    self._inside.setdefault(modules[around], []).append(layer)

    def compilers(self) -> dict[str, Compiler]:
        """Return the compilers of layers as of now: that of the innermost module counts."""
        found: dict[str, Compiler] = {}
        for module, inside in self._inside.items():
            if (compiler := _compiler_of(module)) is not None:
                found |= dict.fromkeys(inside, compiler)
        return found


def _compiler_of(module: nn.Module) -> Compiler | None:
    """Return the compiler of a `torch.compile(module)`, or after `module.compile()`; dynamo is not imported (seconds)."""
    own = vars(module)
    compiled = own.get("_compiled_call_impl")
    if compiled is None or "dynamo_ctx" in own:
        return own.get("dynamo_ctx")
    in_place: Compiler = inspect.getclosurevars(compiled).nonlocals["self"]
    return in_place
