"""Fig. 13: fine-tuning is the same training: a pretrained encoder on sentence pairs, losses overlaid.

python benchmarks/paper/fig13.py [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from runner import Content, Options, draw_losses, losses_say, main, same_training
from texts import classifier, sentence_pairs

from benchmarks.training import Batch, planned_bytes

TITLE = "Fig. 13: fine-tuning, losses of the same training"
PAPER = (
    "BERT-Large on MRPC, one and four GTX 1080 Ti, without dropout. Here the pairs are made from Wikipedia (neighbours in "
    "an article, or not), and dropout is on."
)
ROWS, GROUP = 8, 4
RATE, WARMUP = 5e-5, 0.1
STEPS = 8
"""In a round: --rounds 50 trains for 400 steps."""
BUDGET = 1.1
"""Over the least that a plan needs: half of the weights are the word embedding, which comes with its gradient."""


def run(options: Options) -> Content:
    steps, tokens = (3, 16) if options.quick else (STEPS * options.rounds, 32)
    batches = sentence_pairs(steps * ROWS * GROUP, ROWS, tokens, seed=3)
    held_out = sentence_pairs(8 * ROWS, ROWS, tokens, seed=4)
    groups = [batches[start : start + GROUP] for start in range(0, len(batches), GROUP)]
    model, ours = classifier(), classifier()
    budget = int(BUDGET * planned_bytes(classifier(), adamw, groups[0], ROWS))
    before = accuracy(model, held_out)
    found = same_training((model, ours), adamw, groups, budget, warm_up(steps))
    return found | {
        "setting": f"{steps} steps of {ROWS * GROUP} pairs of {tokens} tokens in {GROUP} micro-batches, fp32, dropout 0.1, "
        f"AdamW, rate {RATE}, {WARMUP:.0%} warm-up and linear decay",
        "accuracy_before": before,
        "accuracy": accuracy(ours, held_out),
        "plain_accuracy": accuracy(model, held_out),
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def warm_up(steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    warm = max(1, round(WARMUP * steps))

    def share(step: int) -> float:
        return (step + 1) / (warm + 1) if step < warm else (steps - step) / (steps - warm + 1)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, share)


@torch.no_grad()
def accuracy(model: torch.nn.Module, batches: list[Batch]) -> float:
    """Return the share of pairs that are told right."""
    model.eval()
    right = [(model(**batch).logits.argmax(1) == batch["labels"]).float().mean() for batch in batches]
    model.train()
    return torch.stack(right).mean().item()


def draw(content: Content) -> Figure:
    return draw_losses(content, "MiniLM on sentence pairs")


def says(content: Content) -> str:
    return (
        f"Measured: MiniLM ({content['parameters'] / 1e6:.1f} million parameters), {losses_say(content)} Held-out "
        f"accuracy: {content['accuracy_before']:.2f} before, {content['accuracy']:.2f} after (plain "
        f"{content['plain_accuracy']:.2f})."
    )


if __name__ == "__main__":
    main(__file__)
