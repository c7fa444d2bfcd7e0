"""Parse the command line of `harmony-ds` and run the command: each is a module here that registers its arguments.

Exit codes: 0 done (a model fits), 1 wrong input, 2 wrong command line (argparse's), 3 the model does not fit, 4 the losses
of compared engines differ, 130 interrupted. A closed pipe (`| head`) ends a command with 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import torch

from harmony_ds import __version__
from harmony_ds.cli import bench, convert, estimate, machines, plan, profile, trace
from harmony_ds.errors import HarmonyError

_MODULES = (estimate, plan, profile, trace, machines, bench, convert)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}
WRONG_INPUT, INTERRUPTED = 1, 130


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; print errors of the user's input without a traceback.

    Raises:
        SystemExit: the command line is wrong (2), or asks for help (0).
    """
    args = _parser().parse_args(argv or ["--help"])
    try:
        return int(COMMANDS[args.command].command(args))
    except BrokenPipeError:  # the reader of the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (HarmonyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harmony-ds",
        description="Training of models larger than the device: will it fit, how fast will it be, and what would help.",
    )
    versions = f"harmony_ds {__version__} (torch {torch.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        module.register(commands.add_parser(name, help=module.ABOUT, description=module.ABOUT))
    return parser
