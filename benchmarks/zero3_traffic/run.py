"""Bytes that one step moves: ZeRO-Offload's copies, counted as DeepSpeed's code makes them, against the bench's formulas.

    python benchmarks/zero3_traffic/run.py            counts ZeRO-3 in bf16, beside harmony_ds's ledger
    python benchmarks/zero3_traffic/run.py --check    counts both stages in both dtypes; 1 if a formula is wrong

DeepSpeed runs on its CPU accelerator, where its copies between host and "device" are the same calls as on a GPU. Of ZeRO-3
every gather of a parameter, and every `copy_` and `to` of gradients in `partition_grads`, is counted; of ZeRO-2 every
`copy_` into or out of the tensors that it keeps in host memory. The first form writes
benchmarks/results/zero3-traffic.json; its formula is that of `engine.swap_report()`, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import harmony_ds
from harmony_ds.bench.engines.deepspeed import ZEROS, ZeroOffload
from harmony_ds.bench.results import environment
from harmony_ds.bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "benchmarks" / "models" / "llama-7m.json"
TOLERANCE = 0.02
IN, GRADIENTS_IN, GRADIENTS_OUT = "weights in", "gradients in", "gradients out"


def counting_stage_2(optimizer: Any, counted: Counter[str]) -> AbstractContextManager[Any]:
    """Count copies into and out of host tensors of ZeRO-2."""
    copy_ = torch.Tensor.copy_

    def storages(tensors: list[torch.Tensor]) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def counted_copy(self: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        masters, weights = (
            optimizer.single_partition_of_fp32_groups,
            optimizer.param_buffer_of_bit16_for_cpu_offload_groups,
        )
        sums = [*optimizer.accumulated_grads_in_cpu.values(), *(m.grad for m in masters if m.grad is not None)]
        host, there = storages([*masters, *weights, *sums]), source.untyped_storage().data_ptr()
        to_host, from_host = self.untyped_storage().data_ptr() in host, there in host
        if to_host != from_host:
            kind = GRADIENTS_OUT if to_host else IN if there in storages(weights) else GRADIENTS_IN
            counted[kind] += self.numel() * self.element_size()
        return copy_(self, source, *args, **kwargs)

    return mock.patch.object(torch.Tensor, "copy_", counted_copy)


@contextmanager
def counting_stage_3(optimizer: Any, counted: Counter[str]) -> Iterator[None]:
    """Count gathered parameters, and copies of gradients while they are partitioned."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters

    one, several = partition_parameters.NoGatherHandle, partition_parameters.NoGatherCoalescedHandle
    copy_, to, partition, inside = torch.Tensor.copy_, torch.Tensor.to, optimizer.partition_grads, [False]

    def gathering(init: Callable[..., None]) -> Callable[..., None]:
        def gathered(self: Any, parameters: Any) -> None:
            some = parameters if isinstance(parameters, list) else [parameters]
            counted[IN] += sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in some)
            init(self, parameters)

        return gathered

    def partition_grads(*args: Any) -> Any:
        inside[0] = True
        try:
            return partition(*args)
        finally:
            inside[0] = False

    def counted_copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counted[GRADIENTS_OUT] += inside[0] * self.numel() * self.element_size()
        return copy_(self, *args, **kwargs)

    def counted_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device):  # to a device, not to a dtype
            counted[GRADIENTS_IN] += inside[0] * self.numel() * self.element_size()
        return to(self, *args, **kwargs)

    with (
        mock.patch.object(one, "__init__", gathering(one.__init__)),
        mock.patch.object(several, "__init__", gathering(several.__init__)),
        mock.patch.object(optimizer, "partition_grads", partition_grads),
        # On a GPU the buffers that gradients are summed in are in host memory; the CPU accelerator takes them for its own.
        mock.patch.object(get_accelerator(), "on_accelerator", return_value=False),
        mock.patch.object(torch.Tensor, "copy_", counted_copy),
        mock.patch.object(torch.Tensor, "to", counted_to),
    ):
        yield


