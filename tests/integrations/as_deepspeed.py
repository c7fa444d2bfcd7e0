"""Undoing `install_as_deepspeed` for the next test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed.utils import zero_to_fp32
from torch import nn
from transformers import Trainer

from harmony_ds.integrations.as_deepspeed import CHECKPOINT_READERS, LOCAL_HELPERS


def forget_accelerate() -> None:
    """Reset the state that accelerate keeps in its classes."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


@contextmanager
def deepspeed_as_it_was() -> Iterator[None]:
    """Restore deepspeed and accelerate on exit."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("initialize", "DeepSpeedEngine", "init_distributed"):
            patch.setattr(deepspeed, name, getattr(deepspeed, name))
        for name in ("Init", "GatheredParameters"):
            patch.setattr(deepspeed.zero, name, getattr(deepspeed.zero, name))
        for name in LOCAL_HELPERS:
            patch.setattr(deepspeed.utils, name, getattr(deepspeed.utils, name))
        for name in CHECKPOINT_READERS:
            patch.setattr(zero_to_fp32, name, getattr(zero_to_fp32, name))
        patch.setattr(nn.Parameter, "ds_status", None, raising=False)
        patch.setattr(Accelerator, "__init__", Accelerator.__init__)
        patch.setattr(HfDeepSpeedConfig, "__init__", HfDeepSpeedConfig.__init__)
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
        forget_accelerate()
        try:
            yield
        finally:
            forget_accelerate()
            if "__new__" in vars(Trainer):  # a class whose __new__ was deleted cannot be made with arguments any more
                Trainer.__new__ = lambda cls, *_, **__: object.__new__(cls)
