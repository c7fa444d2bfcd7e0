"""What do tiles of tokens cost, where the whole step fits, too? `python -m benchmarks.tiles.run [--rounds 9]`.

A small Llama with a large vocabulary, fp32, on the CPU device: a step of two micro-batches of one row of 1,024 tokens,
whole, with the head and the loss in 8 tiles, and with parts of the layers in 4 or 8 tiles as well. Steps are interleaved;
a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from itertools import islice
from typing import Any

import torch

import harmony_ds
from benchmarks.common import MIB, interleaved, language_model, quiet, ratio, tokens

TOKENS, VOCABULARY, ACCUMULATION = 1024, 16384, 2
ROWS: dict[str, Any] = {
    "whole": "off",
    "head in 8 tiles": TOKENS // 8,
    "head and layers in 4 tiles": {"head": TOKENS // 4, "layers": TOKENS // 4},
    "head and layers in 8 tiles": {"head": TOKENS // 8, "layers": TOKENS // 8},
}
"""Values of harmony.tokens."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each that are timed (default: %(default)s)")
    options = parser.parse_args()
    quiet()
    engines = {name: engine_with(size) for name, size in ROWS.items()}
    for engine in engines.values():
        one_step(engine)
    seconds = interleaved({name: partial(one_step, engine) for name, engine in engines.items()}, options.rounds)
    print(f"{options.rounds} rounds, {ACCUMULATION} micro-batches of 1 x {TOKENS} tokens, fp32")
    for name, engine in engines.items():
        median, peak = statistics.median(seconds[name]), engine.memory_report().device_peak_bytes
        share = ratio(seconds[name], seconds["whole"])
        print(f"{name:<28}{median:8.3f} s {share:6.3f} of whole   device peak {peak / MIB:6.1f} MiB")


def engine_with(size: Any) -> harmony_ds.HarmonyEngine:
    """Return an engine of its own model, with the same weights in each."""
    model = language_model("llama", **SIZES)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "harmony": {"device": "cpu", "pack_layers": 2, "residency": "off", "stash": "host", "tokens": size},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def one_step(engine: harmony_ds.HarmonyEngine) -> None:
    """Train a step of the same micro-batches as every other."""
    engine.train_batch(islice(tokens(VOCABULARY, 1, TOKENS), ACCUMULATION))


if __name__ == "__main__":
    main()
