"""Fig. 8: micro-batch size against pack size, under one memory limit: larger packs leave less for micro-batches.

python benchmarks/paper/fig8.py [--quick] [--rounds 3]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from models import bert
from runner import MIB, Content, Options, main, panels

from benchmarks.common import interleaved, ratio
from benchmarks.training import Batch, Ours, Plain, planned_bytes, sgd
from harmony_ds import DoesNotFitError

TITLE = "Fig. 8: micro-batch against pack size"
PAPER = "BERT-Large, 600 samples, four GTX 1080 Ti: larger micro-batches with smaller packs against the reverse."
SAMPLES = 16
SIZES, PACKS = (1, 2, 4, 8), (1, 2, 4, 8)


def run(options: Options) -> Content:
    """Time every combination; `over_plain` is over plain PyTorch's step with micro-batches of one."""
    model = bert(8, 64 if options.quick else 128, 4, 32 if options.quick else 128, 256)
    sizes, packs = ((1, 4), (1, 8)) if options.quick else (SIZES, PACKS)
    samples = model.batches(1, SAMPLES)
    widest = {"pack_layers": 2, "stash": "host"}
    budget = int(1.02 * planned_bytes(model.seeded(), sgd, joined(samples, sizes[-1]), sizes[-1], widest))
    plain = Plain(model.seeded(), sgd)
    engines: dict[tuple[int, int], Ours] = {}
    for rows in sizes:
        for layers in packs:
            engine = Ours(model.seeded(), sgd, (rows, SAMPLES // rows), budget, {"pack_layers": layers})
            try:
                engine.step(joined(samples, rows))
                engines[rows, layers] = engine
            except DoesNotFitError:
                engine.close()
    steps: dict[str, Any] = {"plain": lambda: plain.step(samples)}
    for (rows, layers), engine in engines.items():
        steps[f"{rows} {layers}"] = lambda engine=engine, rows=rows: engine.step(joined(samples, rows))
    seconds = interleaved(steps, options.rounds)
    cells: list[Content] = []
    for rows in sizes:
        for layers in packs:
            cell: Content = {"rows": rows, "pack_layers": layers, "fits": (rows, layers) in engines}
            if cell["fits"]:
                cell["over_plain"] = ratio(seconds[f"{rows} {layers}"], seconds["plain"])
                cell["peak_bytes"] = engines[rows, layers].engine.memory_report().device_peak_bytes
                engines[rows, layers].close()
            cells.append(cell)
    weights = sum(4 * p.numel() for p in model.on_meta().parameters())
    measured = {"model": model.name, "samples": SAMPLES, "budget_bytes": budget, "weight_bytes": weights}
    return {"measured": measured | {"sizes": sizes, "packs": packs, "cells": cells}}


def joined(samples: list[Batch], rows: int) -> list[Batch]:
    """Return the same samples in micro-batches of `rows`."""
    whole = {key: [sample[key] for sample in samples] for key in samples[0]}
    starts = range(0, len(samples), rows)
    return [{key: torch.cat(values[start : start + rows]) for key, values in whole.items()} for start in starts]


def draw(content: Content) -> Figure:
    part = content["measured"]
    title = f"MEASURED: {part['model']}, {part['samples']} samples,\n{part['budget_bytes'] / MIB:.1f} MiB of device"
    figure, (axes,) = panels(f"{title}; step time / plain PyTorch", width=4.3)
    sizes, packs = list(part["sizes"]), list(part["packs"])
    values = np.full((len(sizes), len(packs)), np.nan)
    for cell in part["cells"]:
        place = sizes.index(cell["rows"]), packs.index(cell["pack_layers"])
        if cell["fits"]:
            values[place] = cell["over_plain"]
        shown = f"{cell['over_plain']:.2f}" if cell["fits"] else "does\nnot fit"
        axes.text(place[1], place[0], shown, ha="center", va="center", fontsize=7)
    axes.imshow(values, cmap="YlGnBu_r", aspect="auto", origin="lower", alpha=0.6)
    axes.set_xticks(range(len(packs)), list(map(str, packs)))
    axes.set_yticks(range(len(sizes)), list(map(str, sizes)))
    axes.set(xlabel="layers in a pack", ylabel="samples in a micro-batch")
    return figure


def says(content: Content) -> str:
    part = content["measured"]
    fits = sorted((cell for cell in part["cells"] if cell["fits"]), key=lambda cell: float(cell["over_plain"]))
    (fast, quick), (slow, long) = (
        (f"micro-batches of {cell['rows']} with packs of {cell['pack_layers']}", f"{cell['over_plain']:.2f}")
        for cell in (fits[0], fits[-1])
    )
    return (
        f"Measured: {part['model']} under {part['budget_bytes'] / MIB:.1f} MiB (weights "
        f"{part['weight_bytes'] / MIB:.1f}): {len(part['cells']) - len(fits)} of {len(part['cells'])} combinations do not "
        f"fit, and the engine says so before the step. Of the others, {fast} are fastest ({quick} of the time of plain "
        f"PyTorch's step with micro-batches of one), and {slow} slowest ({long})."
    )


if __name__ == "__main__":
    main(__file__)
