"""Refusals before training starts, with an error that says what to do; and gradients that are not numbers."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import harmony_ds
from harmony_ds import BatchError, DoesNotFitError, HarmonyEngine, ModelError, UnsupportedError, UsageError
from harmony_ds.device import CpuDevice, DeviceGroup
from tests.engine.drive import (
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    loop_plainly,
    loop_with,
    random_rows,
    sgd,
    squares,
    train_groups,
    weights_of,
)
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 1, 4)
LARGEST_LAYER_BYTES = 61_952  # weights and gradients


def test_a_micro_batch_without_a_tensor() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine:
        with pytest.raises(BatchError, match="no tensor"):
            engine.train_batch(iter([{"use_cache": False}]))
        with pytest.raises(BatchError, match="no tensor"):
            engine(use_cache=False)
        engine.train_batch(iter(GROUPS[0]))


def test_a_loader_in_the_place_of_its_iterator_would_begin_anew_each_step() -> None:
    loader = torch.utils.data.DataLoader([0])
    with engine_for(LLAMA.build(0.0), sgd, config_of(4)) as engine:
        with pytest.raises(BatchError, match=r"from an iterator or a list .* not from DataLoader: pass iter\(loader\)"):
            engine.train_batch(loader)
        engine.train_batch(GROUPS[0])


def test_a_model_without_values() -> None:
    with pytest.raises(ModelError, match=r"logit_scale is on the meta device.*load_file"):
        harmony_ds.initialize(model=family("clip").build(0.0).to("meta"), config=config_of(1))


def test_a_trained_parameter_that_shares_memory_would_be_trained_apart() -> None:
    """As autoencoders tie their weights, which is not to be told by where memory begins and ends."""

    def parts(own: torch.Tensor, other: torch.Tensor) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[0].weight = nn.Parameter(own)
        model[1].weight = nn.Parameter(other)
        return model

    memory = torch.zeros(4, 8)
    for other in (memory[:, 3:7], memory[:, :4].t(), memory[:1, :]):
        with pytest.raises(ModelError, match=r"0\.weight and 1\.weight share memory.*trained apart.*weight = other"):
            harmony_ds.initialize(model=parts(memory[:, :4], other), config=config_of(1))
    beside = parts(memory[:, :4], memory[:, 4:])
    frozen = parts(memory[:, :4], memory[:, :4]).requires_grad_(False)
    frozen.append(nn.Linear(4, 4))
    for model in (beside, frozen):
        with engine_for(model, sgd, config_of(1)):
            pass
    buffered = parts(memory[:, :4], memory[:, 4:])
    buffered.register_buffer("kept", memory[2])
    with pytest.raises(ModelError, match=r"weight and kept share memory"):
        harmony_ds.initialize(model=buffered, config=config_of(1))


class Filter(nn.Module):
    """A filter of frequencies: a complex parameter, or its real and imaginary parts."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        parts = random_rows(1, 5, 2)
        self.weight = nn.Parameter(torch.view_as_complex(parts) if is_complex else parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return torch.fft.irfft(torch.fft.rfft(x) * weight, n=x.shape[-1])


def filtering(is_complex: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Filter(is_complex), nn.Linear(8, 8))


def test_a_complex_parameter_is_refused_and_both_ways_out_train_as_plain_pytorch_does() -> None:
    batches = [random_rows(seed, 2, 8) for seed in range(4)]
    plain = filtering(is_complex=True)
    said = r"1\.weight is of torch\.complex64, .* Train real and imaginary parts \(torch\.view_as_real\).* or freeze it"
    with pytest.raises(ModelError, match=said):
        harmony_ds.initialize(model=plain, config=config_of(2))

    of_parts = filtering(is_complex=False)
    loop_plainly(plain, batches, 2, squares)
    with engine_for(of_parts, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        loop_with(engine, batches, squares)
    assert torch.equal(torch.view_as_complex(of_parts[1].weight), plain[1].weight)
    assert not torch.equal(plain[1].weight, filtering(is_complex=True)[1].weight)

    frozen, expected = filtering(is_complex=True), filtering(is_complex=True)
    for model in (frozen, expected):
        model[1].weight.requires_grad_(False)
    loop_plainly(expected, batches, 2, squares)
    with engine_for(frozen, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        loop_with(engine, batches, squares)
    assert_same(frozen, expected, bitwise=True)


def test_a_budget_too_small_is_an_error_with_both_numbers_before_any_update() -> None:
    model = LLAMA.build(0.0)
    before = weights_of(model)
    budget = 80_000
    with engine_for(model, adamw, config_of(4, None, {"device_memory_gib": budget / 2**30})) as engine:
        with pytest.raises(DoesNotFitError, match=r"needs [\d,]+ bytes .* budget is 80,000") as caught:
            engine.train_batch(iter(GROUPS[0]))
        assert "device_memory_gib" in str(caught.value)
        assert re.search(
            r"With one micro-batch, the backward pass of layer model.layers.2 takes most: [\d,]+", str(caught.value)
        )
        assert engine.usable
    assert_same(model, before, bitwise=True)


def test_a_model_that_is_given_no_labels_has_no_loss_to_propagate() -> None:
    with engine_for(LLAMA.build(0.0), adamw, config_of(4)) as engine:
        loss = engine(input_ids=GROUPS[0][0]["input_ids"]).loss
        with pytest.raises(UsageError, match=r"the loss is None\. .* labels"):
            engine.backward(loss)


def test_what_does_not_fit_in_any_cut_says_the_least_budget_that_does_and_what_was_tried() -> None:
    def engine_with(budget_bytes: int) -> AbstractContextManager[HarmonyEngine]:
        device = Reserving(budget_bytes)
        return engine_for(LLAMA.build(0.0), adamw, config_of(4, None, {"pack_layers": 1}), device=device)

    with engine_with(80_000) as engine:
        with pytest.raises(DoesNotFitError) as caught:
            engine.train_batch(iter(GROUPS[0]))
        assert not engine._state.planner.cuts.now.tiles.cut
    least, said = caught.value.least_budget_bytes, str(caught.value)
    assert least is not None and said.startswith(f"the smallest plan needs {least - 1040:,} bytes")
    tried = re.search(r"\nThat is the least of (\d+) ways to cut layer calls: .+\. Others need up to [\d.]+ KiB", said)
    assert tried is not None and int(tried[1]) > 5
    with engine_with(least - 1) as engine, pytest.raises(DoesNotFitError, match=f"needs {least - 1040:,} bytes"):
        engine.train_batch(iter(GROUPS[0]))
    with engine_with(least) as engine:
        engine.train_batch(iter(GROUPS[0]))
        assert engine._state.planner.rows.cuts


class Reserving(CpuDevice):
    """A device whose libraries take memory."""

    def reserve_bytes(self) -> int:
        return 1040

    def peer_reserve_bytes(self) -> int:
        return 60


def test_an_error_of_cuda_says_how_much_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a capacity of 2.00 GiB.")
    monkeypatch.setattr(CpuDevice, "charge", Mock(side_effect=error))
    said = r"there is no budget\. .* and 2\.50 GiB more did not fit"
    with engine_for(LLAMA.build(0.0), sgd, config_of(4)) as engine, pytest.raises(DoesNotFitError, match=said):
        engine.train_batch(GROUPS[0])


def with_one_trained_norm() -> nn.Module:
    """Return a model that `initialize` cannot know not to fit: layers without anything to train may never be called."""
    model = LLAMA.build(0.0).requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    return model


def test_memory_of_libraries_is_taken_off_the_budget_and_reported() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(4, None, {"pack_layers": 1})) as engine:
        train_groups(engine, GROUPS)
        peak = engine.plan.peak_bytes
    config = config_of(4, None, {"pack_layers": 1})
    with engine_for(LLAMA.build(0.0), sgd, config, device=Reserving(peak + 1040)) as engine:
        train_groups(engine, GROUPS)
        assert engine.plan.peak_bytes == peak
        assert engine.memory_report().beside_bytes == 1040
    whole = r"budget is 78,960 bytes \(of 80,000, 1,040 are set aside for libraries'"
    nothing = r"the budget is 1,400 bytes, of which libraries' workspaces .* take 1,040\. Up to"
    for budget, said in ((80_000, whole), (1_400, nothing)):
        model = LLAMA.build(0.0) if said is whole else with_one_trained_norm()
        with (
            engine_for(model, sgd, config, device=Reserving(budget)) as engine,
            pytest.raises(DoesNotFitError, match=said),
        ):
            train_groups(engine, GROUPS)


def test_a_budget_that_one_layer_does_not_fit_is_refused_by_initialize() -> None:
    model, expected = LLAMA.build(0.0), LLAMA.build(0.0)
    before = weights_of(model)
    said = (
        r"layer model.layers.0 alone takes 61,952 bytes \(60\.5 KiB\) .* and the budget is 61,951 bytes\. "
        r"Ways out: \(1\) raise harmony.device_memory_gib, to well above 5\.77e-05 \(GiB\), since"
    )
    with pytest.raises(DoesNotFitError, match=said):
        harmony_ds.initialize(model=model, config=config_of(4), device=CpuDevice(LARGEST_LAYER_BYTES - 1))
    reserved = r"and the budget is 62,991 bytes\. 1,040 bytes are set aside for libraries' workspaces"
    with pytest.raises(DoesNotFitError, match=reserved):
        harmony_ds.initialize(model=model, config=config_of(4), device=Reserving(LARGEST_LAYER_BYTES + 1039))
    assert_same(model, before, bitwise=True)
    with engine_for(model, sgd, config_of(4)) as engine, engine_for(expected, sgd, config_of(4)) as other:
        train_groups(engine, GROUPS)
        train_groups(other, GROUPS)
    assert_same(model, expected, bitwise=True)


def test_a_large_frozen_layer_that_forward_may_never_call_is_not_refused_by_initialize() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(1000, 1000).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x).square().mean()

    with engine_for(Unused(), sgd, config_of(1), device=CpuDevice(100_000)) as engine:
        engine.train_batch([torch.ones(2, 4)])
        assert engine.global_steps == 1


def test_several_devices_set_aside_more_for_the_tensors_that_they_exchange() -> None:
    device = DeviceGroup([Reserving(10**6), Reserving(10**6)])
    config = config_of(4, None, {"pack_layers": 1, "devices": 2})
    with engine_for(LLAMA.build(0.0), sgd, config, device=device) as engine:
        train_groups(engine, GROUPS[:1])
        assert engine.memory_report().beside_bytes == 1100


def test_a_budget_too_small_for_measuring_is_an_error_before_training_that_leaves_nothing() -> None:
    model, expected = with_one_trained_norm(), with_one_trained_norm()
    config = config_of(4, None, {"pack_layers": 1})
    with engine_for(expected, sgd, config) as engine:
        train_groups(engine, GROUPS)
    before = weights_of(model)
    device = CpuDevice(3_000)
    with engine_for(model, sgd, config, device=device) as engine:
        said = r"the budget is 3,000 bytes\. Up to 32 bytes were .*, and 12,288 bytes more did not fit"
        with pytest.raises(DoesNotFitError, match=said) as caught:
            engine.train_batch(iter(GROUPS[0]))
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        advice = re.search(r"raise harmony.device_memory_gib to well above ([\d.e-]+) \(GiB\)", str(caught.value))
        assert advice is not None
        assert float(advice[1]) * 2**30 > 3_000
        assert engine.usable
        assert device.allocated_bytes() <= sum(buffer.nbytes for buffer in model.buffers())
        with pytest.raises(DoesNotFitError):
            engine.eval_batch(iter(GROUPS[0]))
    assert device.allocated_bytes() == 0
    assert_same(model, before, bitwise=True)
    with engine_for(model, sgd, config) as engine:
        train_groups(engine, GROUPS)
    assert_same(model, expected, bitwise=True)


def test_a_gradient_that_forward_takes_through_layers_is_refused_in_words() -> None:
    """As a gradient penalty does: torch says that the inputs are not used, since each layer's graph is cut."""

    class Penalized(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return gradient.square().mean()

    model = Penalized(nn.Linear(4, 4), nn.Linear(4, 1))
    said = r"forward propagates back .* within one layer's forward"
    with engine_for(model, sgd, config_of(1)) as engine, pytest.raises(UnsupportedError, match=said):
        engine.train_batch(iter([torch.ones(2, 4)]))


def test_several_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train a model of its own, and all would write one checkpoint."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = LLAMA.build(0.0)
    with pytest.raises(UnsupportedError, match="2 processes were asked for"):
        harmony_ds.initialize(model=model, optimizer=sgd(model.parameters()), config=config_of(1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    harmony_ds.initialize(model=model, optimizer=sgd(model.parameters()), config=config_of(1))[0].destroy()
    assert torch.distributed.get_rank() == 0  # asked by scripts that a launcher starts
