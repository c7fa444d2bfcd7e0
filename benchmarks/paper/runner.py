"""The shared part of the experiments: JSON with its environment, figures of one style, losses of two trainings.

Each file is one experiment: its title, what the original's scripts run, `run` (what was measured, ready for JSON), `draw`
(a figure of that) and `says` (what its numbers say, in Markdown).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from torch import nn

from harmony_ds.bench.results import environment

sys.path.insert(0, str(Path(__file__).parents[2]))  # the experiments are scripts
from benchmarks.common import MIB, ROOT, quiet
from benchmarks.training import Batch, MakeOptimizer, Ours, Plain, weight_bytes

RESULTS = ROOT / "benchmarks" / "results" / "paper"
IMAGES = ROOT / "docs" / "images" / "paper"
OURS, PLAIN, NAIVE = "#1f5fa8", "#444444", "#c8642b"
"""Colours: harmony_ds; plain PyTorch without offload; swapping for each micro-batch."""
_STYLE = {
    "figure.dpi": 130,
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.markersize": 4,
}
Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How an experiment is run: at the smallest size at which its claim still shows; interleaved timings."""

    quick: bool
    rounds: int


def main(file: str) -> None:
    """Run the experiment of a file, print what it says, and write JSON and figure."""
    experiment = import_module(Path(file).stem)
    parser = argparse.ArgumentParser(description=experiment.TITLE)
    parser.add_argument("--quick", action="store_true", help="smallest size; writes nothing without --out")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of what is timed")
    parser.add_argument("--out", type=Path, help="a folder for JSON and figure, in place of the repository's")
    given = parser.parse_args()
    quiet()
    begin = time.perf_counter()
    content = experiment.run(Options(given.quick, 1 if given.quick else given.rounds))
    command = " ".join(["python", f"benchmarks/paper/{Path(file).name}", *sys.argv[1:]])
    measured = {**environment("cpu"), "command": command, "seconds": round(time.perf_counter() - begin, 1)}
    content = {"environment": measured, **content}
    print(experiment.says(content))
    if given.out is not None or not given.quick:
        results = given.out or RESULTS
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{experiment.__name__}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        save_figure(experiment, content, given.out or IMAGES)


def save_figure(experiment: ModuleType, content: Content, folder: Path) -> None:
    with mpl.rc_context(_STYLE):
        experiment.draw(content).savefig(folder / f"{experiment.__name__}.png", metadata={"Software": None})


def kept(experiment: ModuleType) -> Content:
    """Return the results that the repository keeps."""
    found: Content = json.loads((RESULTS / f"{experiment.__name__}.json").read_text(encoding="utf-8"))
    return found


def section(experiment: ModuleType) -> str:
    """Return its part of the page, from the results."""
    content, name = kept(experiment), experiment.__name__
    made = content["environment"]
    return (
        f"\n## {experiment.TITLE}\n\n*The paper:* {experiment.PAPER}\n\n![{name}](images/paper/{name}.png)\n\n"
        f"{experiment.says(content)}\n\n`{made['command']}`: {made['seconds']:.0f} s, {made['date'][:10]}.\n"
    )


def panels(*titles: str, width: float = 4.1, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """Return a figure with one set of axes for each title, side by side."""
    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title)
    return figure, list(axes)


def span(low: float, high: float, form: str) -> str:
    """Return both ends, or the one number that they print as."""
    ends = f"{low:{form}}", f"{high:{form}}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def same_training(
    models: tuple[nn.Module, nn.Module],
    make: MakeOptimizer,
    groups: Sequence[Sequence[Batch]],
    budget_bytes: int,
    scheduler: Callable[[Any], Any] | None = None,
) -> Content:
    """Train one model plainly and its copy with the engine; return losses and differences."""
    plain, rows = Plain(models[0], make, scheduler), len(next(iter(groups[0][0].values())))
    expected = [plain.step(group) for group in groups]
    ours = Ours(models[1], make, (rows, len(groups[0])), budget_bytes, None, scheduler)
    losses = [ours.step(group) for group in groups]
    peak = ours.engine.memory_report().device_peak_bytes
    ours.close()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return {
        "parameters": sum(p.numel() for p in models[0].parameters()),
        "weight_bytes": weight_bytes(models[0]),
        "budget_bytes": budget_bytes,
        "device_peak_bytes": peak,
        "losses": losses,
        "plain_losses": expected,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "largest_weight_difference": max((a.detach() - b.detach()).abs().max().item() for a, b in pairs),
    }


def draw_losses(content: Content, title: str) -> Figure:
    """Draw both curves of `same_training`, and their difference."""
    figure, axes = panels(f"MEASURED: {title}", "difference of the two")
    ours, plain = content["losses"], content["plain_losses"]
    steps = range(1, len(ours) + 1)
    axes[0].plot(steps, plain, color=PLAIN, linewidth=4, alpha=0.35, label="plain PyTorch")
    axes[0].plot(steps, ours, color=OURS, linewidth=1.2, label="harmony_ds, swapping")
    axes[0].set(xlabel="optimizer step", ylabel="loss")
    axes[0].legend()
    differences = [abs(a - b) for a, b in zip(ours, plain, strict=True)]
    axes[1].plot(steps, differences, "o-", color=OURS, markersize=2)
    axes[1].set(xlabel="optimizer step", ylabel="|loss - plain loss|", ylim=(-1e-7, max(1e-6, *differences) * 1.1))
    return figure


def losses_say(content: Content) -> str:
    """Say what `same_training` shows."""
    return (
        f"{content['weight_bytes'] / MIB:.1f} MiB of weights (four times that with gradients and moments) under a device "
        f"budget of {content['budget_bytes'] / MIB:.1f} MiB; {content['setting']}. The largest difference to plain "
        f"training is {content['largest_loss_difference']:.1e} in a loss and "
        f"{content['largest_weight_difference']:.1e} in a final weight."
    )
