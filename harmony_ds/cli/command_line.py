"""Parse the command line of `harmony-ds`. Nothing here imports torch: `--help` and mistakes are answered at once."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from harmony_ds import __version__

_MOST = 2**30
"""No number is larger: as many GiB are more than anybody has, and so many rows, tokens or micro-batches."""
_MOST_DEVICES = 256
"""Devices of one process, and processes of one server."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of one command, and its name as `command`.

    Raises:
        SystemExit: the command line is wrong (2), or asks for help or the version (0).
    """
    return _parser().parse_args(argv or ["--help"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harmony-ds",
        description="Training of models larger than the device: will it fit, how fast will it be, and what would help.",
    )
    versions = f"harmony_ds {__version__} (torch {version('torch')}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (about, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=about, description=about))
    return parser


# ---- the arguments of each command


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    _add_answer(parser)
    text = 'GPU, and if not the usual ones its link and host: "rtx4090/pcie4/desktop-ddr5" (without: rtx4090).'
    parser.add_argument("--machine", metavar="NAME", help=text)
    text = "A disk that reads or writes so much in a second, with what the ds_config puts there, or masters and state."
    parser.add_argument("--nvme-gb-per-s", type=_at_least(0.001, float), metavar="GB", help=text)
    text = "Train LoRA adapters of this rank beside all linear layers but the head; MODEL itself is frozen. Needs peft."
    parser.add_argument("--lora", type=_at_least(1), metavar="RANK", help=text)
    text = "What the frozen linear layers beside adapters are stored in: in 16 bits (bf16), or quantized (nf4, int8)."
    parser.add_argument("--base", choices=("bf16", "nf4", "int8"), default="bf16", help=text)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_answer(parser)
    _add_profile_file(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    text = "Where the profile is written, as JSON."
    parser.add_argument("--output", type=_output_file, required=True, metavar="FILE", help=text)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_accumulation(parser)
    _add_profile_file(parser)
    add = parser.add_argument
    text = "Where the trace is written, for https://ui.perfetto.dev."
    add("--output", type=_output_file, required=True, metavar="FILE", help=text)
    add("--run", action="store_true", help="Also execute steps on the ds_config's device, with synthetic data.")
    text = "Steps that --run records, after two more; the one of median time is shown."
    add("--steps", type=_at_least(1), default=3, metavar="N", help=text)
    _add_json(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add, count, names = parser.add_argument, _at_least(1), "A,B,..."
    text = "Engines, harmony among them, by name or module:name (default: all that can run here)."
    add("--engines", type=_names, metavar=names, help=text)
    text = "Engines that run without the memory cap, beside the others."
    add("--uncapped", type=_names, default=(), metavar=names, help=text)
    text = "Micro-batches in a step; with several, engines are compared at each."
    add("--accumulation", dest="counts", type=_numbers, metavar="N,M,...", help=text)
    add("--device", choices=("cpu", "cuda"), help="Default: CUDA if there is one.")
    add("--processes", type=count, default=1, metavar="N", help="Replicas, each a process with a device of its own.")
    add("--threads", type=count, metavar="N", help="Per process (CPU: 1; CUDA: all cores).")
    add("--ablate", action="store_true", help="harmony alone, each of its mechanisms switched off.")
    text = "Run the other engines at their own best micro-batch (default: yes)."
    add("--sweep", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--rounds", type=count, default=5, metavar="N", help="Timed turns of every engine.")
    add("--steps", type=count, default=2, metavar="N", help="Optimizer steps in a turn.")
    add("--warmup-steps", type=count, default=2, metavar="N", help="Steps before the first turn.")
    add("--limit-s", type=_at_least(1, float), metavar="S", help="Begin no turn after so many seconds.")
    text = "The results, as JSON; the report (.md) and figure (.png) are written beside it."
    add("--output", type=_output_file, default=Path("harmony-bench.json"), metavar="FILE", help=text)
    add("--resume", action="store_true", help="Go on with what --output already holds.")
    _add_json(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add, layouts = parser.add_argument, ["harmony", "universal", "hf"]
    add("source", type=Path, metavar="SRC", help="A checkpoint, or a folder of several (then the latest, or --tag).")
    add("target", type=Path, metavar="DST", help="The folder to write into; made if it is not there.")
    add("--to", choices=layouts, required=True, metavar="LAYOUT", help=f"One of {', '.join(layouts)}.")
    add("--tag", help="Which checkpoint in SRC.")
    _add_json(parser)


# ---- arguments that several commands take


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model and its ds_config, as every command that reads a model takes them."""
    add, count = parser.add_argument, _at_least(1)
    add("model", metavar="MODEL", help="A Hugging Face config.json or its folder, or module:function that returns a "
        "module or (module, inputs).")  # fmt: skip
    add("--ds-config", type=Path, metavar="FILE", help="The ds_config. Without one: bf16, AdamW, clipping at 1.0.")
    add("--micro-batch", type=count, metavar="N", help="Rows of a micro-batch, instead of the ds_config's (or 1).")
    add("--sequence", type=count, metavar="N", help="Tokens in a row (the model's longest, at most 2048).")
    add("--devices", type=_at_least(1, most=_MOST_DEVICES), metavar="N",
        help="Devices that one process drives as a pipeline, instead of the ds_config's (or 1).")  # fmt: skip
    gib = _at_least(0.001, float)
    text = "Device memory that may be used, in GiB."
    add("--device-memory-gib", type=gib, metavar="GIB", help=text)


