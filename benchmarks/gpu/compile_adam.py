"""Compiles DeepSpeed's CPU Adam, which the host updates with, so that no measurement waits for the compiler."""

from __future__ import annotations

import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

if __name__ == "__main__":
    began = time.monotonic()
    parameter = torch.nn.Parameter(torch.ones(1024))
    parameter.grad = torch.ones(1024)
    DeepSpeedCPUAdam([parameter]).step()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0))
    print(f"CPU Adam is there after {time.monotonic() - began:.0f} s")
