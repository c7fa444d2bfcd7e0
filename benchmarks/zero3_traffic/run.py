"""What one step moves: ZeRO-3 offload's copies, counted as its code makes them, against harmony_ds's ledger.

    python benchmarks/zero3_traffic/run.py

DeepSpeed runs on its CPU accelerator, where its copies between host and "device" are the same calls as on a GPU: every
gather of a parameter, and every `copy_` and `to` of gradients in `partition_grads`, is counted. The formula that
`engine.swap_report()` and `harmony-ds bench` use for ZeRO-3 is checked against it. Writes benchmarks/results/
zero3-traffic.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import harmony_ds
from harmony_ds.bench.engines.deepspeed import ZEROS
from harmony_ds.bench.results import environment
from harmony_ds.bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "benchmarks" / "models" / "llama-7m.json"


class Counter:
    """Bytes by what they are: weights in, gradients in, gradients out."""

    def __init__(self) -> None:
        self.bytes = {"weights in": 0, "gradients in": 0, "gradients out": 0}
        self._inside = 0

    def fetched(self, parameters: list[Any]) -> None:
        self.bytes["weights in"] += sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in parameters)

    @contextmanager
    def gradients(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def copied(self, kind: str, tensor: torch.Tensor) -> None:
        if self._inside:
            self.bytes[kind] += tensor.numel() * tensor.element_size()


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Wraps the calls that would be copies over the link."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters, stage3

    one, several = partition_parameters.NoGatherHandle.__init__, partition_parameters.NoGatherCoalescedHandle.__init__
    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    copy_, to = torch.Tensor.copy_, torch.Tensor.to

    def gathered_one(self: Any, parameter: Any) -> None:
        counter.fetched([parameter])
        one(self, parameter)

    def gathered(self: Any, parameters: list[Any]) -> None:
        counter.fetched(parameters)
        several(self, parameters)

    def inside(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with counter.gradients():
                return method(*args, **kwargs)

        return wrapped

    def counted_copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counter.copied("gradients out", self)
        return copy_(self, *args, **kwargs)

    def counted_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device):  # to a device, not to a dtype
            counter.copied("gradients in", self)
        return to(self, *args, **kwargs)

    with (
        mock.patch.object(partition_parameters.NoGatherHandle, "__init__", gathered_one),
        mock.patch.object(partition_parameters.NoGatherCoalescedHandle, "__init__", gathered),
        mock.patch.object(optimizer, "partition_grads", inside(optimizer.partition_grads)),
        # On a GPU the buffers that gradients are summed in are in host memory; the CPU accelerator takes them for its own.
        mock.patch.object(get_accelerator(), "on_accelerator", return_value=False),
        mock.patch.object(torch.Tensor, "copy_", counted_copy),
        mock.patch.object(torch.Tensor, "to", counted_to),
    ):
        yield


def deepspeed_step(task: Workload) -> dict[str, int]:
    """Bytes of one step of ZeRO-3 with parameter and optimizer offload, without activation checkpointing.

    Nothing is kept from the forward to the backward pass (`stage3_max_reuse_distance` 0): as it is for a model whose
    weights exceed the device.
    """
    import deepspeed

    zero = {
        **ZEROS["deepspeed-zero3-offload"].config(task),
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    zero |= {"stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=task.subject.model, config={**task.config(), "zero_optimization": zero})
    for step in range(2):  # the first one traces the order of the layers
        counter = Counter()
        with counting(counter):
            for batch in task.batches(step):
                engine.backward(engine(**batch).loss)
                engine.step()
    return counter.bytes


def harmony_step(task: Workload, gib: float, gradients: str) -> harmony_ds.SwapReport:
    """The ledger of one step under a device budget of `gib`, gradients summed and sent in the dtype `gradients`."""
    config = {
        **task.config(),
        "data_types": {"grad_accum_dtype": gradients},
        "harmony": {"device": "cpu", "device_memory_gib": gib},
    }
    engine, *_ = harmony_ds.initialize(model=task.subject.model, config=config)
    for step in range(2):
        engine.train_batch(task.batches(step))
    report = engine.swap_report()
    engine.destroy()
    return report


def main() -> int:
    """1 if the formula is not what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulation", type=int, default=16)
    args = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    harmony_ds.init_distributed()
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}

    def task() -> Workload:
        return Workload(str(MODEL), config, 1, 1, args.accumulation, sequence=8)

    elements = sum(p.numel() for p in task().subject.model.parameters())
    weights_gib = 2 * elements / 2**30
    counted = deepspeed_step(task())
    reports = {kind: harmony_step(task(), 0.8 * weights_gib, kind) for kind in ("fp32", "bf16")}
    formula = reports["fp32"].zero3_offload_bytes
    total = sum(counted.values())
    print(f"{elements:,} parameters in bf16, {args.accumulation} micro-batches; harmony's budget 0.8 of the weights")
    for kind, nbytes in counted.items():
        print(f"ZeRO-3 offload, {kind:<14}{nbytes:>16,} bytes = {nbytes / elements:6.1f} per parameter")
    print(f"ZeRO-3 offload, counted     {total:>16,}; by formula {formula:,} ({formula / total:.4f} of it)")
    for kind, report in reports.items():
        print(
            f"harmony_ds, gradients in {kind}{report.swap_bytes:>15,} bytes = {report.swap_bytes / elements:6.1f} per "
            f"parameter: {total / report.swap_bytes:.1f} times less"
        )
    content = {
        "environment": {**environment("cpu"), "command": " ".join(["python", *sys.argv])},
        "parameters": elements,
        "accumulation": args.accumulation,
        "budget_gib": 0.8 * weights_gib,
        "zero3_counted_bytes": counted,
        "zero3_formula_bytes": formula,
        "harmony_swap_bytes": {kind: report.swap_bytes for kind, report in reports.items()},
        "times_less": {kind: total / report.swap_bytes for kind, report in reports.items()},
    }
    path = ROOT / "benchmarks" / "results" / "zero3-traffic.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(abs(formula / total - 1) > 0.02)


if __name__ == "__main__":
    sys.exit(main())
