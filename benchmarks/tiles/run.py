"""What do tiles of tokens cost, where the whole step fits, too? `python -m benchmarks.tiles.run [--rounds 9]`.

A small Llama with a large vocabulary, fp32, on the CPU device: a step of two micro-batches of one row of 1,024
tokens, whole, with the head and the loss in 8 tiles, and with parts of the layers in 4 or 8 tiles as well. Steps are
interleaved; times are the processor's, medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import harmony_ds
from benchmarks.common import MIB, quiet

TOKENS, VOCABULARY, ACCUMULATION, WARM_UP = 1024, 16384, 2, 2
ROWS: dict[str, Any] = {
    "whole": "off",
    "head in 8 tiles": TOKENS // 8,
    "head and layers in 4 tiles": {"head": TOKENS // 4, "layers": TOKENS // 4},
    "head and layers in 8 tiles": {"head": TOKENS // 8, "layers": TOKENS // 8},
}
"""Values of harmony.tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each that are timed (default: %(default)s)")
    options = parser.parse_args()
    quiet()
    engines = {name: engine_with(tokens) for name, tokens in ROWS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    for step in range(WARM_UP + options.rounds):
        for name, engine in engines.items():
            begin = time.process_time()
            engine.train_batch(micro_batches(step))
            if step >= WARM_UP:
                seconds[name].append(time.process_time() - begin)
    whole = statistics.median(seconds["whole"])
    print(f"{options.rounds} rounds, {ACCUMULATION} micro-batches of 1 x {TOKENS} tokens, fp32")
    for name, engine in engines.items():
        median, peak = statistics.median(seconds[name]), engine.memory_report().device_peak_bytes
        print(f"{name:<28}{median:8.3f} s of processor time {median / whole:6.3f}   device peak {peak / MIB:6.1f} MiB")


def engine_with(tokens: Any) -> harmony_ds.HarmonyEngine:
    """Return an engine of its own model, with the same weights in each."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "harmony": {"device": "cpu", "pack_layers": 2, "residency": "off", "stash": "host", "tokens": tokens},
    }
    engine, *_ = harmony_ds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    return engine


def micro_batches(step: int) -> Iterator[dict[str, Tensor]]:
    """Yield the micro-batches of a step: the same for every engine."""
    for number in range(ACCUMULATION):
        generator = torch.Generator().manual_seed(ACCUMULATION * step + number)
        words = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
        yield {"input_ids": words, "labels": words}


if __name__ == "__main__":
    main()
