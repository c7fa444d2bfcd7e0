"""Tiles of tokens on CUDA, and Liger's kernels in layers and loss: the results of whole calls, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.drive import engine_for, loop
from tests.gpu.test_cuda import GROUP, config, fast_sgd
from tests.oracle import assert_same

pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCABULARY = 8192


def long_llama() -> nn.Module:
    """Return a small model with many words, whose logits are most of what a row takes."""
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(shape)


def row(tokens: int, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def trained(model: nn.Module, length: int, **harmony: Any) -> tuple[nn.Module, list[list[float]], int]:
    """Return the model after two steps, its losses, and the peak on the device, which its plan has foreseen."""
    groups = [[row(length, step * GROUP + i) for i in range(GROUP)] for step in range(2)]
    settings = {**config(**harmony), "train_micro_batch_size_per_gpu": 1}
    with engine_for(model, fast_sgd, settings) as engine:
        losses = loop(engine, groups)
        engine.finish_updates()
        held = engine.memory_report()
    assert held.device_peak_bytes <= held.planned_peak_bytes + held.beside_bytes
    return model, losses, held.device_peak_bytes


@pytest.mark.parametrize("tiles", [512, {"head": 512, "layers": 256}], ids=["head", "head-layers"])
def test_tiles_train_as_whole_calls_do_in_less_memory(tiles: Any) -> None:
    whole, losses, peak = trained(long_llama(), 4096, pack_layers=1, tokens="off")
    tiled, found, less = trained(long_llama(), 4096, pack_layers=1, tokens=tiles)
    for own, expected in zip(found, losses, strict=True):
        assert own == pytest.approx(expected, rel=1e-5)
    assert_same(tiled, whole, False, relative=1e-4)  # sums over tokens are grouped otherwise
    assert less < 0.8 * peak


def test_a_row_of_32k_tokens_trains_in_tiles_under_a_budget_that_its_logits_exceed() -> None:
    tokens = 32768
    logits_bytes = 4 * tokens * VOCABULARY
    model = long_llama()
    budget_gib = 0.9 * logits_bytes / 2**30 + 1.0  # beside them: libraries' workspaces, allocator, layers
    _, losses, peak = trained(model, tokens, device_memory_gib=budget_gib)
    assert peak < budget_gib * 2**30
    assert all(6 < loss < 12 for group in losses for loss in group)  # near ln(8192) = 9.0


@pytest.mark.parametrize("tokens", ["off", {"head": 128, "layers": 128}], ids=["whole", "tiles"])
def test_ligers_kernels_train_as_they_do_in_plain_pytorch(tokens: Any) -> None:
    liger = pytest.importorskip("liger_kernel.transformers")
    models = [long_llama(), long_llama()]
    for model in models:
        liger._apply_liger_kernel_to_instance(model=model)
    plain, model = models
    plain.cuda()
    masters = {name: p.detach().cpu().requires_grad_() for name, p in plain.named_parameters()}
    optimizer = fast_sgd(masters.values())
    expected = []
    for step in range(2):
        for index in range(GROUP):
            batch = {key: value.cuda() for key, value in row(512, step * GROUP + index).items()}
            loss = plain(**batch).loss
            (loss / GROUP).backward()
            expected.append(loss.item())
        for name, p in plain.named_parameters():
            masters[name].grad = None if p.grad is None else p.grad.cpu()
            p.grad = None
        nn.utils.clip_grad_norm_(masters.values(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(masters[name])
    _, losses, _ = trained(model, 512, pack_layers=1, tokens=tokens)
    assert [loss for group in losses for loss in group] == pytest.approx(expected, rel=1e-4)
    assert_same(model, plain.cpu(), False, relative=1e-3)
