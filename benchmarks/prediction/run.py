"""How good are the predictions? Trains small models under several plans and compares.

    python benchmarks/prediction/run.py            predicted against measured step time, four models, three plans each
    torchrun --nproc_per_node 2 benchmarks/prediction/run.py       the first with two processes that share the gradients
    ... run.py --link 16     either with a link of 16 MiB/s in each direction, beside compute (see slow_link.py)

Every number is a ratio of two times taken side by side: the model is profiled and trained by turns, so that a slow
minute of the machine slows both. Prints a line per plan and writes JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slow_link import SlowLinkDevice

import harmony_ds
from harmony_ds.bench.results import environment

RESULTS = Path(__file__).parent.parent / "results"
GIB = 2**30
VOCABULARY = 2048
RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Shape:
    """A model and its steps; `budgets` in multiples of the bytes of its weights."""

    name: str
    layers: int
    hidden: int
    tokens: int
    micro_batch: int
    accumulation: int
    budgets: tuple[float, ...]
    family: str = "gpt2"


SHAPES = (
    Shape("gpt2, narrow and deep", 16, 256, 128, 2, 4, (0.5, 0.8, 1.5)),
    Shape("gpt2, wide and flat", 4, 768, 64, 2, 4, (1.5, 2.0, 4.0)),
    Shape("gpt2, long sequences", 6, 256, 512, 1, 3, (2.3, 3.0, 5.0)),
    Shape("llama", 8, 384, 128, 2, 4, (0.6, 1.0, 2.0), "llama"),
)


def build(shape: Shape) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": shape.tokens}
    ends = {"bos_token_id": 0, "eos_token_id": 0} if shape.family == "gpt2" else {}
    inner = {"intermediate_size": 3 * shape.hidden, "num_key_value_heads": 4} if shape.family == "llama" else {}
    config = transformers.AutoConfig.for_model(shape.family, use_cache=False, **sizes, **ends, **inner)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batches(shape: Shape) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1 + RANK)
    while True:
        ids = torch.randint(0, VOCABULARY, (shape.micro_batch, shape.tokens), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def engine_for(shape: Shape, link: float | None, **harmony: Any) -> Any:
    device = None
    if link is not None:
        device = SlowLinkDevice(link * 2**20, int(harmony["device_memory_gib"] * GIB))
        harmony |= {"weights": "whole", "reduce": "host"}  # between devices nothing can run beside compute here
    engine, *_ = harmony_ds.initialize(
        device=device,
        model=build(shape),
        config={
            "train_micro_batch_size_per_gpu": shape.micro_batch,
            "gradient_accumulation_steps": shape.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "harmony": {"device": "cpu", **harmony},
        },
    )
    return engine


def weight_bytes(shape: Shape) -> int:
    return sum(p.numel() * p.element_size() for p in build(shape).parameters())


def measure(shape: Shape, steps: int, harmony: dict[str, Any], link: float | None = None) -> Any:
    """Train `steps` steps in a new engine, and return its plan report. `link`: MiB/s in each direction (None: as it is)."""
    engine = engine_for(shape, link, **harmony)
    data = batches(shape)
    for _ in range(steps + 2):
        engine.train_batch(data)
    report = engine.plan_report()
    engine.destroy()
    return report


def say(line: str) -> None:
    """Print once for all processes."""
    if RANK == 0:
        print(line, flush=True)


def _chosen(only: str | None) -> list[Shape]:
    return [shape for shape in SHAPES if only in (None, shape.name)]


def accuracy(rounds: int, steps: int, only: str | None, link: float | None) -> list[dict[str, Any]]:
    """Compare predicted with measured step times: medians over rounds, each with a profile and an engine of its own."""
    rows = []
    for shape in _chosen(only):
        weights = weight_bytes(shape)
        for share in shape.budgets:
            harmony = {"device_memory_gib": share * weights / GIB}
            reports = [measure(shape, steps, harmony, link) for _ in range(rounds)]
            ratios = [report.predicted_step_ms / report.typical_step_ms for report in reports]
            row = {
                "shape": asdict(shape),
                "budget_bytes": int(share * weights),
                "link_mib_per_s": link,
                "plan": reports[-1].choices[0].reason,
                "predicted_ms": [r.predicted_step_ms for r in reports],
                "measured_ms": [r.typical_step_ms for r in reports],
                "ratio": statistics.median(ratios),
                "planned_peak": reports[-1].choices[0].plan.peak_bytes,
                "measured_peak": reports[-1].device_peak_bytes,
            }
            rows.append(row)
            say(
                f"{shape.name:<24} {share:>4} x weights  predicted {statistics.median(row['predicted_ms']):8.1f} ms  "
                f"measured {statistics.median(row['measured_ms']):8.1f} ms  ratio {row['ratio']:.3f} "
                f"[{min(ratios):.3f}, {max(ratios):.3f}]  {row['plan']}"
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--link", type=float, metavar="MIB/S", help="a link of that rate, beside compute")
    parser.add_argument("--only", metavar="NAME", help="one shape; the file keeps what it has of the others")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    begin = time.time()
    rows = accuracy(arguments.rounds, arguments.steps, arguments.only, arguments.link)
    if RANK != 0:
        return 0
    name, launcher = "prediction", ["python"]
    if PROCESSES > 1:
        name += f"-{PROCESSES}-processes"
        launcher = ["torchrun", "--nproc_per_node", str(PROCESSES)]
    if arguments.link is not None:
        name += "-slow-link"
    command = " ".join([*launcher, "benchmarks/prediction/run.py", *sys.argv[1:]])
    found = {**environment("cpu"), "command": command, "threads": torch.get_num_threads()}
    found["seconds"] = round(time.time() - begin)
    path = RESULTS / f"{name}.json"
    if arguments.only is not None and path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in kept if row["shape"]["name"] != arguments.only] + rows
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"environment": found, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
