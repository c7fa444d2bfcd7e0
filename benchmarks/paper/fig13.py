"""Fig. 13: fine-tuning converges as plain training does: a pretrained encoder on sentence pairs, losses overlaid.

python benchmarks/paper/fig13.py [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import MEASURED, MIB, OURS, PLAIN, Content, Experiment, Options, panels
from matplotlib.figure import Figure
from texts import Batch, classifier, encoded, pairs
from training import Ours, Plain, largest_difference, planned_bytes, weight_bytes

ROWS, GROUP = 8, 4
RATE, WARMUP = 5e-5, 0.1
STEPS = 8
"""In a round: --rounds 50 trains for 400 steps."""
BUDGET = 1.1
"""Of the least that a plan needs: half of the weights are the word embedding, which comes with its gradient."""


def run(options: Options) -> Content:
    steps, tokens = (3, 16) if options.quick else (STEPS * options.rounds, 32)
    batches = encoded(pairs(steps * ROWS * GROUP, seed=3), ROWS, tokens)
    held_out = encoded(pairs(8 * ROWS, seed=4), ROWS, tokens)
    groups = [batches[start : start + GROUP] for start in range(0, len(batches), GROUP)]
    model = classifier()
    budget = int(BUDGET * planned_bytes(classifier(), _adamw, groups[0], ROWS))
    before = accuracy(model, held_out)
    plain = Plain(model, _adamw, _warm(steps))
    expected = [plain.step(group) for group in groups]
    ours = Ours(classifier(), _adamw, (ROWS, GROUP), budget, None, _warm(steps))
    losses = [ours.step(group) for group in groups]
    memory, swaps = ours.engine.memory_report(), ours.engine.swap_report()
    ours.close()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": weight_bytes(model),
        "budget_bytes": budget,
        "device_peak_bytes": memory.device_peak_bytes,
        "swap_ratio": swaps.ratio,
        "setting": f"{steps} steps of {ROWS * GROUP} pairs of {tokens} tokens in {GROUP} micro-batches, fp32, dropout 0.1, "
        f"AdamW, rate {RATE}, {WARMUP:.0%} warm-up and linear decay",
        "losses": losses,
        "plain_losses": expected,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "largest_weight_difference": largest_difference(ours.model, model),
        "accuracy_before": before,
        "accuracy": accuracy(ours.model, held_out),
        "plain_accuracy": accuracy(model, held_out),
    }


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def _warm(steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    warm = max(1, round(WARMUP * steps))

    def share(step: int) -> float:
        return (step + 1) / (warm + 1) if step < warm else (steps - step) / (steps - warm + 1)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, share)


@torch.no_grad()
def accuracy(model: torch.nn.Module, batches: list[Batch]) -> float:
    """The share of pairs that are told right."""
    model.eval()
    right = [(model(**batch).logits.argmax(1) == batch["labels"]).float().mean() for batch in batches]
    model.train()
    return torch.stack(right).mean().item()


def smooth(losses: list[float], window: int = 5) -> list[float]:
    """The mean of the last `window` losses at each step."""
    starts = [max(0, place + 1 - window) for place in range(len(losses))]
    return [sum(losses[start : place + 1]) / (place + 1 - start) for place, start in enumerate(starts)]


def draw(content: Content) -> Figure:
    figure, axes = panels(f"{MEASURED}: MiniLM on sentence pairs", "difference of the two", width=4.1)
    steps = range(1, len(content["losses"]) + 1)
    axes[0].plot(steps, content["plain_losses"], color=PLAIN, linewidth=4, alpha=0.35, label="plain PyTorch")
    axes[0].plot(steps, content["losses"], color=OURS, linewidth=1.2, label="harmony_ds, swapping")
    axes[0].plot(steps, smooth(content["losses"]), ":", color=OURS, label="the same, mean of 5 steps")
    axes[0].set(xlabel="optimizer step", ylabel="loss")
    axes[0].legend()
    differences = [abs(a - b) for a, b in zip(content["losses"], content["plain_losses"], strict=True)]
    axes[1].plot(steps, differences, "o-", color=OURS)
    axes[1].set(xlabel="optimizer step", ylabel="|loss - plain loss|", ylim=(-1e-7, max(1e-6, *differences) * 1.1))
    return figure


def says(content: Content) -> str:
    losses = content["losses"]
    return (
        f"Measured: MiniLM ({content['parameters'] / 1e6:.1f} million parameters, {content['weight_bytes'] / MIB:.0f} MiB "
        f"of weights, four times that with gradients and moments) under a device budget of "
        f"{content['budget_bytes'] / MIB:.0f} MiB "
        f"(peak {content['device_peak_bytes'] / MIB:.0f} MiB); {content['setting']}. Losses go from {losses[0]:.3f} to "
        f"{sum(losses[-5:]) / len(losses[-5:]):.3f} (mean of the last {len(losses[-5:])}); the largest difference to plain "
        f"training is {content['largest_loss_difference']:.1e} in a loss and {content['largest_weight_difference']:.1e} in "
        f"a final weight. Held-out accuracy: {content['accuracy_before']:.2f} before, {content['accuracy']:.2f} after "
        f"(plain {content['plain_accuracy']:.2f}). So few steps show the same training, not where it leads."
    )


EXPERIMENT = Experiment("fig13", "Fig. 13: fine-tuning, losses of the same training", run, draw, says)

if __name__ == "__main__":
    EXPERIMENT.main()
