"""Run one command of `harmony-ds`: each is a module here, imported once the command line has been found right.

Exit codes: 0 done (a model fits), 1 wrong input, 2 wrong command line (argparse's), 3 the model does not fit, 4 the losses
of compared engines differ, 130 interrupted. A closed pipe (`| head`) ends a command with 0.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from harmony_ds.cli.command_line import parse
from harmony_ds.runtime.garbage import no_collections

WRONG_INPUT, INTERRUPTED = 1, 130


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; print errors of the user's input without a traceback.

    Raises:
        SystemExit: the command line is wrong (2), or asks for help (0).
    """
    return _run_command(parse(argv))


def _run_command(args: argparse.Namespace) -> int:
    for library in ("torchao", "torch.utils._pytree"):  # what they log when they are imported has to do with no command
        logging.getLogger(library).setLevel(logging.ERROR)
    with no_collections():  # modules are no garbage, and torch is one of those imported here
        from harmony_ds.errors import HarmonyError

        command = import_module(f"harmony_ds.cli.{args.command}").command
    try:
        return int(command(args))
    except BrokenPipeError:  # the reader of the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (HarmonyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