def deepspeed_step(name: str, task: Workload) -> tuple[Counter[str], int]:
    """Return the bytes of one step, counted and as the bench reports them, without activation checkpointing.

    Nothing is kept from the forward to the backward pass (`stage3_max_reuse_distance` 0): as it is for a model whose
    weights exceed the device.
    """
    kept = ("stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero, stage_3 = ZEROS[name], ZEROS[name].block["stage"] == 3
    if stage_3:
        zero = replace(zero, block={**zero.block, **dict.fromkeys(kept, 0)})
    with mock.patch("harmony_ds.bench.engines.deepspeed.checkpoint", return_value=False):
        engine = ZeroOffload(task, zero)
    counting = counting_stage_3 if stage_3 else counting_stage_2
    engine.step(task.batches(0))  # the first one traces the order of the layers
    counted: Counter[str] = Counter()
    with counting(engine.model.optimizer, counted):
        engine.step(task.batches(1))
    traffic = engine.report()["traffic"]
    return counted, sum(sum(traffic[way].values()) for way in ("host_to_device", "device_to_host"))


def harmony_step(task: Workload, gib: float, gradients: str) -> harmony_ds.SwapReport:
    """Return the ledger of one step under a device budget of `gib`, gradients summed and sent in the dtype `gradients`."""
    own = {"device": "cpu", "device_memory_gib": gib}
    config = {**task.config(), "data_types": {"grad_accum_dtype": gradients}, "harmony": own}
    engine, *_ = harmony_ds.initialize(model=task.subject.model, config=config)
    for step in range(2):
        engine.train_batch(task.batches(step))
    report = engine.swap_report()
    engine.destroy()
    return report


def workload(dtype: str, accumulation: int) -> Workload:
    """Return a new model with short rows: bytes do not depend on their length."""
    config = {"bf16": {"enabled": dtype == "bf16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    return Workload(str(MODEL), config, 1, 1, accumulation, sequence=8)


def counted_is_formula(name: str, dtype: str, accumulation: int) -> bool:
    """Print both, and compare them."""
    counted, formula = deepspeed_step(name, workload(dtype, accumulation))
    total = sum(counted.values())
    print(f"{name}, {dtype}: counted {dict(counted)} = {total:,}; by formula {formula:,} ({formula / total:.4f} of it)")
    return abs(formula / total - 1) <= TOLERANCE


def compare_with_harmony(accumulation: int) -> bool:
    """Count ZeRO-3 in bf16 beside harmony_ds, write the results, and return whether the formula is right."""
    elements = sum(p.numel() for p in workload("bf16", accumulation).subject.model.parameters())
    gib = 0.8 * 2 * elements / 2**30
    counted, _ = deepspeed_step("deepspeed-zero3-offload", workload("bf16", accumulation))
    reports = {kind: harmony_step(workload("bf16", accumulation), gib, kind) for kind in ("fp32", "bf16")}
    formula, total = reports["fp32"].zero3_offload_bytes, sum(counted.values())
    print(f"{elements:,} parameters in bf16, {accumulation} micro-batches; harmony's budget 0.8 of the weights")
    for kind, nbytes in counted.items():
        print(f"ZeRO-3 offload, {kind:<14}{nbytes:>16,} bytes = {nbytes / elements:6.1f} per parameter")
    print(f"ZeRO-3 offload, counted     {total:>16,}; by formula {formula:,} ({formula / total:.4f} of it)")
    for kind, report in reports.items():
        per = f"{report.swap_bytes / elements:6.1f} per parameter: {total / report.swap_bytes:.1f} times less"
        print(f"harmony_ds, gradients in {kind}{report.swap_bytes:>15,} bytes = {per}")
    content = {
        "environment": {**environment("cpu"), "command": " ".join(["python", *sys.argv])},
        "parameters": elements,
        "accumulation": accumulation,
        "budget_gib": gib,
        "zero3_counted_bytes": counted,
        "zero3_formula_bytes": formula,
        "harmony_swap_bytes": {kind: report.swap_bytes for kind, report in reports.items()},
        "times_less": {kind: total / report.swap_bytes for kind, report in reports.items()},
    }
    path = ROOT / "benchmarks" / "results" / "zero3-traffic.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return abs(formula / total - 1) <= TOLERANCE


def main() -> int:
    """Return 1 if a formula is not what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulation", type=int, default=16)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    if not args.check:
        return int(not compare_with_harmony(args.accumulation))
    right = [counted_is_formula(name, dtype, args.accumulation) for name in ZEROS for dtype in ("bf16", "fp32")]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
