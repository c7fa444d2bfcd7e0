"""LoRA by peft in DeepSpeed's own loop: the encoder's weights are frozen, so they are swapped in and never out.

python examples/finetune_minilm/train_lora.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from pairs import PairClassifier, collator, load_encoder, load_pairs
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

import harmony_ds

MICRO_BATCH = 4
ACCUMULATION = 8


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    options = parse_options(arguments)
    encoder, tokenizer = load_encoder()
    torch.manual_seed(0)
    adapted = get_peft_model(encoder, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"]))
    adapted.print_trainable_parameters()
    model = PairClassifier(adapted)
    training, _ = load_pairs()
    wanted = options.steps * ACCUMULATION * MICRO_BATCH
    repeated = [training[index % len(training)] for index in range(wanted)]

    engine, _, _, _ = harmony_ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.learning_rate),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "steps_per_print": options.steps,
            "harmony": {"device_memory_gib": options.budget_gib},
        },
    )
    losses, group = [], []
    for batch in DataLoader(repeated, batch_size=MICRO_BATCH, collate_fn=collator(tokenizer, options.tokens)):
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        group.append(loss.detach())
        engine.step()
        if engine.was_step_applied():  # losses are read when the group has run
            losses.append(sum(value.item() for value in group) / len(group))
            print(f"step {engine.global_steps} loss {losses[-1]:.4f}")
            group.clear()
    print(engine.swap_report())
    adapted.save_pretrained(options.out)
    print(f"saved the adapter in {options.out}")
    engine.destroy()
    return losses


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM on pairs of sentences with LoRA.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of a sentence at most (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: %(default)s")
    # On a GPU, cuBLAS's workspaces and the allocator's segments take up to 0.38 GiB whatever the model.
    budget_gib = 0.75 if torch.cuda.is_available() else 0.08
    parser.add_argument("--budget-gib", type=float, default=budget_gib, help="device memory (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("outputs/lora"), help="for the adapter (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