def _add_accumulation(parser: argparse.ArgumentParser) -> None:
    """Add the number of micro-batches in a step."""
    text = "Micro-batches in a step, instead of the ds_config's (or 16)."
    parser.add_argument("--accumulation", type=_at_least(1), metavar="N", help=text)


def _add_profile_file(parser: argparse.ArgumentParser) -> None:
    """Add the profile to read instead of measuring."""
    text = "A profile that `harmony-ds profile` saved. Without one: measure now."
    parser.add_argument("--profile", type=Path, metavar="FILE", help=text)


def _add_answer(parser: argparse.ArgumentParser) -> None:
    """Add everything that `estimate` and `plan` take alike."""
    _add_model(parser)
    _add_accumulation(parser)
    add, gib = parser.add_argument, _at_least(0.001, float)
    add("--processes", type=_at_least(1, most=_MOST_DEVICES), default=1, metavar="N",
        help="Replicas on one server, each a process with micro-batches and devices of its own.")  # fmt: skip
    add("--host-memory-gib", type=gib, metavar="GIB", help="Host memory that may be used, in GiB.")
    add("--advice", action=argparse.BooleanOptionalAction, default=True,
        help="Also say what would help most (plans a few times more; default: yes).")  # fmt: skip
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="One JSON object on standard output, for scripts.")


# ---- types of values


def _at_least(least: float, kind: Callable[[str], float] = int, most: float = _MOST) -> Callable[[str], float]:
    """Return an argparse type that refuses numbers less than `least` or more than `most`, and nan."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} is no {'whole ' if kind is int else ''}number") from error
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least:g}")
        if not value <= most:
            raise argparse.ArgumentTypeError(f"{text} is no number up to {most:,.0f}")
        return value

    return number


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[float]:
    return [_at_least(1)(number) for number in text.split(",")]


def _output_file(text: str) -> Path:
    """Return the path of a file that a command will write, and make its folder: the work before that may take minutes."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path.parent} cannot be made: {error.strerror}") from error
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    return path


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "estimate": (
        "Say whether MODEL fits a machine, how fast it will train there, and what limits it. Allocates nothing.",
        _add_estimate,
    ),
    "plan": (
        "Say how MODEL will be trained on this machine: the plan, its time and memory, and what limits it.",
        _add_plan,
    ),
    "profile": (
        "Run one micro-batch of MODEL, with random weights, layer by layer on the ds_config's device.",
        _add_profile,
    ),
    "trace": (
        "Write a Chrome trace of one step of MODEL on this machine, and print how long each stream works.",
        _add_trace,
    ),
    "machines": (
        "List GPUs, links and hosts. A machine is GPU, GPU/LINK, GPU/HOST or GPU/LINK/HOST.",
        _add_json,
    ),
    "bench": (
        "Train MODEL under several engines and compare step times, memory, bytes moved and losses.",
        _add_bench,
    ),
    "convert": (
        "Write the checkpoint SRC into DST in another layout. Pickles of DeepSpeed are read without executing them.",
        _add_convert,
    ),
}
"""What each command does, and the function that adds its arguments; `harmony_ds.cli` has a module of its name."""
