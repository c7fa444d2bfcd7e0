"""What is spare device memory worth? Bytes swapped, and step time, as the budget grows.

    python -m benchmarks.memory.run

A GPT-2 is trained under budgets from the least that fits to one that holds everything, in turns with plain PyTorch
training of the same model without offload. Writes benchmarks/results/memory.json and docs/images/memory.png.
"""

from __future__ import annotations

import statistics
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.common import MIB, ROOT, interleaved, language_model, quiet, ratio, tokens, write_results
from benchmarks.training import LEAST, Ours, Plain, adamw, planned_bytes, weight_bytes

MICRO_BATCHES, ROWS, TOKENS, VOCABULARY, ROUNDS = 4, 2, 128, 2048, 5
SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Parts of the way from the least budget to the one that holds everything."""
BATCHES = [*islice(tokens(VOCABULARY, ROWS, TOKENS), MICRO_BATCHES)]


def build() -> nn.Module:
    sizes = {"n_layer": 12, "n_embd": 384, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": TOKENS}
    return language_model("gpt2", **sizes, bos_token_id=0, eos_token_id=0)


def measure(budget: int) -> dict[str, Any]:
    """Measure one budget: its step time over plain training's, side by side, and its swaps."""
    plain, ours = Plain(build(), adamw), Ours(build(), adamw, (ROWS, MICRO_BATCHES), budget)
    ours.step(BATCHES)
    seconds = interleaved({"plain": lambda: plain.step(BATCHES), "ours": lambda: ours.step(BATCHES)}, ROUNDS)
    swaps, plan = ours.engine.swap_report(), ours.engine.plan
    found = {
        "budget_bytes": budget,
        "peak_bytes": ours.engine.memory_report().device_peak_bytes,
        "swapped_bytes": swaps.swap_bytes,
        "stash_bytes": swaps.host_to_device["activations"] + swaps.device_to_host["activations"],
        "step_s": statistics.median(seconds["ours"]),
        "over_plain": ratio(seconds["ours"], seconds["plain"]),
        "packs": len(plan.packing.backward),
        "kept": len(plan.policy.kept),
        "resident": len(plan.policy.resident),
    }
    ours.close()
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    mib = [row["budget_bytes"] / MIB for row in rows]
    left.plot(mib, [row["swapped_bytes"] / MIB for row in rows], "o-", label="weights and gradients")
    left.plot(mib, [row["stash_bytes"] / MIB for row in rows], "s--", label="stash")
    right.plot(mib, [row["over_plain"] for row in rows], "o-", label="harmony_ds")
    right.axhline(1.0, color="black", linewidth=1, linestyle=":", label="no offload, no recomputation")
    for axes, what in ((left, "swapped per step, MiB"), (right, "step time / no offload")):
        axes.set(xlabel="device memory, MiB", ylabel=what, ylim=(0, None))
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    quiet()
    model = build()
    growth = 1.6 * 4 * weight_bytes(model)
    least = planned_bytes(model, adamw, BATCHES, ROWS, {**LEAST, "residency": "off"})
    rows = []
    for share in SHARES:
        rows.append(measure(int(least + share * growth)))
        print("  ".join(f"{name} {value:,.6g}" for name, value in rows[-1].items()), flush=True)
    write_results("memory", {"rows": rows})
    draw(rows, ROOT / "docs" / "images" / "memory.png")


if __name__ == "__main__":
    main()
