"""Arguments: DeepSpeed's of the command line, and the model of `initialize`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from harmony_ds.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config, as `deepspeed.add_config_arguments` does."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="accepted; has no effect of its own")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the ds_config (JSON)")
    return parser


def require_module(model: object) -> nn.Module:
    """Return `model` if it is a module.

    Raises:
        ConfigError: there is none.
        TypeError: it is a class, a name or something else.
    """
    from torch import nn

    if model is None:
        raise ConfigError("harmony_ds.initialize requires a model (deepspeed.initialize requires a model)")
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type):
        raise TypeError(f"model is the class {model.__name__}, not a module of it: model={model.__name__}(...).")
    if isinstance(model, str):
        raise TypeError(
            f'model is the name "{model}": load it first, as AutoModelForCausalLM.from_pretrained("{model}").'
        )
    raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}: {model!r:.80}.")
