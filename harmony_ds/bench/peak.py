"""What the device can do at most, for the model FLOP utilization."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.benchmark import Timer

from harmony_ds.bench.workload import Workload
from harmony_ds.profiler.hardware import Gpu, known_hardware

_SIZE = 1024


def peak_tflops(task: Workload) -> tuple[float, str] | None:
    """The datasheet's dense peak of a GPU we know, in the compute dtype; on the CPU the rate of a large matrix product.

    Returns:
        TFLOP/s and where they are from; None for a GPU that `hardware.json` does not know.
    """
    if task.device != "cuda":
        return _matrix_product(task), f"a matrix product of {_SIZE} on {task.threads} thread(s)"
    properties = torch.cuda.get_device_properties(0)
    gpu = gpu_named(properties.name, known_hardware().gpus.values())
    if gpu is None:
        return None
    half = task.settings.compute_dtype.itemsize == 2
    return (gpu.half_tflops if half else gpu.fp32_tflops), gpu.source


def gpu_named(name: str, gpus: Iterable[Gpu]) -> Gpu | None:
    """The description of what CUDA calls "NVIDIA GeForce RTX 4090" or "NVIDIA A100-SXM4-80GB"."""
    plain = name.lower().replace(" ", "")
    fitting = [gpu for gpu in gpus if gpu.name.split("-")[0] in plain]
    # "l40s" is no "l4"; of those alike, the one whose variant ("80", "pcie") the name holds too.
    return max(
        fitting,
        key=lambda gpu: (
            len(gpu.name.split("-")[0]),
            sum(part in plain for part in gpu.name.split("-")),
            -len(gpu.name),
        ),
        default=None,
    )


def _matrix_product(task: Workload) -> float:
    """Of the faster of fp32 and the compute dtype: a CPU without arithmetic for the latter emulates it."""
    matrices = (torch.randn(_SIZE, _SIZE).to(dtype) for dtype in {torch.float32, task.settings.compute_dtype})
    timers = (Timer("m @ m", globals={"m": matrix}, num_threads=task.threads) for matrix in matrices)
    return 2 * _SIZE**3 / min(timer.blocked_autorange().median for timer in timers) / 1e12
