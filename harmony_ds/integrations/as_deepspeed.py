"""Put harmony_ds in DeepSpeed's place, for code that calls `deepspeed.initialize` itself: accelerate, Trainer, scripts."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from harmony_ds import utils, zero
from harmony_ds.checkpoint import zero_to_fp32
from harmony_ds.distributed.process_group import init_distributed
from harmony_ds.engine import HarmonyEngine, initialize

LOCAL_HELPERS = tuple(name for name in vars(utils) if "_local_" in name)
"""Functions of `deepspeed.utils` that ask for ZeRO-3's partitions; the others find this engine by themselves."""
CHECKPOINT_READERS = tuple(name for name in vars(zero_to_fp32) if "zero_checkpoint" in name)  # DeepSpeed's names


def install_as_deepspeed() -> None:
    """Replace `deepspeed.initialize` by `harmony_ds.initialize` for the rest of this process.

    Replaced as well are `deepspeed.DeepSpeedEngine` (accelerate unwraps models by it), `deepspeed.init_distributed`,
    `deepspeed.zero.Init` and `deepspeed.zero.GatheredParameters`, `safe_get_local_*` and `safe_set_local_*` of
    `deepspeed.utils`, and the functions of `deepspeed.utils.zero_to_fp32`; every parameter's `ds_status` says that it is
    gathered, and `torch.distributed` is initialized, as the launcher says. Call it before the training code imports any of
    these names; DeepSpeed's other names stay as they are.

    Raises:
        UnsupportedError: a launcher announces several processes, and they cannot be found.
    """
    init_distributed()
    deepspeed = import_module("deepspeed")
    vars(deepspeed).update(initialize=initialize, DeepSpeedEngine=HarmonyEngine, init_distributed=init_distributed)
    vars(import_module("deepspeed.utils.zero_to_fp32")).update(
        {name: getattr(zero_to_fp32, name) for name in CHECKPOINT_READERS}
    )
    vars(deepspeed.utils).update({name: getattr(utils, name) for name in LOCAL_HELPERS})
    vars(deepspeed.zero).update(Init=zero.Init, GatheredParameters=zero.GatheredParameters)
    status = import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
    nn.Parameter.ds_status = status.AVAILABLE  # type: ignore[attr-defined]
