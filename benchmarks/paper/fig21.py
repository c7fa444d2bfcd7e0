"""Fig. 21: a language model trains as in plain PyTorch: losses and perplexity on real text, overlaid.

python benchmarks/paper/fig21.py [--quick]
"""

from __future__ import annotations

import math

import torch
from matplotlib.figure import Figure
from models import gpt2
from runner import Content, Options, draw_losses, losses_say, main, same_training
from texts import language
from torch import nn

from benchmarks.training import Batch, adamw, planned_bytes
from harmony_ds.runtime.micro_batch import loss_of

TITLE = "Fig. 21: a language model, losses of the same training"
PAPER = "GPT2-Medium on WikiText-103, one and four GTX 1080 Ti. Here: an excerpt of Wikipedia."
ROWS, GROUP, TOKENS = 4, 4, 64
BUDGET = 1.1
"""Over the least that a plan needs."""


def run(options: Options) -> Content:
    steps = 4 if options.quick else 80
    batches, held_out, vocabulary = language(ROWS, TOKENS, 2048, steps * GROUP)
    groups = [batches[start : start + GROUP] for start in range(0, len(batches), GROUP)]
    model = gpt2(4 if options.quick else 6, 64 if options.quick else 128, 4, TOKENS, vocabulary)
    plain, ours = model.seeded(), model.seeded()
    before = perplexity(plain, held_out)
    budget = int(BUDGET * planned_bytes(model.seeded(), adamw, groups[0], ROWS))
    return same_training((plain, ours), adamw, groups, budget) | {
        "model": model.name,
        "setting": f"{steps} steps of {ROWS * GROUP} sequences of {TOKENS} tokens in {GROUP} micro-batches, fp32, AdamW",
        "perplexity_before": before,
        "perplexity": perplexity(ours, held_out),
        "plain_perplexity": perplexity(plain, held_out),
    }


@torch.no_grad()
def perplexity(model: nn.Module, batches: list[Batch]) -> float:
    """Return the perplexity per token of text that is not trained on."""
    model.eval()
    losses = [loss_of(model(**batch)).item() for batch in batches]
    model.train()
    return math.exp(sum(losses) / len(losses))


def draw(content: Content) -> Figure:
    return draw_losses(content, f"{content['model']}, Wikipedia text")


def says(content: Content) -> str:
    before, after, plain = (content[key] for key in ("perplexity_before", "perplexity", "plain_perplexity"))
    return (
        f"Measured: {content['model']}, {content['parameters'] / 1e6:.1f} million parameters from scratch, "
        f"{losses_say(content)} Held-out perplexity {before:.0f} to {after:.0f} (plain {plain:.0f})."
    )


if __name__ == "__main__":
    main(__file__)
