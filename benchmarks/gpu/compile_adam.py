"""Compiles DeepSpeed's CPU Adam, so that no measurement waits for the compiler."""

from __future__ import annotations

import time

import torch

from harmony_ds.offload.native import make_native


def main() -> None:
    began = time.monotonic()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0))
    make_native("DeepSpeedCPUAdam", [torch.nn.Parameter(torch.zeros(1))], {})
    print(f"DeepSpeed's CPU Adam is there after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
