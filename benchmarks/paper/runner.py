"""The shared part of the experiments: training, interleaved timing, JSON with its environment, figures of one style.

An experiment is `run` (what was measured, ready for JSON), `draw` (a figure of that) and `says` (what its numbers say, in
Markdown). Each file has one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import harmony_ds
from harmony_ds.bench.results import cpu_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "paper"
IMAGES = ROOT / "docs" / "images" / "paper"
GIB, MIB = 2**30, 2**20
SEED = 5
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
Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


# ---- experiments


@dataclass(frozen=True, slots=True)
class Options:
    """How an experiment is run: at the smallest size at which its claim still shows; interleaved timings."""

    quick: bool
    rounds: int


@dataclass(frozen=True, slots=True)
class Experiment:
    """One of the paper's figures.

    Attributes:
        name: of its files.
        title, paper: of its section on the page; what the original's scripts run.
    """

    name: str
    title: str
    paper: str
    run: Callable[[Options], Content]
    draw: Callable[[Content], Figure]
    says: Callable[[Content], str]

    def main(self) -> None:
        """Run it, print what it says, and write JSON and figure."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--quick", action="store_true", help="smallest size; writes nothing without --out")
        parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of what is timed")
        parser.add_argument("--out", type=Path, help="a folder for JSON and figure, in place of the repository's")
        given = parser.parse_args()
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        begin = time.perf_counter()
        content = self.run(Options(given.quick, 1 if given.quick else given.rounds))
        content = {"environment": environment(time.perf_counter() - begin), **content}
        print(self.says(content))
        if given.out is not None or not given.quick:
            results = given.out or RESULTS
            results.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=1) + "\n"
            (results / f"{self.name}.json").write_text(text, encoding="utf-8")
            self.save_figure(content, given.out or IMAGES)

    def save_figure(self, content: Content, folder: Path) -> None:
        with mpl.rc_context(_STYLE):
            self.draw(content).savefig(folder / f"{self.name}.png", metadata={"Software": None})

    def section(self) -> str:
        """Return its part of the page, from the results."""
        content = json.loads((RESULTS / f"{self.name}.json").read_text(encoding="utf-8"))
        made = content["environment"]
        return (
            f"\n## {self.title}\n\n*The paper:* {self.paper}\n\n![{self.name}](images/paper/{self.name}.png)\n\n"
            f"{self.says(content)}\n\n`{made['command']}`: {made['seconds']:.0f} s, {made['date']}.\n"
        )


def environment(seconds: float) -> Content:
    """Return what the numbers depend on, without the machine's name."""
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


# ---- training


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def loss_of(outputs: Any) -> Tensor:
    """Return the loss that a model returned, alone or among its outputs."""
    found = outputs if isinstance(outputs, Tensor) else outputs.loss
    assert isinstance(found, Tensor)
    return found


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


class Plain:
    """Gradient accumulation in plain PyTorch, everything in memory, no recomputation."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, scheduler: Callable[[Any], Any] | None = None) -> None:
        self.model = model
        self._optimizer = make(model.parameters())
        self._scheduler = scheduler(self._optimizer) if scheduler else None
        self._steps = 0

    def step(self, batches: Sequence[Batch]) -> float:
        """Take an optimizer step; return the mean loss."""
        losses = []
        for index, batch in enumerate(batches):
            torch.manual_seed(harmony_ds.micro_batch_seed(SEED, self._steps, index))
            loss = loss_of(self.model(**batch))
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        self._steps += 1
        return torch.stack(losses).mean().item()


class Ours:
    """The engine on the CPU device."""

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        shape: tuple[int, int],
        budget_bytes: int | None,
        harmony: Mapping[str, Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
    ) -> None:
        """Start an engine.

        Args:
            shape: rows of a micro-batch, micro-batches of a step.
            budget_bytes: device memory (None: no limit).
            harmony: more settings of ours.
        """
        budget = {} if budget_bytes is None else {"device_memory_gib": budget_bytes / GIB}
        config = {
            "train_micro_batch_size_per_gpu": shape[0],
            "gradient_accumulation_steps": shape[1],
            "gradient_clipping": 0.0,
            "harmony": {"device": "cpu", "seed": SEED, **budget, **(harmony or {})},
        }
        optimizer = make(model.parameters())
        self.model = model
        self.engine, *_ = harmony_ds.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler(optimizer) if scheduler else None, config=config
        )

    def step(self, batches: Sequence[Batch]) -> float:
        """Take an optimizer step and finish its updates; return the mean loss."""
        loss = self.engine.train_batch(iter(batches)).item()
        self.engine.finish_updates()
        return float(loss)

    def close(self) -> None:
        self.engine.destroy()


LEAST: Mapping[str, Any] = {"pack_layers": 1, "stash": "host", "prefetch": False}
"""The plan that needs least: every layer a pack, the stash on the host, nothing swapped early."""


def planned_bytes(
    model: nn.Module, make: MakeOptimizer, batches: Sequence[Batch], rows: int, harmony: Mapping[str, Any] = LEAST
) -> int:
    """Return the device memory of the plan with these settings, where nothing limits it."""
    run = Ours(model, make, (rows, len(batches)), None, harmony)
    run.step(batches)
    nbytes = int(run.engine.memory_report().planned_peak_bytes)
    run.close()
    return nbytes


def interleaved(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each, round by round in turns, each after one untimed run."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


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
