"""Command line of harmony_ds: one module for each command, which registers its arguments on a parser.

Exit codes: 0 done (a model fits), 1 wrong input, 2 wrong command line (argparse's), 3 the model does not fit, 4 the losses
of compared engines differ, 130 interrupted. A closed pipe (`| head`) ends a command with 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

from harmony_ds import __version__
from harmony_ds.cli import bench, convert, estimate, machines, plan, profile, trace
from harmony_ds.config.hints import nearest
from harmony_ds.errors import HarmonyError

_MODULES = (estimate, plan, profile, trace, machines, bench, convert)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}
WRONG_INPUT, INTERRUPTED = 1, 130


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; print errors of the user's input without a traceback.

    Raises:
        SystemExit: the command line is wrong (2), or asks for help (0).
    """
    parser, commands = _parsers()
    if not argv:
        parser.print_help()
        return 0
    args, rest = parser.parse_known_args(argv)
    if rest:
        _refuse(rest[0], commands.get(args.command, parser))
    if args.command is None:
        parser.error(f"name a command: {', '.join(COMMANDS)}")
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


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="harmony-ds",
        description="Training of models larger than the device: will it fit, how fast will it be, and what would help.",
        allow_abbrev=False,
    )
    versions = f"harmony_ds {__version__} (torch {torch.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=versions)
    places = parser.add_subparsers(dest="command", metavar="COMMAND", required=False)
    commands = {}
    for name, module in COMMANDS.items():
        commands[name] = places.add_parser(name, help=module.ABOUT, description=module.ABOUT, allow_abbrev=False)
        module.register(commands[name])
    return parser, commands


def _refuse(word: str, parser: argparse.ArgumentParser) -> NoReturn:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        parser.error(f'"{word}" is one argument too many')
    near = nearest(name, [one for one in parser._option_string_actions if one.startswith("--")])
    parser.error(f"there is no {name} here{f': did you mean {near}?' if near else '.'}")
