"""A training that may be killed at any moment: started again, it resumes from its last checkpoint, bit for bit.

    python examples/resume/train.py --out outputs/whole                  # to the end at once
    python examples/resume/train.py --out outputs/killed --kill-at 25    # kill -9 in the middle of a step
    python examples/resume/train.py --out outputs/killed                 # resumes
    cmp outputs/whole/losses.txt outputs/killed/losses.txt               # the same

The model is plain PyTorch with dropout; its data and its random numbers resume where they were, too.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import harmony_ds

WORDS = 97


class Model(nn.Module):
    """A transformer that predicts the next number of a sequence."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, WORDS)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the mean loss over `numbers` (batch, length)."""
        mask = nn.Transformer.generate_square_subsequent_mask(numbers.shape[1] - 1, device=numbers.device)
        states = self.embedding(numbers[:, :-1])
        for layer in self.layers:
            states = layer(states, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), numbers[:, 1:].flatten())


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Train to the end; return the lines of losses.txt."""
    options = parse_options(arguments)
    torch.manual_seed(0)
    engine, _, _, _ = harmony_ds.initialize(
        model=Model(options.hidden, options.layers),
        training_data=samples(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": options.steps,
            "harmony": {"seed": 0},
        },
    )
    losses: list[str] = []
    if (options.out / "latest").exists():
        folder, kept = engine.load_checkpoint(options.out)
        losses = kept["losses"]
        print(f"resumed from {folder}")
    while engine.global_steps < options.steps:
        if engine.global_steps + 1 == options.kill_at:
            engine.module.layers[-1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        loss = engine.train_batch()  # from training_data, over and over
        losses.append(f"step {engine.global_steps} loss {loss.item()!r} norm {float(engine.get_global_grad_norm())!r}")
        if engine.global_steps % options.save_every == 0:
            engine.save_checkpoint(options.out, client_state={"losses": losses})
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "losses.txt").write_text("\n".join(losses) + "\n", encoding="utf-8")
    print(f"{losses[-1]}\nwrote {options.out / 'losses.txt'}")
    engine.destroy()
    return losses


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train, save, and resume after a kill.")
    parser.add_argument("--out", type=Path, default=Path("outputs/resume"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="steps (default: %(default)s)")
    parser.add_argument("--kill-at", type=int, help="the step in which the process kills itself")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=64, help="width, a multiple of 4 (default: %(default)s)")
    return parser.parse_args(arguments)


def samples() -> list[Tensor]:
    """Return sequences in which each number is the sum of the two before."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, WORDS, (256, 2), generator=generator)
    while numbers.shape[1] < 24:
        numbers = torch.cat([numbers, (numbers[:, -2:].sum(dim=1, keepdim=True)) % WORDS], dim=1)
    return list(numbers)


if __name__ == "__main__":
    main()
