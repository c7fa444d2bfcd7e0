"""Peak memory, measured by a device that counts every byte and raises at its limit."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import harmony_ds
from harmony_ds import UnsupportedError
from tests import simdevice
from tests.families import build_transformer
from tests.simdevice.device import SimDevice, engine_of

pytestmark = pytest.mark.fixed_times

HIDDEN, VOCABULARY, LAYERS, TOKENS = 64, 128, 12, 16


def build(layers: int = LAYERS) -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": layers}
    shape = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "vocab_size": VOCABULARY}
    return build_transformer("LlamaForCausalLM", **heads, **shape, max_position_embeddings=TOKENS, use_cache=False)


def batches(tokens: int = TOKENS) -> Any:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, VOCABULARY, (2, tokens), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def engine_under(budget_bytes: int | None, group: int, **harmony: Any) -> tuple[Any, SimDevice]:
    return engine_of(build(), torch.optim.AdamW, group, budget_bytes=budget_bytes, harmony=harmony)


def parameter_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in build().parameters())


def test_a_model_trains_under_a_limit_that_plain_pytorch_exceeds() -> None:
    limit = parameter_bytes() // 2
    model = build()
    before = simdevice.allocated_bytes()
    simdevice.set_limit(limit + before)
    with pytest.raises(torch.OutOfMemoryError):
        moved(model)
    simdevice.set_limit(None)
    gc.collect()

    engine, device = engine_under(limit, group=4)
    data = batches()
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    report = engine.memory_report()
    engine.destroy()
    assert all(loss > 0 for loss in losses)
    assert device.budget_bytes is not None
    assert report.device_peak_bytes <= report.planned_peak_bytes <= device.budget_bytes


def moved(model: nn.Module) -> list[torch.Tensor]:
    """All parameters on the test device at once, as plain training needs them."""
    return [parameter.detach().to("simdev") for parameter in model.parameters()]


def test_a_layer_called_beside_the_engine_says_that_weights_are_on_the_host() -> None:
    engine, _ = engine_under(None, group=2)
    with pytest.raises(UnsupportedError, match=r"weights are on the host outside the engine's calls"):
        engine.module.get_input_embeddings()(torch.ones(1, 2, dtype=torch.int64, device=engine.device))


def test_tensors_on_the_device_already_reduce_the_budget() -> None:
    engine, device = engine_under(None, group=2, pack_layers=1)
    engine.train_batch(batches())
    peak = engine.plan.peak_bytes
    engine.destroy()
    theirs = 4 * 2**14
    engine, device = engine_under(peak + theirs, group=2, pack_layers=1)
    held = torch.zeros(2**14, device=device.torch_device)
    engine.train_batch(batches())
    report = engine.memory_report()
    assert report.beside_bytes == theirs
    assert report.device_peak_bytes <= report.planned_peak_bytes + report.beside_bytes <= peak + theirs
    engine.destroy()
    del held


def test_activations_of_one_micro_batch_only_are_alive() -> None:
    """Four times the micro-batches cost crossing tensors (one per micro-batch), not activations."""
    peaks = {}
    for group in (2, 8):
        engine, _ = engine_under(None, group=group, pack_layers=1, stash="host")
        engine.train_batch(batches())
        engine.train_batch(batches())
        peaks[group] = engine.memory_report().device_peak_bytes
        engine.destroy()
    crossing = 2 * TOKENS * HIDDEN * 4
    # Per further micro-batch: its crossing tensor or the gradient of it, its ids, masks and rotary tables, its loss.
    assert peaks[8] - peaks[2] <= 6 * (2 * crossing + 8192)


@pytest.mark.parametrize("harmony", [{}, {"tokens": 8, "micro_batch": 1}], ids=["whole", "tiles and slices"])
def test_nothing_stays_on_the_device_between_steps(harmony: dict[str, Any]) -> None:
    engine, device = engine_under(None, group=2, pack_layers=2, **harmony)
    data = batches()
    engine.train_batch(data)
    engine.finish_updates()
    between = device.allocated_bytes()
    for _ in range(3):
        engine.train_batch(data)
    engine.finish_updates()
    resident = engine.plan.resident_bytes
    assert device.allocated_bytes() == between <= resident
    engine.destroy()


def test_what_a_program_keeps_of_its_own_losses_waits_on_the_host() -> None:
    engine, device = engine_under(None, group=1, pack_layers=1)
    kept, held = [], []
    for batch in itertools.islice(batches(), 3):
        kept.append(engine(**batch).logits.logsumexp(-1))  # a number for each token
        engine.backward(kept[-1].mean())
        engine.step()
        engine.finish_updates()
        held.append(device.allocated_bytes())
    engine.destroy()
    assert held[1] == held[2] and kept[0].device == device.torch_device


def test_larger_batches_are_measured_and_planned_before_they_run() -> None:
    engine, _ = engine_under(None, group=2, pack_layers=1)
    engine.train_batch(batches(tokens=8))
    small = engine.plan.peak_bytes
    engine.train_batch(itertools.chain([next(batches(tokens=8))], batches(tokens=TOKENS)))
    report = engine.memory_report()
    engine.destroy()
    assert report.planned_peak_bytes > small
    assert report.device_peak_bytes <= report.planned_peak_bytes


@pytest.mark.parametrize("settings", [{"pack_layers": 2, "residency": 3}, {"pack_layers": 1}], ids=str)
def test_out_of_memory_in_a_step_is_raised_and_the_engine_stays_usable(settings: dict[str, Any]) -> None:
    engine, _ = engine_of(build(), torch.optim.AdamW, 2, 0.5, harmony=settings)
    data = batches()
    for _ in range(2):
        engine.train_batch(data)
    engine.finish_updates()
    simdevice.set_limit(simdevice.allocated_bytes() + 20_000)
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with pytest.raises(torch.OutOfMemoryError):
        engine.train_batch(data)
    simdevice.set_limit(None)
    assert engine.usable
    assert all(torch.equal(p, weights[name]) for name, p in engine.module.named_parameters())
    engine.train_batch(data)
    engine.destroy()


def test_out_of_memory_while_measuring_leaves_nothing_on_the_device_even_while_the_error_is_held() -> None:
    engine, device = engine_under(None, group=2, pack_layers=1, tokens="off")
    before = device.allocated_bytes()
    data = batches()
    # What does not fit: the embedding, comparing what it gave twice, a layer's forward pass, a layer's backward pass.
    for more in (20_000, 60_000, 400_000, 800_000):
        simdevice.set_limit(simdevice.allocated_bytes() + more)
        with pytest.raises(
            harmony_ds.DoesNotFitError, match=r"there is no budget.* and \d+ bytes more did not fit"
        ) as caught:
            engine.train_batch(data)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert device.allocated_bytes() <= before + buffer_bytes(engine.module)
    simdevice.set_limit(None)
    assert engine.usable
    engine.train_batch(data)
    engine.destroy()


def buffer_bytes(module: nn.Module) -> int:
    """On a device that allocates in pieces of 512 bytes."""
    return sum(-(-buffer.nbytes // 512) * 512 for buffer in module.buffers())


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_forward_passes_whose_outputs_the_program_has_let_go_take_no_memory() -> None:
    """An evaluation without `torch.no_grad()`, and a loop that skips micro-batches with a large loss."""
    limit = parameter_bytes() // 2
    engine, device = engine_under(limit, group=2)
    data = batches()
    engine.train_batch(data)
    engine.eval()
    taken = set()
    for _ in range(12):
        loss = engine(**next(data)).loss
        taken.add(device.allocated_bytes())
        assert loss.item() > 0
    engine.train()
    for _ in range(12):
        assert engine(**next(data)).loss.item() > 0
        taken.add(device.allocated_bytes())
    engine.train_batch(data)  # none of them is in its way
    engine.destroy()
    assert max(taken) < limit // 4
