"""Memory that CUDA kernels take for themselves, worked out from the shapes of their operands."""

from __future__ import annotations

import torch

from harmony_ds.device.kernel_scratch import scratch_bytes
from harmony_ds.device.meta import MetaDevice
from tests.device.test_meta import FakeClock

_aten = torch.ops.aten


def test_the_backward_pass_of_an_embedding_sums_in_fp32_for_each_of_many_indices() -> None:
    gradients = torch.empty(2, 2048, 64, dtype=torch.bfloat16, device="meta")
    indices = torch.empty(2, 2048, dtype=torch.long, device="meta")
    operation = _aten.embedding_dense_backward.default
    assert scratch_bytes(operation, (gradients, indices, 100, -1, False)) == 4096 * (4 * 64 + 6 * 8)


def test_the_backward_pass_of_an_embedding_of_few_indices_takes_nothing() -> None:
    gradients = torch.empty(3072, 64, device="meta")
    indices = torch.empty(3072, dtype=torch.long, device="meta")
    assert scratch_bytes(_aten.embedding_dense_backward.default, (gradients, indices, 100, -1, False)) == 0


def test_the_backward_pass_of_flash_attention_sums_queries_in_fp32_with_rows_and_widths_rounded_up() -> None:
    operation = _aten._scaled_dot_product_flash_attention_backward.default
    for width, rounded in ((80, 96), (128, 128), (160, 192)):
        query = torch.empty(3, 5, 130, width, dtype=torch.bfloat16, device="meta")
        assert scratch_bytes(operation, (query, query, query, query)) == 4 * 3 * 5 * 256 * (rounded + 1)


def test_other_operations_take_nothing() -> None:
    assert scratch_bytes(_aten.mm.default, (torch.empty(8, 8), torch.empty(8, 8))) == 0


def test_only_a_meta_device_that_stands_for_cuda_counts_it() -> None:
    gradients = torch.empty(4096, 64, device="meta")
    indices = torch.empty(4096, dtype=torch.long, device="meta")
    peaks = []
    for optimizer_device in ("cpu", "cuda"):
        device = MetaDevice(FakeClock(), optimizer_device=optimizer_device)
        with device.probe() as probe:
            summed = _aten.embedding_dense_backward(gradients, indices, 100, -1, False)
            peaks.append(probe.peak_bytes())
            assert probe.allocated_bytes() == summed.numel() * summed.element_size()
    assert peaks == [100 * 64 * 4, 100 * 64 * 4 + 4096 * (4 * 64 + 48)]
