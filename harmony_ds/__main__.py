"""`python -m harmony_ds SCRIPT ...`: run a DeepSpeed or Trainer script as it is, with harmony_ds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "Usage: python -m harmony_ds SCRIPT [ARGUMENT ...], or python -m harmony_ds -m MODULE [ARGUMENT ...]"
HELP = f"""{USAGE}

Run a training script for DeepSpeed, or with a Hugging Face Trainer, as it is: deepspeed.initialize is
harmony_ds.initialize, and every Trainer trains by harmony_ds. ARGUMENTs are the script's own.

For what fits which machine, and how fast it will train there: harmony-ds --help."""


def main(command: Sequence[str]) -> None:
    """Run the script, or the module after `-m`, of a command line.

    Raises:
        SystemExit: it names neither, or there is no such script.
    """
    if command and command[0] in ("-h", "--help"):
        print(HELP)
        return
    is_module = command[:1] == ["-m"]
    words = command[1:] if is_module else command
    if not words or words[0].startswith("-"):
        sys.exit(f"error: no script is named. {USAGE}")
    if not is_module and not Path(words[0]).is_file():
        sys.exit(f"error: there is no script {words[0]}. {USAGE}. Commands such as estimate: harmony-ds COMMAND.")
    from harmony_ds.integrations.script import run_script  # imports torch

    run_script(command)


if __name__ == "__main__":
    main(sys.argv[1:])
