"""Fine-tune a real sentence encoder on pairs of sentences with Hugging Face's Trainer, its class exchanged.

    python examples/finetune_minilm/train.py

The device budget is smaller than the training state (weights, gradients, two moments), so layers are swapped.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from pairs import PairClassifier, collator, load_encoder, load_pairs
from transformers import TrainingArguments

from harmony_ds.integrations.transformers import HarmonyTrainer


def main(arguments: Sequence[str] | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """Train; return the results of evaluation before and after."""
    options = parse_options(arguments)
    encoder, tokenizer = load_encoder()
    training, held_out = load_pairs()
    with tempfile.TemporaryDirectory() as folder:
        trainer = HarmonyTrainer(
            model=PairClassifier(encoder),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=8,
                per_device_eval_batch_size=16,
                max_steps=options.steps,
                learning_rate=options.learning_rate,
                warmup_steps=options.steps // 10,
                logging_steps=max(1, options.steps // 10),
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=training,
            eval_dataset=held_out[: options.eval_pairs],
            data_collator=collator(tokenizer, options.tokens),
            compute_metrics=accuracy,
            ds_config={"harmony": {"device_memory_gib": options.budget_gib}},
        )
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        print(trainer.harmony_engine.swap_report())
    for when, found in (("before", before), ("after", after)):
        print(f"{when}: loss {found['eval_loss']:.4f}, accuracy {found['eval_accuracy']:.3f}")
    return before, after


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM on pairs of sentences.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of a sentence at most (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="default: %(default)s")
    parser.add_argument("--eval-pairs", type=int, default=400, help="held-out pairs (default: %(default)s)")
    # On a GPU, cuBLAS's workspaces and the allocator's segments take up to 0.38 GiB whatever the model.
    budget_gib = 0.75 if torch.cuda.is_available() else 0.2
    parser.add_argument("--budget-gib", type=float, default=budget_gib, help="device memory (default: %(default)s)")
    return parser.parse_args(arguments)


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of pairs whose logit has the sign of its label."""
    return {"accuracy": float(((prediction.predictions > 0) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
