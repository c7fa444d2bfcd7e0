"""`engine.compile()`: every layer by `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from harmony_ds.calls.intercept import Interception
from harmony_ds.errors import UnsupportedError


class Compilation:
    """The compilation of an engine's layers, if it was asked for."""

    def __init__(self, interception: Interception) -> None:
        self._interception = interception
        self.is_compiled = False

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] = MappingProxyType({}),
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile layers one by one; code between them stays as it is. A second call changes nothing.

        Args:
            backend, compile_kwargs: as `torch.compile` takes them.

        Raises:
            UnsupportedError: it asks for CUDA graphs, for passes of DeepCompile, or for compiled autograd.
        """
        graphs = (compile_kwargs.get("options") or {}).get("triton.cudagraphs")
        if backend == "cudagraphs" or compile_kwargs.get("mode") in ("reduce-overhead", "max-autotune") or graphs:
            raise UnsupportedError(
                f"engine.compile() with backend {backend!r} and {dict(compile_kwargs)} records CUDA graphs, whose inputs "
                "stay at their addresses: layers run on copies that come and go."
            )
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError(
                "engine.compile() compiles layers one by one: a schedule of DeepCompile's passes and compiled autograd are "
                "of whole models. Leave schedule and compiled_autograd_enabled out."
            )
        if not self.is_compiled:
            self.is_compiled = True
            self._interception.compile(partial(torch.compile, **{**compile_kwargs, "backend": backend}))
