"""Worth of spare device memory: bytes swapped, and step time, as the budget grows.

    python benchmarks/memory/run.py [--rounds 5] [--small]

A GPT-2 is trained under budgets from the least that fits to one that holds everything, in turns with plain PyTorch
training of the same model without offload. Writes benchmarks/results/memory.json and docs/images/memory.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import harmony_ds
from harmony_ds.bench.results import environment

ROOT = Path(__file__).parents[2]
MICRO_BATCHES, ROWS, TOKENS, VOCABULARY = 4, 2, 128, 2048
SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Parts of the way from the least budget to the one that holds everything."""


def build(small: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    layers, width = (4, 128) if small else (12, 384)
    shape = {"n_layer": layers, "n_embd": width, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": TOKENS}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config).train()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def plain_step(small: bool) -> Callable[[], None]:
    """Return a step of training without offload."""
    model, data = build(small), batches()
    optimizer = adamw(model.parameters())

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            (model(**next(data)).loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_under(small: bool, **harmony: Any) -> Any:
    """Return an engine of harmony_ds after two steps."""
    model = build(small)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "harmony": {"device": "cpu", **harmony},
    }
    engine, *_ = harmony_ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    for _ in range(2):
        engine.train_batch(batches())
    return engine


def measure(small: bool, budget: int, rounds: int) -> dict[str, Any]:
    """Measure one budget: its step time over plain training's, side by side, and its swaps."""
    plain, engine, data = plain_step(small), engine_under(small, device_memory_gib=budget / 2**30), batches()
    plain()
    ratios, seconds = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        plain()
        between = time.perf_counter()
        engine.train_batch(data)
        engine.finish_updates()
        seconds.append(time.perf_counter() - between)
        ratios.append(seconds[-1] / (between - begin))
    swaps, plan = engine.swap_report(), engine.plan
    found = {
        "budget_bytes": budget,
        "peak_bytes": engine.memory_report().device_peak_bytes,
        "swapped_bytes": swaps.swap_bytes,
        "stash_bytes": swaps.host_to_device["activations"] + swaps.device_to_host["activations"],
        "step_s": statistics.median(seconds),
        "over_plain": statistics.median(ratios),
        "packs": len(plan.packing.backward),
        "kept": len(plan.policy.kept),
        "resident": len(plan.policy.resident),
    }
    engine.destroy()
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    mib = [row["budget_bytes"] / 2**20 for row in rows]
    left.plot(mib, [row["swapped_bytes"] / 2**20 for row in rows], "o-", label="weights and gradients")
    left.plot(mib, [row["stash_bytes"] / 2**20 for row in rows], "s--", label="stash")
    right.plot(mib, [row["over_plain"] for row in rows], "o-", label="harmony_ds")
    right.axhline(1.0, color="black", linewidth=1, linestyle=":", label="no offload, no recomputation")
    for axes, what in ((left, "swapped per step, MiB"), (right, "step time / no offload")):
        axes.set(xlabel="device memory, MiB", ylabel=what, ylim=(0, None))
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a model that takes seconds; nothing is written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    smallest = engine_under(options.small, pack_layers=1, stash="host", prefetch=False, residency="off")
    least = smallest.memory_report().planned_peak_bytes
    smallest.destroy()
    growth = 1.6 * sum(4 * 4 * p.numel() for p in build(options.small).parameters())
    rows = []
    for share in SHARES:
        rows.append(measure(options.small, int(least + share * growth), options.rounds))
        print("  ".join(f"{name} {value:,.6g}" for name, value in rows[-1].items()), flush=True)
    if not options.small:
        content = {"environment": {**environment("cpu"), "command": " ".join(["python", *sys.argv])}, "rows": rows}
        results = ROOT / "benchmarks" / "results" / "memory.json"
        results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draw(rows, ROOT / "docs" / "images" / "memory.png")


if __name__ == "__main__":
    main()
