"""Do TRL's trainers train as without harmony_ds? Train each tiny case a few steps, on plain PyTorch and with HarmonyMixin.

    OMP_NUM_THREADS=1 python -m benchmarks.trl.run            # all: some minutes
    OMP_NUM_THREADS=1 python -m benchmarks.trl.run --write    # and results/trl.json, docs/huggingface.md
    OMP_NUM_THREADS=1 python -m benchmarks.trl.run --write --resume    # after an interruption
    OMP_NUM_THREADS=1 python -m benchmarks.trl.run --only DPO KTO

A Llama of three layers, in fp32 on the CPU, without dropout, in packs of one layer. "Equal": all weights, losses, norms and
learning rates are the same bits, and other logged metrics agree to 1e-5. The ratio is the bytes of weights and gradients
that the last step swapped, over the least possible.
"""

from __future__ import annotations

from benchmarks.trainer.report import run_cases
from benchmarks.trl.cases import cases

if __name__ == "__main__":
    run_cases(__doc__, "trl", cases())
