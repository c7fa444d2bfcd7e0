"""How good are the predictions? Trains small models under several plans and compares.

    python -m benchmarks.prediction.run            predicted against measured step time, four models, three plans each
    torchrun --nproc_per_node 2 -m benchmarks.prediction.run       with two processes that share the gradients
    ... -m benchmarks.prediction.run --link 16     either with a link of 16 MiB/s in each direction, beside compute
    python -m benchmarks.prediction.run --disk 200      with masters and moments on a disk that moves 200 MiB/s

Every number is a ratio of two times taken side by side: the model is profiled and trained by turns, so that a slow
minute of the machine slows both. Prints a line per plan and writes JSON to benchmarks/results/. The link is that of
`benchmarks.paper.virtual`: copies take their bytes over its rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import nn

import harmony_ds
from benchmarks.common import GIB, MIB, language_model, quiet, tokens, write_results
from benchmarks.paper.virtual import VirtualDevice

VOCABULARY = 2048
RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2, narrow and deep": {"layers": 16, "hidden": 256, "tokens": 128, "rows": 2, "budgets": (0.5, 0.8, 1.5)},
    "gpt2, wide and flat": {"layers": 4, "hidden": 768, "tokens": 64, "rows": 2, "budgets": (1.5, 2.0, 4.0)},
    "gpt2, long sequences": {"layers": 6, "hidden": 256, "tokens": 512, "rows": 1, "budgets": (2.3, 3.0, 5.0)},
    "llama": {"layers": 8, "hidden": 384, "tokens": 128, "rows": 2, "budgets": (0.6, 1.0, 2.0)},
}
"""Models; `budgets` in multiples of the bytes of their weights."""
MICRO_BATCHES = {"gpt2, long sequences": 3}


def build(name: str) -> nn.Module:
    shape = SHAPES[name]
    sizes = {"hidden_size": shape["hidden"], "num_hidden_layers": shape["layers"], "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": shape["tokens"]}
    if name == "llama":
        return language_model("llama", **sizes, intermediate_size=3 * shape["hidden"], num_key_value_heads=4)
    return language_model("gpt2", **sizes, bos_token_id=0, eos_token_id=0)


def slow_down_disk(rate: float) -> None:
    """Let what the engine reads and writes in files take its bytes over `rate` (MiB/s), one transfer at a time."""
    busy = threading.Lock()

    def at_rate(call: Callable[..., int]) -> Callable[..., int]:
        def transfer(*arguments: Any) -> int:
            with busy:
                moved = call(*arguments)
                time.sleep(moved / rate / MIB)
            return moved

        return transfer

    os.preadv, os.pwritev = at_rate(os.preadv), at_rate(os.pwritev)


def measure(name: str, budget: float, steps: int, link: float | None, disk: float | None) -> Any:
    """Train `steps` steps in a new engine, and return its plan report. `link`: MiB/s in each direction (None: as it is)."""
    shape = SHAPES[name]
    harmony: dict[str, Any] = {"device": "cpu", "device_memory_gib": budget / GIB}
    device = None
    if link is not None:
        rate = link * MIB / 1e3
        device = VirtualDevice(rate, rate, int(budget), computes=True)
        harmony |= {"weights": "whole", "reduce": "host"}  # between devices nothing can run beside compute here
    config = {
        "train_micro_batch_size_per_gpu": shape["rows"],
        "gradient_accumulation_steps": MICRO_BATCHES.get(name, 4),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "harmony": harmony,
    }
    if disk is not None:
        config["zero_optimization"] = {"offload_optimizer": {"device": "nvme", "nvme_path": tempfile.gettempdir()}}
    engine, *_ = harmony_ds.initialize(device=device, model=build(name), config=config)
    data = tokens(VOCABULARY, shape["rows"], shape["tokens"], seed=1 + RANK)
    for _ in range(steps + 2):
        engine.train_batch(data)
    report = engine.plan_report()
    engine.destroy()
    return report


def compared(name: str, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Compare predicted with measured step times: medians over rounds, each with a profile and an engine of its own."""
    budget = share * sum(p.numel() * p.element_size() for p in build(name).parameters())
    reports = [measure(name, budget, options.steps, options.link, options.disk) for _ in range(options.rounds)]
    ratios = [report.predicted_step_ms / report.typical_step_ms for report in reports]
    found = {
        "shape": {"name": name, **SHAPES[name]},
        "budget_bytes": int(budget),
        "link_mib_per_s": options.link,
        "disk_mib_per_s": options.disk,
        "plan": reports[-1].choices[0].reason,
        "predicted_ms": [report.predicted_step_ms for report in reports],
        "measured_ms": [report.typical_step_ms for report in reports],
        "ratio": statistics.median(ratios),
        "planned_peak": reports[-1].choices[0].plan.peak_bytes,
        "measured_peak": reports[-1].device_peak_bytes,
    }
    if RANK == 0:
        predicted, measured = (statistics.median(found[key]) for key in ("predicted_ms", "measured_ms"))
        print(
            f"{name:<24} {share:>4} x weights  predicted {predicted:8.1f} ms  measured {measured:8.1f} ms  "
            f"ratio {found['ratio']:.3f} [{min(ratios):.3f}, {max(ratios):.3f}]  {found['plan']}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--link", type=float, metavar="MIB/S", help="a link of that rate, beside compute")
    parser.add_argument("--disk", type=float, metavar="MIB/S", help="masters and moments on a disk of that rate")
    options = parser.parse_args()
    quiet()
    if options.disk is not None:
        slow_down_disk(options.disk)
    rows = [compared(name, share, options) for name in SHAPES for share in SHAPES[name]["budgets"]]
    if RANK == 0:
        several = f"-{PROCESSES}-processes" if PROCESSES > 1 else ""
        slow = ("-slow-link" if options.link is not None else "") + ("-disk" if options.disk is not None else "")
        write_results(f"prediction{several}{slow}", {"rows": rows})


if __name__ == "__main__":
    main()
