"""Fig. 21: a language model trains as it does plainly: losses and perplexity on real text, overlaid.

python benchmarks/paper/fig21.py [--quick]
"""

from __future__ import annotations

import math

import torch
from common import MEASURED, MIB, OURS, PLAIN, Content, Experiment, Options, panels
from matplotlib.figure import Figure
from models import gpt2
from texts import Batch, language
from torch import nn
from training import Ours, Plain, adamw, largest_difference, loss_of, planned_bytes, weight_bytes

ROWS, GROUP, TOKENS = 4, 4, 64
BUDGET = 1.1
"""Of the least that a plan needs."""


def run(options: Options) -> Content:
    steps = 4 if options.quick else 80
    batches, held_out, vocabulary = language(ROWS, TOKENS, 2048, steps * GROUP)
    groups = [batches[start : start + GROUP] for start in range(0, len(batches), GROUP)]
    model = gpt2(4 if options.quick else 6, 64 if options.quick else 128, 4, TOKENS, vocabulary)
    plain = Plain(model.seeded(), adamw)
    before = perplexity(plain.model, held_out)
    expected = [plain.step(group) for group in groups]
    budget = int(BUDGET * planned_bytes(model.seeded(), adamw, groups[0], ROWS))
    ours = Ours(model.seeded(), adamw, (ROWS, GROUP), budget)
    losses = [ours.step(group) for group in groups]
    peak = ours.engine.memory_report().device_peak_bytes
    ours.close()
    return {
        "model": model.name,
        "parameters": sum(p.numel() for p in plain.model.parameters()),
        "weight_bytes": weight_bytes(plain.model),
        "budget_bytes": budget,
        "device_peak_bytes": peak,
        "setting": f"{steps} steps of {ROWS * GROUP} sequences of {TOKENS} tokens in {GROUP} micro-batches, fp32, AdamW",
        "losses": losses,
        "plain_losses": expected,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "largest_weight_difference": largest_difference(ours.model, plain.model),
        "perplexity_before": before,
        "perplexity": perplexity(ours.model, held_out),
        "plain_perplexity": perplexity(plain.model, held_out),
    }


@torch.no_grad()
def perplexity(model: nn.Module, batches: list[Batch]) -> float:
    """Of text that is not trained on, per token."""
    model.eval()
    losses = [loss_of(model(**batch)).item() for batch in batches]
    model.train()
    return math.exp(sum(losses) / len(losses))


def draw(content: Content) -> Figure:
    figure, axes = panels(f"{MEASURED}: {content['model']}, Wikipedia text", "difference of the two")
    steps = range(1, len(content["losses"]) + 1)
    axes[0].plot(steps, content["plain_losses"], color=PLAIN, linewidth=4, alpha=0.35, label="plain PyTorch")
    axes[0].plot(steps, content["losses"], color=OURS, linewidth=1.2, label="harmony_ds, swapping")
    axes[0].set(xlabel="optimizer step", ylabel="loss per token")
    axes[0].legend()
    differences = [abs(a - b) for a, b in zip(content["losses"], content["plain_losses"], strict=True)]
    axes[1].plot(steps, differences, "o-", color=OURS, markersize=2)
    axes[1].set(xlabel="optimizer step", ylabel="|loss - plain loss|", ylim=(-1e-7, max(1e-6, *differences) * 1.1))
    return figure


def says(content: Content) -> str:
    losses = content["losses"]
    before, after, plain = (content[key] for key in ("perplexity_before", "perplexity", "plain_perplexity"))
    return (
        f"Measured: {content['model']}, {content['parameters'] / 1e6:.1f} million parameters from scratch, "
        f"{content['weight_bytes'] / MIB:.1f} MiB of weights (four times that with gradients and moments) under a device "
        f"budget of {content['budget_bytes'] / MIB:.1f} MiB; {content['setting']}. Loss {losses[0]:.2f} to "
        f"{losses[-1]:.2f}, held-out perplexity {before:.0f} to {after:.0f} (plain {plain:.0f}); the largest difference to "
        f"plain training is {content['largest_loss_difference']:.1e} in a loss and "
        f"{content['largest_weight_difference']:.1e} in a final weight."
    )


EXPERIMENT = Experiment("fig21", "Fig. 21: a language model, losses of the same training", run, draw, says)

if __name__ == "__main__":
    EXPERIMENT.main()
