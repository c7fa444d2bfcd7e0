"""Compile DeepSpeed's CPU Adam, so that no measurement waits for the compiler."""

from __future__ import annotations

import torch

from harmony_ds.offload.native import make_native

print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices")
print(*(torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())))
make_native("DeepSpeedCPUAdam", [torch.nn.Parameter(torch.zeros(1))], {})
print("DeepSpeed's CPU Adam is there", flush=True)
