"""Put harmony_ds in DeepSpeed's place, for code that calls `deepspeed.initialize` itself: accelerate, Trainer, scripts."""

from __future__ import annotations

import warnings
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

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
    gathered, and `torch.distributed` is initialized, as the launcher says. An `accelerate.Accelerator` that ignores its
    `deepspeed_plugin` warns, and accelerate takes a ds_config without `"zero_optimization"`. Call it before the training
    code imports any of these names; DeepSpeed's other names stay as they are.

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
    if find_spec("accelerate") is not None:
        _warn_of_ignored_plugins()
        _take_configs_without_zero()


def _warn_of_ignored_plugins() -> None:
    """Let an Accelerator warn if it was given a DeepSpeed plugin and does not use it: no engine would train its model."""
    accelerate = import_module("accelerate")
    init = accelerate.Accelerator.__init__
    if hasattr(init, "__wrapped__"):
        return

    @wraps(init)
    def init_and_warn(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        has_plugin = kwargs.get("deepspeed_plugin") is not None or kwargs.get("deepspeed_plugins") is not None
        if has_plugin and self.distributed_type != accelerate.DistributedType.DEEPSPEED:
            warnings.warn(
                "this Accelerator ignores its deepspeed_plugin, so harmony_ds does not train what it prepares: accelerate "
                "uses no DeepSpeed with cpu=True. Leave cpu=True out, and name the device in the ds_config: "
                '"harmony": {"device": "cpu"}.',
                RuntimeWarning,
                stacklevel=2,
            )

    accelerate.Accelerator.__init__ = init_and_warn


def _take_configs_without_zero() -> None:
    """Let accelerate take a ds_config without "zero_optimization", which its plugin refuses: stage 0 is the default."""
    config = import_module("accelerate.utils.deepspeed").HfDeepSpeedConfig
    init = config.__init__
    if hasattr(init, "__wrapped__"):
        return

    @wraps(init)
    def init_with_stage(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.config.setdefault("zero_optimization", {"stage": 0})

    config.__init__ = init_with_stage
