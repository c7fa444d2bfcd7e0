"""What the experiments share: options, the JSON with its environment, figures of one style, the page.

An experiment is `run` (what was measured and simulated, ready for JSON), `draw` (one figure of that) and `says` (two or
three sentences of that, in Markdown). It knows nothing of files.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from harmony_ds.bench.results import cpu_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "paper"
IMAGES = ROOT / "docs" / "images" / "paper"
GIB = 2**30
MIB = 2**20

Content = dict[str, Any]

MEASURED, SIMULATED = "MEASURED here", "SIMULATED, paper's machine"
OURS, PLAIN, NAIVE, PUBLISHED = "#1f5fa8", "#444444", "#c8642b", "#7a7a7a"
"""Colours: harmony_ds; plain PyTorch without offload; swapping for each micro-batch; the original's own numbers."""
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


@dataclass(frozen=True, slots=True)
class Options:
    """How an experiment is run.

    Attributes:
        quick: at the smallest size at which its claim still shows.
        rounds: interleaved timings; those of one kind are summed up by their median.
    """

    quick: bool
    rounds: int


@dataclass(frozen=True, slots=True)
class Experiment:
    """One of the paper's tables or figures.

    Attributes:
        name: of its files.
        title: of its section.
    """

    name: str
    title: str
    run: Callable[[Options], Content]
    draw: Callable[[Content], Figure]
    says: Callable[[Content], str]

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Runs, prints what it says, writes JSON and figure."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument(
            "--quick", action="store_true", help="smallest size; writes nothing unless --out says where"
        )
        parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of what is timed")
        parser.add_argument("--out", type=Path, help="a folder for JSON and figure, in place of the repository's")
        given = parser.parse_args(arguments)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        begin = time.perf_counter()
        content = self.run(Options(given.quick, 1 if given.quick else given.rounds))
        content = {"environment": environment(time.perf_counter() - begin), **content}
        print(self.says(content))
        if given.out is not None or not given.quick:
            self._write(content, given.out or RESULTS, given.out or IMAGES)

    def _write(self, content: Content, results: Path, images: Path) -> None:
        for folder in (results, images):
            folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1) + "\n"
        (results / f"{self.name}.json").write_text(text, encoding="utf-8")
        with mpl.rc_context(_STYLE):
            self.draw(content).savefig(images / f"{self.name}.png", metadata={"Software": None})
        print(f"written: {results / self.name}.json, {images / self.name}.png")


def environment(seconds: float) -> Content:
    """What the numbers depend on, without the machine's name."""
    return {
        "command": " ".join(["python", f"benchmarks/paper/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "seconds": round(seconds, 1),
    }


def span(low: float, high: float, form: str) -> str:
    """Both ends, or the one number that they print as."""
    ends = f"{low:{form}}", f"{high:{form}}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def panels(*titles: str, width: float = 4.1, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """A figure with one set of axes for each title, side by side."""
    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title)
    return figure, list(axes)
