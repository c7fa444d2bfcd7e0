"""The arguments of `initialize`: checks of them, the ds_config that they name, and the processes that train together.

Functions stand in the order in which `initialize` calls them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from harmony_ds.config import Config, for_loaded_model, load_config, trained_dtypes
from harmony_ds.config.optimizers import refuse_what_is_not_run
from harmony_ds.device import Device, devices_of_process
from harmony_ds.distributed import SingleProcess, join_world
from harmony_ds.distributed.process_group import init_distributed, launched_size
from harmony_ds.errors import ConfigError, UnsupportedError
from harmony_ds.optim.optimizers import ClientOptimizer, parameters_in

_logger = logging.getLogger(__name__)
GivenConfig = Mapping[str, Any] | str | Path


def check_model(args: Any, model: object, mpu: Any, mesh_param: Any) -> nn.Module:
    """Return `model` if it is a module, and no other parallelism than that of data is asked for.

    Raises:
        ConfigError: there is no model.
        TypeError: `model` is something else, or the model was given as the first argument, which is `args`.
        UnsupportedError: `mpu` or `mesh_param` is given.
    """
    if isinstance(args, nn.Module):
        raise TypeError(
            "the first argument of initialize is args, the program's arguments, as in DeepSpeed, and not the model "
            f"({type(args).__name__}): call initialize(model=..., config=...)."
        )
    if model is None:
        raise ConfigError("harmony_ds.initialize requires a model (deepspeed.initialize requires a model)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}: {model!r:.80}.")
    if mpu is not None or mesh_param is not None:
        raise UnsupportedError("harmony_ds trains with data parallelism alone: leave mpu and mesh_param out.")
    return model


def choose_config(args: Any, config: GivenConfig | None) -> GivenConfig:
    """Return the ds_config that was given as `config` or named by `args.deepspeed_config`; ConfigError: none, or both."""
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if named is not None and config is not None:
        raise ConfigError(
            "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and "
            "deepspeed.initialize() function call"
        )
    chosen = config if config is not None else named
    if chosen is None:
        raise ConfigError(
            "DeepSpeed requires --deepspeed_config to specify configuration file, or config=... in initialize"
        )
    return chosen


def load_checked_config(
    given: GivenConfig, optimizer: ClientOptimizer | None, dist_init_required: bool | None
) -> Config:
    """Return the ds_config, checked for this process and all that train with it; the log names keys without meaning.

    Raises:
        ConfigError, UnsupportedError: a key that the message names, the optimizer's among them if it is used.
    """
    if dist_init_required or launched_size():  # launched scripts ask for their rank, those of one process, too
        init_distributed()
    config = load_config(given, dist.get_world_size() if dist.is_initialized() else 1)
    if config.without_meaning:
        _logger.warning(
            "keys of DeepSpeed in the ds_config that harmony_ds does not need: %s", ", ".join(config.without_meaning)
        )
    if optimizer is None:
        refuse_what_is_not_run(config.optimizer)
    return config


def match_loaded_dtype(config: Config, model: nn.Module) -> Config:
    """Return the ds_config for a model that may have been loaded in the 16 bits of its checkpoint.

    If the ds_config names no dtype, the model's is taken, and the log says what that means.
    """
    dtypes = trained_dtypes(model)
    found = for_loaded_model(config, dtypes)
    if found is config:
        return config
    name = "bf16" if found.compute_dtype == torch.bfloat16 else "fp16"
    if found.master_dtype == torch.bfloat16:
        kept = "weights, gradients and optimizer state are kept in it, as in plain PyTorch"
        other = f'"{name}": {{"enabled": true}} or ZeRO stage 1 to 3 keeps fp32 masters and optimizer state'
    else:
        kept = f'it computes in {name}, with fp32 masters and optimizer state, as with "{name}": {{"enabled": true}}'
        if torch.float32 in dtypes:
            kept += ", and its fp32 parameters are computed with in it, too"
        other = "load it with dtype=torch.float32 to compute in fp32"
    _logger.warning(
        'the model was loaded in %s, and the ds_config has no "bf16" or "fp16": %s (%s).',
        found.compute_dtype,
        kept,
        other,
    )
    return found


def check_schedule_argument(optimizer: ClientOptimizer | None, lr_scheduler: Any) -> None:
    """Raise ConfigError for a schedule of an optimizer that a function is still to make."""
    made_later = optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer)
    if made_later and isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"Client Optimizer (type = {type(optimizer)} is not instantiated but Client LR Scheduler is instantiated"
        )


def refuse_duplicate_parameters(model: nn.Module, optimizer: object, parameters: list[Any] | None) -> None:
    """Raise ConfigError if a parameter stands more than once in the optimizer's groups, or in `parameters`."""
    groups: list[Any] = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else parameters or []
    counts = Counter(map(id, parameters_in(groups)))
    for name, parameter in model.named_parameters():
        if counts[id(parameter)] > 1:
            raise ConfigError(
                f"Parameter with name: {name} occurs multiple times in optimizer.param_groups. Make sure it only appears "
                "once to prevent undefined behavior."
            )


def join_processes(config: Config, model: nn.Module, device: Device | None) -> tuple[Config, SingleProcess]:
    """Join the processes that train `model`, after comparing that they have the same; return this one's ds_config, too.

    Raises:
        UnsupportedError: DeepSpeed's launcher has started a process for each device that one process is to drive.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return config, SingleProcess()
    harmony = config.harmony
    if harmony.devices != 1 and "CROSS_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UnsupportedError(
            f"harmony.devices is {harmony.devices}, which one process drives, and DeepSpeed's launcher has started "
            f"{dist.get_world_size()}: start the script by `python {Path(sys.argv[0]).name}`, or by `torchrun "
            "--nproc_per_node P` for P replicas with so many devices each."
        )
    on_cuda = device is not None and device.torch_device.type == "cuda"
    if device is None:
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        own = devices_of_process(harmony.device, harmony.devices, local_rank, dist.get_world_size())
        if own:
            devices = own if len(own) > 1 else 1
            on_cuda, config = True, replace(config, harmony=replace(harmony, device=own[0], devices=devices))
    parameters = dict(model.named_parameters())
    digest = {
        "The ds_config": config.values,
        "The model": {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters.items()},
        "The version of torch": str(torch.__version__),
    }
    return config, join_world(tuple(parameters), digest, on_cuda, harmony.reproducible)
