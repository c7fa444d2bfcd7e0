"""(c) Where does one step's time go? A Perfetto trace, and what each stream achieved.

    python benchmarks/gpu/one_step.py --model llama-6b --cap-gib 24 --tokens 32768

Prints and saves, for a step of median time: how long each stream worked; bandwidth of swap-in and swap-out while they
worked; the update's memory traffic per second beside that of a STREAM-like triad on the same cores; the share of the
step in which the compute stream was at a task. A task is as long as the host takes to launch it where that is longer, so
of one more step the time of its kernels is measured, too. Without a GPU a small model runs on the CPU device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from suite import DEFAULT_SEQUENCE, add_point_options, device, point, results_folder, write

import harmony_ds
from harmony_ds.bench.workload import Workload
from harmony_ds.estimate.survey import update_cost
from harmony_ds.scheduler.spans import COMPUTE, SWAP_IN, SWAP_OUT, UPDATE

_TRIAD_ELEMENTS = 2**26
_WARM_UP, _RECORDED = 2, 3


def main() -> None:
    args = _arguments()
    chosen = point(args)
    ds_config = {**chosen.ds_config(), "harmony": {"device": device(), "device_memory_gib": chosen.cap_gib}}
    rows, sequence = chosen.rows, chosen.sequence
    task = Workload(chosen.model, ds_config, rows, rows, chosen.accumulation, sequence, device(), chosen.cap_gib)
    triad = _triad_bytes_per_s()
    engine, *_ = harmony_ds.initialize(model=task.subject.model, config=task.config())
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
    found = {
        "task": asdict(task),
        "plan": engine.plan_report().choices[0].reason,
        "step_ms": [step.step_ms for step in recorded],
        "busy_ms": dict(busy),
        "tokens_per_s": task.sample_items * task.samples / middle * 1e3,
        "computing_share": busy[COMPUTE] / middle,
        "kernels_ms": kernels_ms,
        "allocator_retries": float(torch.cuda.memory_stats().get("num_alloc_retries", 0)),  # which wait for the device
        "to_device_gb_per_s": _rate(sum(swaps.host_to_device.values()), busy[SWAP_IN]),
        "to_host_gb_per_s": _rate(sum(swaps.device_to_host.values()), busy[SWAP_OUT]),
        "update_gb_per_s": _rate(update_bytes, busy[UPDATE]),
        "triad_gb_per_s": triad / 1e9,
    }
    for name, value in found.items():
        if isinstance(value, (float, str)):
            print(f"{name:<22}{value if isinstance(value, str) else format(value, ',.3f')}")
    print(engine.plan_report(), engine.memory_report(), swaps, sep="\n")
    subject = args.model if device() == "cuda" else "small"
    name = f"step-{subject}-{chosen.cap_gib:g}gib-{chosen.tokens}tok-mb{rows}-{'clip' if args.clip else 'noclip'}"
    if args.sequence != DEFAULT_SEQUENCE:
        name += f"-rows-of-{args.sequence}"
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_point_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
