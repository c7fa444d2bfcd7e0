"""Does every option of TrainingArguments mean what it means without harmony_ds? Train a tiny model a few steps with each.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer.run            # all: some minutes
    OMP_NUM_THREADS=1 python -m benchmarks.trainer.run --write    # and results/trainer.json, docs/huggingface.md
    OMP_NUM_THREADS=1 python -m benchmarks.trainer.run --write --resume    # after an interruption
    OMP_NUM_THREADS=1 python -m benchmarks.trainer.run --only evaluation

A Llama of three layers, in fp32 on the CPU, without dropout: Hugging Face's Trainer on plain PyTorch, and HarmonyTrainer in
packs of one layer. "Equal": all weights, losses, norms and learning rates are the same bits, and metrics agree to 1e-5. The
ratio is the bytes of weights and gradients that the last step swapped, over the least possible.
"""

from __future__ import annotations

from benchmarks.trainer.options import cases
from benchmarks.trainer.report import run_cases

if __name__ == "__main__":
    run_cases(__doc__, "trainer", cases())
