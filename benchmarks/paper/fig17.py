"""Fig. 17 and 18: to the limit of host memory: models grow, the device stays.

python benchmarks/paper/fig17.py [--quick] [--rounds 3]
"""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure
from models import Model, gpt2
from runner import MIB, NAIVE, OURS, PLAIN, Content, Options, main, panels

from benchmarks.common import interleaved
from benchmarks.training import Ours, adamw, planned_bytes

TITLE = "Fig. 17 and 18: to the limit of host memory"
PAPER = "GPT-2 of 10 to 40 billion parameters, one to eight GTX 1080 Ti, 750 GB of host memory."
LAYERS = (4, 8, 16, 32, 64)
ROWS, GROUP = 1, 2


def run(options: Options) -> Content:
    """Measure models of all depths under one device budget, that of the deepest model's smallest plan."""
    layers, hidden = ((4, 8), 64) if options.quick else (LAYERS, 128)
    models = [gpt2(count, hidden, 4, 32, 512) for count in layers]
    budget = planned_bytes(models[-1].seeded(), adamw, models[-1].batches(ROWS, GROUP), ROWS)
    rows = [grown(model, budget, options.rounds) for model in models]
    return {"measured": {"hidden": hidden, "budget_bytes": budget, "micro_batches": GROUP, "rows": rows}}


def grown(model: Model, budget: int, rounds: int) -> Content:
    batches = model.batches(ROWS, GROUP)
    run = Ours(model.seeded(), adamw, (ROWS, GROUP), budget, {"stash": "host"})
    seconds = interleaved({"step": lambda: run.step(batches)}, rounds)["step"]
    memory, parameters = run.engine.memory_report(), sum(p.numel() for p in run.model.parameters())
    run.close()
    return {
        "parameters": parameters,
        "state_bytes": 16 * parameters,
        "device_peak_bytes": memory.device_peak_bytes,
        "host_bytes": dict(memory.host_bytes),
        "host_bytes_per_parameter": sum(memory.host_bytes.values()) / parameters,
        "step_s": statistics.median(seconds),
    }


def draw(content: Content) -> Figure:
    part = content["measured"]
    rows = part["rows"]
    figure, (axes,) = panels("MEASURED: GPT-2 grows, the device does not")
    millions = [row["parameters"] / 1e6 for row in rows]
    for form, colour, label, values in (
        (":", PLAIN, "16 bytes per parameter", [row["state_bytes"] for row in rows]),
        ("o-", NAIVE, "host, counted", [sum(row["host_bytes"].values()) for row in rows]),
        ("o-", OURS, "device peak", [row["device_peak_bytes"] for row in rows]),
    ):
        axes.plot(millions, [nbytes / MIB for nbytes in values], form, color=colour, label=label)
    axes.axhline(part["budget_bytes"] / MIB, color=OURS, linestyle="--", linewidth=0.8, label="device budget")
    axes.set(xlabel="million parameters", ylabel="MiB", xscale="log", yscale="log")
    axes.legend()
    return figure


def says(content: Content) -> str:
    part = content["measured"]
    first, last = part["rows"][0], part["rows"][-1]
    return (
        f"Measured: GPT-2 from {first['parameters'] / 1e6:.1f} to {last['parameters'] / 1e6:.1f} million parameters under "
        f"one device budget of {part['budget_bytes'] / MIB:.2f} MiB: training state grows from "
        f"{first['state_bytes'] / MIB:.0f} to {last['state_bytes'] / MIB:.0f} MiB, and the peak never exceeds the budget "
        f"(at most {max(row['device_peak_bytes'] for row in part['rows']) / MIB:.2f}); the host holds "
        f"{last['host_bytes_per_parameter']:.1f} bytes per parameter at the largest: weights and moments 12, and gradients "
        "only of the packs that are under way."
    )


if __name__ == "__main__":
    main(__file__)
