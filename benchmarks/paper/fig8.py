"""Fig. 8: micro-batch size against pack size, under one memory limit: larger packs leave less for micro-batches.

python benchmarks/paper/fig8.py [--quick] [--rounds 3]
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import torch
from common import GIB, MEASURED, MIB, SIMULATED, Content, Experiment, Options, panels
from machine import CAP_BYTES, MACHINE, costs_of, reference
from matplotlib.figure import Figure
from models import Model, bert
from training import Batch, Ours, Plain, interleaved, planned_bytes, sgd

from benchmarks.vldb22.planner.graph import Mode, Schedule, Setup
from benchmarks.vldb22.planner.simulate import simulate
from harmony_ds import DoesNotFitError
from harmony_ds.scheduler.partition import uniform_bounds

SAMPLES = 16
SIZES, PACKS = (1, 2, 4, 8), (1, 2, 4, 8)
PAPER_SAMPLES, DEVICES = 600, 4
PAPER_SIZES, PAPER_PACKS = (2, 5, 10, 15, 20, 25, 30), (1, 2, 4, 7, 14)


def run(options: Options) -> Content:
    model = bert(8, 64 if options.quick else 128, 4, 32 if options.quick else 128, 256)
    sizes, packs = ((1, 4), (1, 8)) if options.quick else (SIZES, PACKS)
    return {
        "measured": _measured(model, sizes, packs, options.rounds),
        "simulated": _simulated(),
    }


def _cut(samples: list[Batch], rows: int) -> list[Batch]:
    """The same samples in micro-batches of `rows`."""
    whole = {key: [sample[key] for sample in samples] for key in samples[0]}
    return [
        {key: torch.cat(values[start : start + rows]) for key, values in whole.items()}
        for start in range(0, len(samples), rows)
    ]


def _measured(model: Model, sizes: tuple[int, ...], packs: tuple[int, ...], rounds: int) -> Content:
    """Step times over that of plain PyTorch with micro-batches of one; None where the plan does not fit."""
    samples = model.batches(1, SAMPLES)
    widest = {"pack_layers": 2, "stash": "host"}
    budget = int(1.02 * planned_bytes(model.seeded(), sgd, _cut(samples, sizes[-1]), sizes[-1], widest))
    plain = Plain(model.seeded(), sgd)
    engines: dict[tuple[int, int], Ours] = {}
    cells: list[Content] = []
    for rows in sizes:
        for layers in packs:
            run = Ours(model.seeded(), sgd, (rows, SAMPLES // rows), budget, {"pack_layers": layers})
            try:
                run.step(_cut(samples, rows))
                engines[rows, layers] = run
            except DoesNotFitError:
                run.close()
                cells.append({"rows": rows, "pack_layers": layers, "fits": False})
    steps: dict[str, Any] = {"plain": lambda: plain.step(samples)}
    for (rows, layers), run in engines.items():
        steps[f"{rows} {layers}"] = lambda run=run, rows=rows: run.step(_cut(samples, rows))
    seconds = interleaved(steps, rounds)
    for (rows, layers), run in engines.items():
        mine = seconds[f"{rows} {layers}"]
        report = run.engine.swap_report()
        cells.append(
            {
                "rows": rows,
                "pack_layers": layers,
                "fits": True,
                "over_plain": statistics.median(a / b for a, b in zip(mine, seconds["plain"], strict=True)),
                "peak_bytes": run.engine.memory_report().device_peak_bytes,
                "swap_bytes": report.swap_bytes,
                "seconds": mine,
            }
        )
        run.close()
    return {
        "model": model.name,
        "samples": SAMPLES,
        "budget_bytes": budget,
        "weight_bytes": sum(4 * p.numel() for p in model.on_meta().parameters()),
        "plain_seconds": seconds["plain"],
        "sizes": sizes,
        "packs": packs,
        "cells": cells,
    }


def _simulated() -> Content:
    """BERT-Large by its published profile: packs of equal size, forward micro-batches twice the backward ones, as in the
    published schedules.
    """
    costs, setup = costs_of("BERT-Large"), Setup(Mode.PIPELINE, DEVICES, PAPER_SAMPLES)
    shipped = {}
    for case in reference.shipped("bert_large"):
        if case.setup == setup and "_P" in case.name:
            shipped[case.schedule.backward_micro_batch, int(case.name.rpartition("_P")[2])] = case.time_s[1]
    cells: list[Content] = []
    for rows in PAPER_SIZES:
        for layers in PAPER_PACKS:
            bounds = uniform_bounds(costs.count, layers)
            needed = max(costs.memory(True, rows)(*pack) for pack in pairwise(bounds))
            needed = max(needed, *(costs.memory(False, 2 * rows)(*pack) for pack in pairwise(bounds[:-1])))
            schedule = Schedule(2 * rows, bounds[:-1], rows, bounds)
            cell: Content = {"rows": rows, "pack_layers": layers, "needed_bytes": needed, "fits": needed <= CAP_BYTES}
            cell["s"] = simulate(setup, schedule, costs, MACHINE, overlap=True).time_ms / 1000
            cell["published_s"] = shipped.get((rows, layers))
            cells.append(cell)
    return {
        "model": "BERT-Large",
        "samples": PAPER_SAMPLES,
        "devices": DEVICES,
        "cap_bytes": CAP_BYTES,
        "sizes": PAPER_SIZES,
        "packs": PAPER_PACKS,
        "cells": cells,
    }


def draw(content: Content) -> Figure:
    measured, simulated = content["measured"], content["simulated"]
    figure, axes = panels(
        f"{MEASURED}: {measured['model']}, {measured['samples']} samples,\n"
        f"{measured['budget_bytes'] / MIB:.1f} MiB of device; step time / plain PyTorch",
        f"{SIMULATED}: {simulated['model']},\n{simulated['samples']} samples, {simulated['devices']} devices; s per step",
        width=4.3,
    )
    _draw(axes[0], measured, "over_plain", "{:.2f}")
    _draw(axes[1], simulated, "s", "{:.1f}")
    axes[0].set_xlabel("layers in a pack")
    axes[1].set_xlabel("layers in a pack (box: a published schedule)")
    axes[0].set_ylabel("samples in a micro-batch")
    axes[1].set_ylabel("samples in a backward micro-batch")
    return figure


def _draw(axes: Any, part: Content, key: str, text: str) -> None:
    import numpy as np

    sizes, packs = list(part["sizes"]), list(part["packs"])
    values = np.full((len(sizes), len(packs)), np.nan)
    for cell in part["cells"]:
        place = sizes.index(cell["rows"]), packs.index(cell["pack_layers"])
        if cell["fits"]:
            values[place] = cell[key]
        shown = text.format(cell[key]) if cell["fits"] else "does\nnot fit"
        axes.text(place[1], place[0], shown, ha="center", va="center", fontsize=7 if cell["fits"] else 6)
        if cell.get("published_s"):
            axes.add_patch(_box(place))
    axes.imshow(values, cmap="YlGnBu_r", aspect="auto", origin="lower", alpha=0.6)
    axes.set_xticks(range(len(packs)), [str(one) for one in packs])
    axes.set_yticks(range(len(sizes)), [str(one) for one in sizes])


def _box(place: tuple[int, int]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((place[1] - 0.46, place[0] - 0.46), 0.92, 0.92, fill=False, edgecolor="#c8642b", linewidth=1.4)


def says(content: Content) -> str:
    measured, simulated = content["measured"], content["simulated"]
    fits = [cell for cell in measured["cells"] if cell["fits"]]
    fast, slow = min(fits, key=_over), max(fits, key=_over)
    possible = [cell for cell in simulated["cells"] if cell["fits"]]
    best, worst = min(possible, key=lambda c: c["s"]), max(possible, key=lambda c: c["s"])
    known = [cell for cell in simulated["cells"] if cell["published_s"]]
    error = max(abs(cell["s"] / cell["published_s"] - 1) for cell in known)
    return (
        f"Measured: {measured['model']} under {measured['budget_bytes'] / MIB:.1f} MiB (weights "
        f"{measured['weight_bytes'] / MIB:.1f}): {len(measured['cells']) - len(fits)} of {len(measured['cells'])} "
        f"combinations do not fit, and the engine says so before the step; of the others, {_named(fast)} takes least "
        f"({_over(fast):.2f} of plain PyTorch's step with micro-batches of one) and {_named(slow)} most "
        f"({_over(slow):.2f}). Simulated: {simulated['model']} by its published profile, {simulated['devices']} devices, "
        f"{simulated['cap_bytes'] / GIB:.0f} GiB: {_named(best)} is the best of the grid with {best['s']:.1f} s, "
        f"{_named(worst)} takes {worst['s']:.1f} s; the {len(known)} published schedules among them come out within "
        f"{100 * error:.1f} % of the original's own estimates."
    )


def _over(cell: Content) -> float:
    return float(cell["over_plain"])


def _named(cell: Content) -> str:
    return f"{cell['rows']} samples by {cell['pack_layers']} layers"


EXPERIMENT = Experiment("fig8", "Fig. 8: micro-batch against pack size", run, draw, says)

if __name__ == "__main__":
    EXPERIMENT.main()
