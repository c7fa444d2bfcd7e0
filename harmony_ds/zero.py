"""`deepspeed.zero` for code that is written for ZeRO-3: parameters are whole here, at any time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from harmony_ds.parameters import links_of, take_over

Parameters = nn.Parameter | Iterable[nn.Parameter] | None


class Init:
    """A context to build a model in. DeepSpeed partitions it; here it stays a model in host memory.

    The arguments are those of `deepspeed.zero.Init`, and have no effect.
    """

    def __init__(self, module: nn.Module | None = None, *_: Any, **__: Any) -> None:
        self.module = module

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to partition."""


class GatheredParameters:
    """A context in which `params` can be read and changed in place.

    Reading waits for pending updates. What is changed becomes the weights that training goes on with: masters, and
    copies that live on the device, follow on exit. (DeepSpeed keeps changes only if `modifier_rank` is given.)
    """

    def __init__(
        self,
        params: Parameters,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        chosen = [] if params is None else [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = chosen if enabled else []

    def __enter__(self) -> None:
        links_of(self._params)

    def __exit__(self, *_: object) -> None:
        take_over(self._params)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to register: a parameter that a layer uses beside its own is found when the model is measured."""
