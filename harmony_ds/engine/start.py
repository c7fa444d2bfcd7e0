"""`initialize`: arguments in DeepSpeed's form to an engine."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harmony_ds.assembly import assemble
from harmony_ds.config import load_config
from harmony_ds.device import Device
from harmony_ds.engine.core import HarmonyEngine
from harmony_ds.errors import ConfigError
from harmony_ds.offload.optimizers import ClientOptimizer, ParameterGroups

_logger = logging.getLogger(__name__)


def initialize(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: ParameterGroups | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,  # noqa: ARG001
    mpu: Any = None,  # noqa: ARG001
    dist_init_required: bool | None = None,  # noqa: ARG001
    collate_fn: Callable[[Any], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,  # noqa: ARG001
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    device: Device | None = None,
) -> tuple[HarmonyEngine, torch.optim.Optimizer | None, Any, Any]:
    """Wraps `model` for training; the signature and the result are those of `deepspeed.initialize`.

    Args:
        args: may carry the path of a ds_config in `deepspeed_config`.
        model: any `nn.Module`, in host memory.
        optimizer: an optimizer over the model's parameters, or a callable that makes one; overrides the ds_config's.
        model_parameters: parameters or parameter groups to train (all that require gradients).
        training_data: a dataset; the third result is a DataLoader over it with the ds_config's micro-batch size.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer; overrides the ds_config's.
        config, config_params: the ds_config: a dict or a path.
        device: an explicit device, instead of the ds_config's.
        distributed_port, mpu, dist_init_required, mesh_param: accepted for DeepSpeed's sake; one process is used.

    Returns:
        engine, optimizer, training data loader (or None), learning-rate scheduler (or None).

    Raises:
        ConfigError: the ds_config cannot be meant.
        CompilerMissingError: the ds_config's optimizer has to be compiled and cannot be.
        ModelError: the model cannot be decomposed.
    """
    if model is None:
        raise ConfigError("harmony_ds.initialize requires a model")
    settings = load_config(_the_one_config(args, config if config is not None else config_params))
    if settings.without_meaning:
        _logger.warning("ds_config keys that mean nothing to harmony_ds: %s", ", ".join(settings.without_meaning))
    assembly = assemble(model, settings, optimizer, model_parameters, device)
    engine = HarmonyEngine(model, settings, assembly, lr_scheduler)
    loader = None
    if training_data is not None:
        loader = torch.utils.data.DataLoader(
            training_data, batch_size=settings.micro_batch, shuffle=True, collate_fn=collate_fn
        )
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _the_one_config(args: object, config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | str | Path:
    named = getattr(args, "deepspeed_config", None)
    if named is not None and config is not None:
        raise ConfigError(
            "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and "
            "initialize() function call"
        )
    chosen = config if config is not None else named
    if chosen is None:
        raise ConfigError("harmony_ds requires a ds_config: pass config=..., or --deepspeed_config in args")
    return chosen
