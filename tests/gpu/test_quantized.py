"""Quantized bases on CUDA, by their libraries' own kernels: plain PyTorch's results there, and packed bytes are swapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harmony_ds
from tests import quantized
from tests.engine.drive import engine_for, loop
from tests.gpu.test_cuda import SEED, config, on_cuda

pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ACCUMULATION, STEPS = 4, 2
GROUPS = [[quantized.batch(step * ACCUMULATION + i) for i in range(ACCUMULATION)] for step in range(STEPS)]
# `Module.to` moves neither attributes of modules nor what a hand-written class does not say how to move.
KINDS = [kind for kind in quantized.KINDS if "parameter" not in kind and "hand-written" not in kind]


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def built(kind: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Return the model with its base quantized on the host; skip if the library is not there."""
    for library in ("bitsandbytes", "torchao"):
        if library in kind:
            pytest.importorskip(library)
    return quantized.build(kind, dtype, **options)


def trained_by(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train_on_cuda(model: nn.Module) -> list[list[float]]:
    """Forward and backward on the GPU, the update of what is trained on the host, so that both sides round it alike."""
    model.to("cuda")
    for module in model.modules():
        if hasattr(module, "quant_state") and module.quant_state is not None:
            module.quant_state.to("cuda")  # of a parametrization; a kernel would read the host's memory without a check
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().cpu().requires_grad_() for name, p in own.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=1e-2)
    losses = []
    for step, group in enumerate(GROUPS):
        row = []
        for index, batch in enumerate(group):
            torch.manual_seed(harmony_ds.micro_batch_seed(SEED, step, index))
            loss = model(**on_cuda(batch)).loss
            (loss / ACCUMULATION).backward()
            row.append(loss.item())
        for name, p in own.items():
            masters[name].grad = None if p.grad is None else p.grad.cpu()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(masters[name])
        losses.append(row)
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_in_plain_pytorch_and_packed_bytes_are_swapped(kind: str, dtype: torch.dtype) -> None:
    plain, model = built(kind, dtype), built(kind, dtype)
    losses = train_on_cuda(plain)
    settings = {**config(pack_layers=1), "gradient_clipping": 0.0}
    with engine_for(model, lambda _: sgd_of(model), settings) as engine:
        found = loop(engine, GROUPS)
        engine.finish_updates()
        report, held = engine.swap_report(), engine.memory_report()
    # cuBLAS may choose another kernel for memory that is aligned otherwise: equal up to the rounding of the dtype.
    relative = 2e-5 if dtype is torch.float32 else 2e-2
    for own, expected in zip(found, losses, strict=True):
        assert own == pytest.approx(expected, rel=relative)
    wanted = trained_by(plain)
    for name, weight in trained_by(model).items():
        difference = (weight.float() - wanted[name].float()).abs().max()
        assert difference <= relative * wanted[name].float().abs().max(), name
    assert report.ratio == 1.0
    assert report.host_to_device["weights"] >= 2 * quantized.stored_bytes(kind, model)
    assert held.device_peak_bytes <= held.planned_peak_bytes + held.beside_bytes


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "bitsandbytes int8", "torchao int8"])
def test_nothing_of_an_evicted_base_stays_on_the_device(kind: str) -> None:
    model = built(kind, torch.bfloat16, layers=24)
    settings = {**config(pack_layers=1), "gradient_clipping": 0.0}
    with engine_for(model, lambda _: sgd_of(model), settings) as engine:
        loop(engine, GROUPS)
        engine.finish_updates()
        held = engine.memory_report()
    assert held.device_peak_bytes <= held.planned_peak_bytes + held.beside_bytes
    assert held.planned_peak_bytes < quantized.stored_bytes(kind, model)
