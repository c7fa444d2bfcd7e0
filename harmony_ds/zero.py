"""Stand-ins for the names of `deepspeed.zero`: code written for ZeRO-3 runs on, though no parameter is partitioned here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn


class Init(nullcontext[None]):
    """A context to build a model in. DeepSpeed partitions it; here it stays a model in host memory.

    The arguments are those of `deepspeed.zero.Init`, and have no effect.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class GatheredParameters(Init):
    """A context in which parameters can be read and changed in place, as they can be everywhere.

    Masters, and copies on the device, follow the changes. (DeepSpeed keeps changes only if `modifier_rank` is given.) The
    arguments are those of `deepspeed.zero.GatheredParameters`, and have no effect.
    """


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that a layer uses beside its own is found when the model is measured."""
