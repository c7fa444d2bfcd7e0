"""(d) What does the allocator hold, beside what its model says? And how long does one retry take?

    python benchmarks/gpu/device_memory.py [--cap-gib 4]

Trains some steps of a model of 718 million parameters under a budget, and prints of each what was allocated and reserved at
most, and how often the allocator had to give back all that nothing used (a retry). Beside them is what
`python -m benchmarks.allocator` says of the same plan. Then one retry is made by hand, and timed. Without a GPU a small
model runs on the CPU device, which has no such allocator.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from suite import ROOT, device, results_folder, write

import harmony_ds
from benchmarks.allocator.case import Case
from benchmarks.common import GIB, MIB
from harmony_ds.device import CudaDevice
from harmony_ds.device.allocator_room import fragment_bytes, reserve_bytes

_STEPS, _REQUESTS = 5, 20
_PIECES, _PIECE_BYTES = 32, 100 * MIB
"""What memory is cut into, of which every second piece is free when a retry is timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap-gib", type=float, default=4.0)
    args = parser.parse_args()
    models = ROOT / "benchmarks" / "models"
    case = Case(models / "llama-718m.json", rows=4, accumulation=8, sequence=1024, cap_gib=args.cap_gib)
    if device() == "cpu":
        case = Case(models / "llama-7m.json", rows=1, accumulation=2, sequence=64, cap_gib=0.1)
    plan = results_folder() / "device-memory.plan.json"
    steps = _train(case, plan)
    modelled = _model(case, _modelled_cap_gib(case, steps[0]["planned_peak_bytes"]), plan)
    found: dict[str, Any] = {"case": case.name, "steps": steps, "modelled": modelled}
    print(f"{case.name}; planned {steps[-1]['planned_peak_bytes'] / GIB:.2f} GiB")
    for step in steps:
        _print_line(f"step {step['step']}, {step['ms']:,.0f} ms", step["allocated_bytes"], step["reserved_bytes"])
        print(f"    {step['retries']} retries")
    budget = f"the model, under {modelled['budget_bytes'] / GIB:.2f} GiB"
    _print_line(budget, modelled["allocated_peak_bytes"], modelled["reserved_peak_bytes"])
    print(f"    {modelled['retries_a_step']} retries a step")
    if device() == "cuda":
        found["one_retry"] = retry = _time_retry()
        print(
            f"one retry: {retry['retry_ms']:.2f} ms, {retry['retries']} counted; {retry['free_gib']:.2f} GiB were free"
        )
        print(f"a request that the allocator can serve: {retry['served_ms']:.4f} ms")
    write("device-memory", found)


def _print_line(what: str, allocated_bytes: int, reserved_bytes: int | None) -> None:
    reserved = "nothing (no caching allocator)" if reserved_bytes is None else f"{reserved_bytes / GIB:.2f} GiB"
    print(f"{what}: allocated {allocated_bytes / GIB:.2f} GiB, reserved {reserved}")


def _train(case: Case, plan: Path) -> list[dict[str, Any]]:
    """Train some steps, save their plan, and return what each one took; the memory is given back."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(case.model)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).train()
    engine, *_ = harmony_ds.initialize(model=model, config=case.config())
    chance = random.Random(0)
    steps: list[dict[str, Any]] = []
    retries_before = 0
    for number in range(1, _STEPS + 1):
        begin = time.perf_counter()
        engine.train_batch(case.batches(shape.vocab_size, chance))
        report = engine.memory_report()  # waits for the step's updates
        steps.append(
            {
                "step": number,
                "ms": (time.perf_counter() - begin) * 1e3,
                "allocated_bytes": report.device_peak_bytes,
                "reserved_bytes": report.reserved_bytes,
                "retries": report.allocator_retries - retries_before,
                "planned_peak_bytes": report.planned_peak_bytes,
            }
        )
        retries_before = report.allocator_retries
        if number == 1:
            assert engine.plan is not None
            plan.write_text(engine.plan.to_json(), encoding="utf-8")
    engine.destroy()
    return steps


def _modelled_cap_gib(case: Case, planned_peak_bytes: int) -> float:
    """Return the budget for the model: the same, or more where its GPU sets aside more than this device does."""
    most_fragments = fragment_bytes(2**40, working_bytes=2**50) / 2**40  # of a budget, however much a micro-batch takes
    least_bytes = (planned_peak_bytes + reserve_bytes((9, 0)) + MIB) / (1 - most_fragments)
    return max(case.cap_gib, least_bytes / GIB)


def _model(case: Case, cap_gib: float, plan: Path) -> dict[str, Any]:
    """Return what the model of the allocator says of the saved plan."""
    command = [sys.executable, "-m", "benchmarks.allocator", "--model", str(case.model), "--json"]
    command += ["--rows", str(case.rows), "--accumulation", str(case.accumulation), "--sequence", str(case.sequence)]
    command += ["--cap-gib", str(cap_gib), "--harmony", json.dumps({"plan": str(plan)})]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    answer: dict[str, Any] = json.loads(said)
    return answer


def _time_retry() -> dict[str, float]:
    """Fill a budget with pieces of which every second one is free, and ask for more than a piece has."""
    gc.collect()
    torch.cuda.empty_cache()  # else the retry would give back what training has left, too
    budget_bytes = torch.cuda.memory_reserved() + (_PIECES + 1) * _PIECE_BYTES
    limited = CudaDevice(torch.cuda.current_device(), budget_bytes)
    limited.limit_process()  # sets the allocator up as an engine does
    try:
        pieces: list[torch.Tensor | None] = [_empty(_PIECE_BYTES) for _ in range(_PIECES)]
        for place in range(0, _PIECES, 2):
            pieces[place] = None
        free_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        served_ms = min(_allocate_ms(_PIECE_BYTES) for _ in range(_REQUESTS))
        before = limited.allocator_retries()
        retry_ms = _allocate_ms(4 * _PIECE_BYTES)
        retries = limited.allocator_retries() - before
    finally:
        limited.unlimit_process()
    return {"retry_ms": retry_ms, "retries": retries, "free_gib": free_bytes / GIB, "served_ms": served_ms}


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _allocate_ms(nbytes: int) -> float:
    """Return how long a request takes while the device is idle."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    _empty(nbytes)
    return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    main()
