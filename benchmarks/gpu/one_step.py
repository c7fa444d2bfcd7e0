"""(c) Where does one step's time go? A Perfetto trace, and what each stream achieved.

    python benchmarks/gpu/one_step.py --model llama-6b --cap-gib 24 --tokens 32768

Prints and saves, for a step of median time: how long each stream worked; bandwidth of swap-in and swap-out while they
worked; the update's memory traffic per second beside that of a STREAM-like triad on the same cores; the share of the
step in which the compute stream was at a task. A task is as long as the host takes to launch it where that is longer, so
of one more step the time of its kernels is measured, too. Model FLOPs are 6 per parameter and token (Kaplan et al., 2020,
section 2.1), beside what large matrix products in the compute dtype reach on the same device. With `--compile` layers are
compiled (`engine.compile()`), with `--float8` linear layers compute in float8 (torchao). Without a GPU a small model runs
on the CPU device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from suite import add_point_options, device, point, results_folder, write
from torch import nn

import harmony_ds
from harmony_ds.bench.workload import Workload
from harmony_ds.estimate.survey import update_cost
from harmony_ds.scheduler.spans import COMPUTE, SWAP_IN, SWAP_OUT, UPDATE

_TRIAD_ELEMENTS = 2**26
_WARM_UP, _RECORDED = 2, 3


def main() -> None:
    args = _arguments()
    chosen = point(args)
    ds_config: dict[str, Any] = chosen.ds_config()
    ds_config["harmony"] = {**ds_config.get("harmony", {}), "device": device(), "device_memory_gib": chosen.cap_gib}
    rows, sequence = chosen.rows, chosen.sequence
    task = Workload(chosen.model, ds_config, rows, rows, chosen.accumulation, sequence, device(), chosen.cap_gib)
    triad, products = _triad_bytes_per_s(), _matmul_flops_per_s()
    if args.float8:
        _compute_in_float8(task.subject.model)
    engine, *_ = harmony_ds.initialize(model=task.subject.model, config=task.config())
    if args.compile:
        engine.compile()
    for step in range(_WARM_UP):
        engine.train_batch(task.batches(step))
    with engine.record_steps() as recorded:
        for step in range(_RECORDED):
            engine.train_batch(task.batches(_WARM_UP + step))
    one_more = task.batches(_WARM_UP + _RECORDED)
    kernels_ms = _kernels_ms(lambda: engine.train_batch(one_more)) if device() == "cuda" else None
    middle = statistics.median_low(step.step_ms for step in recorded)
    shown = next(step for step in recorded if step.step_ms == middle)
    swaps, busy = engine.swap_report(), shown.busy_ms
    elements = sum(p.numel() for p in task.subject.model.parameters())
    update_bytes = elements * update_cost(task.settings).bytes_per_element
    tokens_per_s = task.sample_items * task.samples / middle * 1e3
    flops_per_s = 6 * elements * tokens_per_s
    found = {
        "task": asdict(task),
        "plan": engine.plan_report().choices[0].reason,
        "predicted_ms": engine.plan_report().predicted_step_ms,
        "step_ms": [step.step_ms for step in recorded],
        "busy_ms": dict(busy),
        "tokens_per_s": tokens_per_s,
        "model_tflops": flops_per_s / 1e12,
        "matmul_tflops": products / 1e12,
        "model_flops_utilization": flops_per_s / products,
        "computing_share": busy[COMPUTE] / middle,
        "kernels_ms": kernels_ms,
        "kernels_share": None if kernels_ms is None else kernels_ms / middle,
        "allocator_retries": float(torch.cuda.memory_stats().get("num_alloc_retries", 0)),  # which wait for the device
        "to_device_gb_per_s": _rate(sum(swaps.host_to_device.values()), busy[SWAP_IN]),
        "to_host_gb_per_s": _rate(sum(swaps.device_to_host.values()), busy[SWAP_OUT]),
        "update_gb_per_s": _rate(update_bytes, busy[UPDATE]),
        "triad_gb_per_s": triad / 1e9,
    }
    for name, value in found.items():
        if isinstance(value, (float, str)):
            print(f"{name:<26}{value if isinstance(value, str) else format(value, ',.3f')}")
    print(engine.plan_report(), engine.memory_report(), swaps, sep="\n")
    subject = args.model if device() == "cuda" else "small"
    name = f"step-{subject}-{chosen.cap_gib:g}gib-{chosen.tokens}tok-mb{rows}-{chosen.variant}"
    name += "-compiled" if args.compile else ""
    name += "-float8" if args.float8 else ""
    trace = results_folder() / f"{name}.trace.json"
    trace.write_text(json.dumps(engine.trace(shown)), encoding="utf-8")
    print(f"{trace}: open it in https://ui.perfetto.dev")
    write(name, found)
    engine.destroy()


def _kernels_ms(step: Callable[[], object]) -> float:
    """Return how long the kernels of `step` run, one after another, without copies."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profiled.key_averages() if e.device_type == DeviceType.CUDA and not e.key.startswith("Mem")]
    return float(sum(kernel.self_device_time_total for kernel in kernels)) / 1e3


def _rate(nbytes: float, ms: float) -> float:
    return nbytes / ms / 1e6 if ms else 0.0


def _triad_bytes_per_s() -> float:
    """Measure a = b + s * c in fp32 on all cores: two reads and a write for each element."""
    a, b, c = (torch.ones(_TRIAD_ELEMENTS) for _ in range(3))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        seconds.append(time.perf_counter() - start)
    return 12 * _TRIAD_ELEMENTS / statistics.median(seconds)


def _matmul_flops_per_s() -> float:
    """Measure what products of large square matrices reach, 2 n^3 operations each: in bf16 on CUDA, in fp32 on the host."""
    size, dtype = (8192, torch.bfloat16) if device() == "cuda" else (512, torch.float32)
    a, b = (torch.ones(size, size, dtype=dtype, device=device()) for _ in range(2))
    seconds = []
    for _ in range(10):
        _synchronize()
        start = time.perf_counter()
        torch.matmul(a, b)
        _synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def _synchronize() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def _compute_in_float8(model: nn.Module) -> None:
    """Let linear layers but the head compute in float8; their weights stay what they are."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: "lm_head" not in name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_point_options(parser)
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--float8", action="store_true", help="linear layers in float8 (torchao)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
