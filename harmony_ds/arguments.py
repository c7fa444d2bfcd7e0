"""DeepSpeed's command-line arguments."""

from __future__ import annotations

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds --deepspeed and --deepspeed_config (and their deprecated forms), as `deepspeed.add_config_arguments` does."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="accepted; has no effect of its own")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the ds_config (JSON)")
    group.add_argument("--deepscale", default=False, action="store_true", help="deprecated form of --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="deprecated form of --deepspeed_config")
    return parser
