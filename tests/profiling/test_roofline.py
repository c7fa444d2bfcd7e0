"""The clock that says what operations on meta tensors would take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harmony_ds.errors import ModelError
from harmony_ds.profiling.hardware import KernelRates
from harmony_ds.profiling.roofline import on_meta

RATES = KernelRates(
    fp32_flops_per_ms=1e6,
    half_flops_per_ms=4e6,
    matmul_share=0.5,
    attention_share=0.25,
    bytes_per_ms=1e9,
    kernel_ms=1e-3,
)


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


@pytest.mark.parametrize(("dtype", "peak"), [(torch.float32, 1e6), (torch.bfloat16, 4e6), (torch.float16, 4e6)])
def test_a_matrix_product_takes_its_flops_over_the_reached_share_of_the_peak_of_its_dtype(
    dtype: torch.dtype, peak: float
) -> None:
    a, b = meta(64, 128, dtype=dtype), meta(128, 32, dtype=dtype)
    with on_meta(RATES) as clock:
        a @ b

    assert clock.flops == 2 * 64 * 128 * 32
    assert clock.ms == pytest.approx(clock.flops / (peak * 0.5))


@pytest.mark.parametrize(
    ("operation", "operands", "nbytes"),
    [
        (torch.add, (meta(1000, 1000), meta(1000, 1000)), 3 * 4e6),
        (torch.add, (meta(1000, 1000), meta(1000).expand(1000, 1000)), 2 * 4e6 + 4e3),
        (F.embedding, (meta(10_000, dtype=torch.long), meta(100_000, 100)), 2 * 4e6 + 8e4),
    ],
    ids=["elementwise", "an expanded operand counts once", "of a table only the rows that are looked up"],
)
def test_what_is_read_and_written_is_over_the_bandwidth(
    operation: Callable[..., Tensor], operands: tuple[Tensor, Tensor], nbytes: float
) -> None:
    with on_meta(RATES) as clock:
        operation(*operands)

    assert clock.ms == pytest.approx(nbytes / 1e9)


def test_nothing_is_faster_than_it_is_issued_and_views_take_nothing() -> None:
    a = meta(10, 10)
    with on_meta(RATES) as clock:
        a.t()[:5].view(5, 10, 1)
        assert clock.ms == 0
        a + 1

    assert clock.ms == 1e-3


def attention(query: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=causal)


def test_fused_attention_does_not_hold_the_scores_and_a_causal_one_computes_half_of_them() -> None:
    query = meta(2, 4, 128, 32, dtype=torch.bfloat16)
    with on_meta(RATES) as clock:
        attention(query)
        whole = clock.flops
        attention(query, causal=True)

    assert whole == 2 * 2 * 2 * 4 * 128 * 128 * 32
    assert clock.flops == whole + whole // 2
    assert clock.ms == pytest.approx(clock.flops / (4e6 * 0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_attention_has_the_shape_and_gradient_that_it_always_has(dtype: torch.dtype, mask: torch.dtype | None) -> None:
    query = meta(2, 4, 16, 32, dtype=dtype, grad=True)
    masked = None if mask is None else meta(2, 1, 16, 16, dtype=dtype if mask is torch.float32 else mask)
    with on_meta(RATES):
        out = attention(query, masked)
        out.sum().backward()

    assert out.shape == query.shape and out.dtype == dtype
    assert query.grad is not None and query.grad.shape == query.shape


def test_one_key_head_for_many_query_heads_takes_the_matrix_products_of_them_all() -> None:
    query, key = meta(2, 4, 16, 32, grad=True), meta(2, 1, 16, 32, grad=True)
    with on_meta(RATES) as clock:
        out = F.scaled_dot_product_attention(query, key, key, is_causal=True)
        forward = clock.flops
        out.sum().backward()

    assert out.shape == query.shape
    assert key.grad is not None and key.grad.shape == key.shape
    assert forward == 2 * 2 * 2 * 4 * 16 * 16 * 32
    assert clock.flops == 3 * forward


def test_questions_about_values_are_answered_as_for_data_without_padding() -> None:
    mask = torch.ones(2, 8, dtype=torch.bool, device="meta")
    with on_meta(RATES):
        assert mask.all()
        assert not (~mask).any()


def test_numbers_cannot_be_asked_for() -> None:
    with on_meta(RATES), pytest.raises(ModelError, match="profile it with data"):
        torch.zeros(3, device="meta").sum().item()


def test_real_tensors_stay_real_and_take_no_time() -> None:
    with on_meta(RATES) as clock:
        assert torch.ones(3).sum().item() == 3.0

    assert clock.ms == 0
