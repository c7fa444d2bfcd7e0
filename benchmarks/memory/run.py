"""Worth of spare device memory: bytes swapped, and step time, as the budget grows.

    python benchmarks/memory/run.py [--rounds 5] [--small]

A GPT-2 is trained under budgets from the least that fits to one that holds everything, in turns with plain PyTorch
training of the same model without offload. Writes benchmarks/results/memory.json and docs/images/memory.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import harmony_ds

ROOT = Path(__file__).parents[2]
GIB = 2**30
MICRO_BATCHES, ROWS, TOKENS, VOCABULARY = 4, 2, 128, 2048
SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Of the way from the least budget to the one that holds everything."""


def build(small: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4 if small else 12,
        n_embd=128 if small else 384,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).train()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Plain:
    """Training without offload."""

    def __init__(self, small: bool) -> None:
        self._model = build(small)
        self._optimizer = adamw(self._model.parameters())
        self._data = batches()

    def step(self) -> float:
        begin = time.perf_counter()
        for _ in range(MICRO_BATCHES):
            (self._model(**next(self._data)).loss / MICRO_BATCHES).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin


class Ours:
    """Training under a budget in bytes (None: none)."""

    def __init__(self, small: bool, budget: int | None, **harmony: Any) -> None:
        model = build(small)
        if budget is not None:
            harmony["device_memory_gib"] = budget / GIB
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.0,
            "harmony": {"device": "cpu", **harmony},
        }
        self.engine, *_ = harmony_ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
        self._data = batches()
        for _ in range(2):
            self.step()

    def step(self) -> float:
        begin = time.perf_counter()
        self.engine.train_batch(self._data)
        self.engine.finish_updates()
        return time.perf_counter() - begin

    def close(self) -> None:
        self.engine.destroy()


def peak(small: bool, **harmony: Any) -> int:
    """Return the bytes that a plan takes without a limit."""
    run = Ours(small, None, **harmony)
    nbytes = run.engine.memory_report().planned_peak_bytes
    run.close()
    return nbytes


def measure(small: bool, budget: int, rounds: int) -> dict[str, Any]:
    """Measure one budget: its step time over plain training's, side by side, and its swaps."""
    plain, ours = Plain(small), Ours(small, budget)
    plain.step()
    ratios, seconds = [], []
    for _ in range(rounds):
        alone = plain.step()
        seconds.append(ours.step())
        ratios.append(seconds[-1] / alone)
    swaps, plan = ours.engine.swap_report(), ours.engine.plan
    assert plan is not None
    found = {
        "budget_bytes": budget,
        "peak_bytes": ours.engine.memory_report().device_peak_bytes,
        "swapped_bytes": swaps.swap_bytes,
        "stash_bytes": swaps.host_to_device["activations"] + swaps.device_to_host["activations"],
        "step_s": statistics.median(seconds),
        "over_plain": statistics.median(ratios),
        "packs": len(plan.packing.backward),
        "kept": len(plan.policy.kept),
        "resident": len(plan.policy.resident),
    }
    ours.close()
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mib = [row["budget_bytes"] / 2**20 for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    left.plot(mib, [row["swapped_bytes"] / 2**20 for row in rows], "o-", label="weights and gradients")
    left.plot(mib, [row["stash_bytes"] / 2**20 for row in rows], "s--", label="stash")
    left.set(xlabel="device memory, MiB", ylabel="swapped per step, MiB", ylim=(0, None))
    left.legend(frameon=False)
    right.plot(mib, [row["over_plain"] for row in rows], "o-", label="harmony_ds")
    right.axhline(1.0, color="black", linewidth=1, linestyle=":", label="no offload, no recomputation")
    right.set(xlabel="device memory, MiB", ylabel="step time / no offload", ylim=(0, None))
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a model that takes seconds; nothing is written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    least = peak(options.small, pack_layers=1, stash="host", prefetch=False, residency="off")
    state = sum(4 * 4 * p.numel() for p in build(options.small).parameters())
    most = least + int(1.6 * state)
    rows = []
    print(f"{'budget':>12} {'peak':>12} {'swapped':>12} {'stash':>10} {'/ plain':>8}  packs kept resident")
    for share in SHARES:
        row = measure(options.small, int(least + share * (most - least)), options.rounds)
        rows.append(row)
        print(
            f"{row['budget_bytes']:>12,} {row['peak_bytes']:>12,} {row['swapped_bytes']:>12,} {row['stash_bytes']:>10,} "
            f"{row['over_plain']:>8.2f}  {row['packs']:>5} {row['kept']:>4} {row['resident']:>8}",
            flush=True,
        )
    if options.small:
        return
    environment = {
        "command": "python " + " ".join(sys.argv),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "dtype": "fp32",
        "micro_batch": ROWS,
        "accumulation": MICRO_BATCHES,
        "tokens_per_step": MICRO_BATCHES * ROWS * TOKENS,
        "rounds": options.rounds,
    }
    results = ROOT / "benchmarks" / "results" / "memory.json"
    results.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    draw(rows, ROOT / "docs" / "images" / "memory.png")


if __name__ == "__main__":
    main()
