"""Compilation of the ops that tests use (DeepSpeed's, the test device's), in parallel, once for each machine.

python -m tests.compile            everything
python -m tests.compile NAME ...   of it, these
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from harmony_ds import OptimizerError
from harmony_ds.offload.native import compiling, make_native
from tests import simdevice

DEVICE = "the test device"
OPTIMIZERS = ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion")
BUILDERS = ("FusedAdamBuilder", "ShareMemCommBuilder")
"""What DeepSpeed's own engine takes beside them, that we compare ours with."""


def compile_one(name: str) -> str:
    """Return the outcome: without a compiler, tests say themselves what they need."""
    if name == DEVICE:
        reason = simdevice.unavailable_reason()
        if reason is None:
            simdevice.load()
        return f"{name}: {reason or 'is there'}"
    try:
        if name in BUILDERS:
            from deepspeed.accelerator import get_accelerator

            builder = get_accelerator().create_op_builder(name)
            with compiling(builder.name):
                builder.load()
            return f"{name}: is there"
        make_native(name, [torch.nn.Parameter(torch.zeros(1))], {})
    except OptimizerError as error:
        return f"{name}: {error}"
    return f"{name}: is there"


def main() -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for said in pool.map(compile_one, sys.argv[1:] or (*OPTIMIZERS, DEVICE, *BUILDERS)):
            print(said, flush=True)


if __name__ == "__main__":
    main()
