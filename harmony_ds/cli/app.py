"""The command line: every command is a function, whose parameters are its arguments and options.

How commands end: 0 it fits, 1 the input is wrong, 2 the command line is wrong (argparse's), 3 it does not fit,
130 interrupted. Who closes the pipe that the output goes to (`| head`) ends the command with 0.
"""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NoReturn, get_type_hints

import torch

from harmony_ds import __version__
from harmony_ds.cli import bench, convert, estimate, machines, plan, profile, trace
from harmony_ds.cli.options import Option, option_of
from harmony_ds.config.hints import nearest
from harmony_ds.errors import HarmonyError

COMMANDS: dict[str, Callable[..., int | None]] = {
    room.__name__.rpartition(".")[2]: room.command
    for room in (estimate, plan, profile, trace, machines, bench, convert)
}
WRONG_INPUT, INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of a command, or (`owner`) of a dataclass that the command takes."""

    name: str
    kind: Any
    default: Any
    owner: str = ""


def run(argv: Sequence[str]) -> int:
    """Runs one command; errors of the user's input end it with what they say, and no traceback.

    Raises:
        SystemExit: the command line is wrong (2), or asks for help (0).
    """
    parser, commands = _parsers()
    if not argv:
        parser.print_help()
        return 0
    given, rest = parser.parse_known_args(argv)
    if rest:
        _refuse(rest[0], commands.get(given.command, parser))
    if given.command is None:
        parser.error(f"name a command: {', '.join(COMMANDS)}")
    try:
        return _call(COMMANDS[given.command], vars(given)) or 0
    except BrokenPipeError:  # who read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (HarmonyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT


def _refuse(word: str, parser: argparse.ArgumentParser) -> NoReturn:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        parser.error(f'"{word}" is one argument too many')
    near = nearest(name, [one for one in parser._option_string_actions if one.startswith("--")])
    parser.error(f"there is no {name} here{f': did you mean {near}?' if near else '.'}")


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
    for name, command in COMMANDS.items():
        about = " ".join((command.__doc__ or "").split())
        short = about.partition(". ")[0].rstrip(".").replace("%", "%%")
        commands[name] = places.add_parser(name, help=short, description=about, allow_abbrev=False)
        for parameter in parameters_of(command):
            _add(commands[name], parameter, option_of(name, parameter.name))
    return parser, commands


def parameters_of(taker: Callable[..., Any], owner: str = "") -> Iterator[Parameter]:
    """Of a command; those of a dataclass in the place of it."""
    hints = get_type_hints(taker)
    for name, one in inspect.signature(taker).parameters.items():
        if isinstance(hints[name], type) and is_dataclass(hints[name]):
            yield from parameters_of(hints[name], name)
        else:
            yield Parameter(name, hints[name], one.default, owner)


def _add(parser: argparse.ArgumentParser, parameter: Parameter, option: Option) -> None:
    kinds = [kind for kind in getattr(parameter.kind, "__args__", (parameter.kind,)) if kind is not type(None)]
    more: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.is_argument:
        parser.add_argument(parameter.name, type=kinds[0], **more)
        return
    more |= {
        "dest": parameter.name,
        "default": parameter.default,
        "required": parameter.default is inspect.Parameter.empty,
    }
    flag = option.flag or "--" + parameter.name.replace("_", "-")
    if kinds != [bool]:
        parser.add_argument(flag, type=option.read(kinds[0]), **more)
        return
    del more["metavar"]
    if parameter.default is False or option.off:
        parser.add_argument(flag, action="store_true", **more)
    else:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **more)
    if option.off:
        parser.add_argument(option.off, action="store_false", dest=parameter.name, default=None, help=option.off_help)


def _call(command: Callable[..., int | None], given: dict[str, Any]) -> int | None:
    arguments: dict[str, Any] = {}
    hints = get_type_hints(command)
    for parameter in parameters_of(command):
        place = arguments.setdefault(parameter.owner, {}) if parameter.owner else arguments
        place[parameter.name] = given[parameter.name]
    return command(**{name: hints[name](**v) if is_dataclass(hints[name]) else v for name, v in arguments.items()})
