"""Compiles DeepSpeed's CPU Adam, for DeepSpeed and for harmony_ds, so that no measurement waits for the compiler."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from harmony_ds.offload.native import gil_free_op, make_native


def for_deepspeed() -> str:
    """As its engines load it."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()
    return "DeepSpeed's"


def for_harmony() -> str:
    """As the updates of packs load it."""
    gil_free_op(make_native("DeepSpeedCPUAdam", [torch.nn.Parameter(torch.zeros(1))], {}))
    return "harmony_ds's"


def main() -> None:
    began = time.monotonic()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for job in [pool.submit(for_deepspeed), pool.submit(for_harmony)]:
            print(f"{job.result()} CPU Adam is there after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
