"""Print the report of a plan on a small Llama: `python -m benchmarks.prediction.report [--write]`.

The engine trains a few steps on the CPU device, with less memory than the model's training state. With --write the report
goes into docs/planning.md. Takes about ten seconds.
"""

from __future__ import annotations

import argparse

import harmony_ds
from benchmarks.common import ROOT, language_model, put_table, quiet, tokens

PAGE = ROOT / "docs" / "planning.md"
BEGIN = "<!-- report: python -m benchmarks.prediction.report --write -->"
STEPS, VOCABULARY = 5, 2048
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "harmony": {"device": "cpu", "device_memory_gib": 0.03, "progress": False},
}


def main() -> None:
    """Print the report; with --write, write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the report into docs/{PAGE.name}")
    options = parser.parse_args()
    quiet()
    text = report()
    print(text)
    if options.write:
        put_table(PAGE, BEGIN, ["", *(f"    {line}" for line in text.splitlines()), ""])


def report() -> str:
    """Train a few steps, and return what the engine says of its plan."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = language_model("llama", **sizes, num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=128)
    engine, *_ = harmony_ds.initialize(model=model, config=CONFIG)
    data = tokens(VOCABULARY, 2, 128)
    for _ in range(STEPS):
        engine.train_batch(data)
    text = str(engine.plan_report())
    engine.destroy()
    return text


if __name__ == "__main__":
    main()
