"""How much time do joined calls save? Eight micro-batches of one short row: one row or several rows in a layer call.

    OMP_NUM_THREADS=1 python -m benchmarks.joined.run          # a minute; writes benchmarks/results/joined.json

Engines that differ in `harmony.micro_batch` alone take turns step by step, on the CPU device under one budget. A time is
the median of the steps after the first two, a ratio the median of ratios to the step of "config" in the same round.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import harmony_ds
from benchmarks.common import interleaved, language_model, quiet, ratio, tokens, write_results

SETTINGS: list[Any] = ["config", {"forward": 4, "backward": 4}, {"forward": 8, "backward": 8}, "auto"]
MICRO_BATCHES, ROWS, TOKENS, VOCABULARY, ROUNDS = 8, 1, 64, 8192, 7


def made(micro_batch: Any) -> Any:
    """Return an engine over a Llama of 46 million parameters, after a step."""
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "harmony": {"device": "cpu", "device_memory_gib": 0.12, "micro_batch": micro_batch},
    }
    model = language_model("llama", **shape, vocab_size=VOCABULARY, max_position_embeddings=256)
    engine, *_ = harmony_ds.initialize(model=model, config=config)
    engine.train_batch(tokens(VOCABULARY, ROWS, TOKENS))
    return engine


def main() -> None:
    quiet()
    engines = {str(setting): made(setting) for setting in SETTINGS}
    steps = {name: partial(engine.train_batch, tokens(VOCABULARY, ROWS, TOKENS)) for name, engine in engines.items()}
    took = interleaved(steps, ROUNDS)
    print(f"{MICRO_BATCHES} micro-batches of {ROWS} x {TOKENS} tokens, fp32, one thread, 0.12 GiB")
    found: list[dict[str, Any]] = []
    for setting, (name, engine) in zip(SETTINGS, engines.items(), strict=True):
        step_ms, over = 1e3 * median(took[name]), ratio(took[name], took["config"])
        predicted, together = engine.plan_report().predicted_step_ms, engine.plan.policy.joined_count
        found.append({"micro_batch": setting, "step_ms": step_ms, "ratio": over, "together": together})
        found[-1] |= {"predicted_ms": predicted, "swap_ratio": engine.swap_report().ratio}
        print(f"{name:<32}{step_ms:9.1f} ms  {over:.3f}  predicted {predicted:9.1f} ms")
    write_results("joined", {"found": found})


if __name__ == "__main__":
    main()
