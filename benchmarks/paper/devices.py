"""Fig. 10 and 12 on devices in virtual time: replicas, pipeline, and swapping for each micro-batch, on one to four devices.

OMP_NUM_THREADS=1 python benchmarks/paper/devices.py [--quick]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from runner import MIB, NAIVE, OURS, Content, Options, main, panels
from torch import nn
from virtual import Pace, devices_of, keep_pace

import harmony_ds
from benchmarks.common import Stack

TITLE = "Fig. 10 and 12 on several devices, executed in virtual time"
PAPER = (
    "four GTX 1080 Ti as replicas and as a pipeline. Here streams of CPU devices keep virtual clocks: compute and copies "
    "take the time of a given profile, and everything else is the engine as it is."
)
ROWS, WIDTH = 4, 256
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
SWAP_MS = 30.0
PACE = Pace(forward_ms=40.0, propagate_ms=80.0, swap=LAYER_BYTES / SWAP_MS, peer=LAYER_BYTES / SWAP_MS * 8.2 / 11.5)
"""As GPT2-XL's layer for one sample on the paper's server: a swap of its weights takes three quarters of its forward pass;
the link is that of the whole server, between two devices there are 8.2 for its 11.5 GiB/s. So slow that what this engine's
own work takes is hidden even on a busy machine.
"""
SYSTEMS = {
    "pipeline": "pipeline in one process",
    "replicas": "replicas",
    "each_alone": "replicas that swap for each micro-batch",
}
_HARMONY = {"device": "cpu", "seed": 5, "pack_layers": 1, "stash": "device", "residency": "off"}


def run(options: Options) -> Content:
    layers, samples = (6, 6) if options.quick else (12, 12)
    steps = options.rounds
    rows = []
    for devices in (1, 2) if options.quick else (1, 2, 3, 4):
        row: Content = {"devices": devices}
        # One link for all devices of the server, as in the original's cost model.
        pace = replace(PACE, swap=PACE.swap / devices)
        row["pipeline"] = _executed(layers, samples, devices, pace, {}, steps)
        for name, harmony in (("replicas", {}), ("each_alone", {"grouping": False})):
            same = devices == 1 and not harmony  # as the pipeline
            one = row["pipeline"] if same else _executed(layers, samples // devices, 1, pace, harmony, steps)
            row[name] = {**one, "swapped_bytes": devices * one["swapped_bytes"]}
        rows.append(row)
        print({name: {key: round(value, 1) for key, value in row[name].items()} for name in SYSTEMS}, flush=True)
    return {
        "layers": layers,
        "layer_bytes": LAYER_BYTES,
        "micro_batches": samples,
        "forward_ms": PACE.forward_ms,
        "propagate_ms": PACE.propagate_ms,
        "rows": rows,
    }


def _executed(
    layers: int, micro_batches: int, devices: int, pace: Pace, harmony: dict[str, Any], steps: int
) -> dict[str, float]:
    """Return the milliseconds of a step, executed and as the engine predicts them, and what it swaps."""
    torch.manual_seed(3)
    model = Stack(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
    group = devices_of(pace, devices)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "harmony": {**_HARMONY, **harmony, "devices": devices},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config, device=group)
    keep_pace(engine, group, pace)
    batches = [{"x": torch.randn(ROWS, WIDTH)} for _ in range(micro_batches)]
    engine.train_batch(iter(batches))
    begin = group.now_ms()
    for _ in range(steps):
        engine.train_batch(iter(batches))
    executed = (group.now_ms() - begin) / steps
    predicted = engine._state.planner.choices[0].prediction.step_ms
    report = engine.swap_report()
    engine.destroy()
    return {"executed_ms": executed, "predicted_ms": predicted, "swapped_bytes": report.swap_bytes}


def draw(content: Content) -> Figure:
    figure, axes = panels("EXECUTED in virtual time: throughput", "COUNTED: swapped by all devices")
    rows = content["rows"]
    devices = [row["devices"] for row in rows]
    styles = {"pipeline": (OURS, "o-"), "replicas": (OURS, "s--"), "each_alone": (NAIVE, "^:")}
    for name, label in SYSTEMS.items():
        colour, line = styles[name]
        for key, form, own, text in (
            ("executed_ms", line, colour, label),
            ("predicted_ms", "x", "black", "simulated" if name == "pipeline" else None),
        ):
            speeds = [1e3 * content["micro_batches"] / row[name][key] for row in rows]
            axes[0].plot(devices, speeds, form, color=own, label=text)
        axes[1].plot(devices, [row[name]["swapped_bytes"] / MIB for row in rows], line, color=colour, label=label)
    axes[0].set(xlabel="devices", ylabel="micro-batches per second", xticks=devices)
    axes[0].set_ylim(bottom=0)
    axes[1].set(xlabel="devices", ylabel="swapped per step, MiB", yscale="log", xticks=devices)
    axes[0].legend(loc="upper left")
    return figure


def says(content: Content) -> str:
    rows, last = content["rows"], content["rows"][-1]
    scaled = "; ".join(
        f"{label} {', '.join(f'{factor:.2f}' for factor in _scaling(rows, name, 'executed_ms'))} times one device "
        f"(simulated: within {100 * _apart(rows, name):.1f} %)"
        for name, label in SYSTEMS.items()
    )
    swapped = {name: last[name]["swapped_bytes"] / MIB for name in SYSTEMS}
    slower = {name: last[name]["executed_ms"] / last["pipeline"]["executed_ms"] for name in SYSTEMS}
    return (
        f"{content['layers']} equal layers of {content['forward_ms']:.0f} ms forward and {content['propagate_ms']:.0f} ms "
        f"back, {content['micro_batches']} micro-batches, packs of one layer, whose weights take {SWAP_MS:.0f} ms of the "
        f"link that all devices share. With {', '.join(str(row['devices']) for row in rows)} devices: {scaled}. With "
        f"{last['devices']}, the pipeline swaps {swapped['pipeline']:.0f} MiB a step, replicas {swapped['replicas']:.0f} "
        f"({slower['replicas']:.2f} of its time), and swapping for each micro-batch {swapped['each_alone']:.0f} "
        f"({slower['each_alone']:.2f}). A replica runs alone, with its share of the link; adding up gradients is "
        "not counted, in their favour."
    )


def _scaling(rows: list[Content], name: str, key: str) -> list[float]:
    return [rows[0][name][key] / row[name][key] for row in rows]


def _apart(rows: list[Content], name: str) -> float:
    """Return the largest relative difference between executed and simulated scaling."""
    both = zip(_scaling(rows, name, "executed_ms"), _scaling(rows, name, "predicted_ms"), strict=True)
    return max(abs(executed / predicted - 1) for executed, predicted in both)


if __name__ == "__main__":
    main(__file__)
