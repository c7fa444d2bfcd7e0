"""Savings by joined calls: eight micro-batches of one short row, one by one and several rows to a layer call.

    OMP_NUM_THREADS=1 python benchmarks/joined/run.py          # a minute; writes benchmarks/results/joined.json

Engines that differ in `harmony.micro_batch` alone take turns step by step, on the CPU device under one budget. A time is
the median of the steps after the first two, a ratio the median of ratios to the step of "config" in the same round.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import harmony_ds
from harmony_ds.bench.results import environment

RESULTS = Path(__file__).parents[1] / "results" / "joined.json"
SETTINGS = ["config", {"forward": 4, "backward": 4}, {"forward": 8, "backward": 8}, "auto"]
MICRO_BATCHES, ROWS, TOKENS, VOCABULARY = 8, 1, 64, 8192
STEPS, WARM_UP = 9, 2


def made(micro_batch: Any) -> Any:
    """Return an engine over a Llama of 46 million parameters."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=256, use_cache=False))
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "harmony": {"device": "cpu", "device_memory_gib": 0.12, "micro_batch": micro_batch},
    }
    return harmony_ds.initialize(model=model, config=config)[0]


def main() -> None:
    source = torch.Generator().manual_seed(1)
    engines = [made(setting) for setting in SETTINGS]
    took: list[list[float]] = [[] for _ in engines]
    for _ in range(STEPS):
        ids = [torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=source) for _ in range(MICRO_BATCHES)]
        for engine, ms in zip(engines, took, strict=True):
            begin = time.perf_counter()
            engine.train_batch(iter([{"input_ids": own, "labels": own} for own in ids]))
            ms.append((time.perf_counter() - begin) * 1e3)
    print(
        f"{MICRO_BATCHES} micro-batches of {ROWS} x {TOKENS} tokens, fp32, {torch.get_num_threads()} threads, 0.12 GiB"
    )
    found = []
    for setting, engine, ms in zip(SETTINGS, engines, took, strict=True):
        ratio = median(own / base for own, base in zip(ms[WARM_UP:], took[0][WARM_UP:], strict=True))
        predicted, together = engine.plan_report().predicted_step_ms, engine.plan.policy.together
        found.append({"micro_batch": setting, "step_ms": median(ms[WARM_UP:]), "ratio": ratio, "together": together})
        found[-1] |= {"predicted_ms": predicted, "swap_ratio": engine.swap_report().ratio}
        print(f"{setting!s:<32}{found[-1]['step_ms']:9.1f} ms  {ratio:.3f}  predicted {predicted:9.1f} ms")
    RESULTS.write_text(
        json.dumps({"environment": environment("cpu"), "found": found}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
