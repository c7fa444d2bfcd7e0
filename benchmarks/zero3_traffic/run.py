"""Bytes that one step moves: ZeRO-Offload's copies, counted as DeepSpeed's code makes them, against the bench's formulas.

    python -m benchmarks.zero3_traffic.run      counts both stages in both dtypes; 1 if a formula is wrong

DeepSpeed runs on its CPU accelerator, where its copies between host and "device" are the same calls as on a GPU. Of ZeRO-3
every gather of a parameter, and every `copy_` and `to` of gradients in `partition_grads`, is counted; of ZeRO-2 every
`copy_` into or out of the tensors that it keeps in host memory.
"""

from __future__ import annotations

import argparse
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

from harmony_ds.bench.engines.deepspeed import ZEROS, ZeroOffload
from harmony_ds.bench.workload import Workload

MODEL = Path(__file__).parents[1] / "models" / "llama-7m.json"
TOLERANCE = 0.02
IN, GRADIENTS_IN, GRADIENTS_OUT = "weights in", "gradients in", "gradients out"


def counting_stage_2(optimizer: Any, counted: Counter[str]) -> AbstractContextManager[Any]:
    """Count copies into and out of host tensors of ZeRO-2."""
    copy_ = torch.Tensor.copy_

    def storages(tensors: list[torch.Tensor]) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def counted_copy(self: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        masters = optimizer.single_partition_of_fp32_groups
        weights = optimizer.param_buffer_of_bit16_for_cpu_offload_groups
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


def main() -> int:
    """Return 1 if a formula is not what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulation", type=int, default=16)
    args = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    right = [counted_is_formula(name, dtype, args.accumulation) for name in ZEROS for dtype in ("bf16", "fp32")]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
