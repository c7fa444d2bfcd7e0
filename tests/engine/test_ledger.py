"""The bytes in the ledger are those of the formula, whatever the number of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import SwapReport
from harmony_ds.scheduler.swaps import swaps_of
from tests.cover import spread
from tests.crossing import move_crossing
from tests.engine.drive import WHOLE, adamw, config_of, engine_for, family, groups_of, sgd
from tests.engine.sizes import layer_bytes, packed
from tests.families import HIDDEN, ragged_length
from tests.inside import planner_of

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")


def report_of(accumulation: int, harmony: dict[str, Any], **more: Any) -> tuple[SwapReport, nn.Module]:
    """The report of the second step (the first one also measures the model), and the model."""
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(accumulation, None, harmony, **more)) as engine:
        for group in groups_of(LLAMA, 2, accumulation):
            engine.train_batch(iter(group))
        return engine.swap_report(), model


@pytest.mark.parametrize(("pack", "clip"), spread((1, 2, 3, 4, WHOLE), (0.0, 0.5)))
def test_weights_and_gradients_equal_the_formula(pack: int, clip: float) -> None:
    report, model = report_of(4, {"pack_layers": pack}, gradient_clipping=clip)

    packs = packed(layer_bytes(model, 4), pack)
    assert report.host_to_device["weights"] == sum(packs) + sum(packs[:-1])
    assert report.device_to_host["gradients"] == sum(packs)
    assert report.device_to_host["weights"] == report.host_to_device["gradients"] == 0
    assert report.lower_bound_bytes == 2 * sum(packs) + sum(packs[:-1])
    assert report.ratio == 1.0
    assert report.micro_batches == 4


@pytest.mark.parametrize(("gradients", "element"), [("fp32", 4), ("bf16", 2)])
def test_bf16_halves_the_weights_and_gradients_go_in_their_accumulation_dtype(gradients: str, element: int) -> None:
    data_types = {"grad_accum_dtype": gradients}
    report, model = report_of(4, {"pack_layers": 1}, bf16={"enabled": True}, data_types=data_types)

    weights = layer_bytes(model, 2)
    assert report.host_to_device["weights"] == sum(weights) + sum(weights[:-1])
    assert report.device_to_host["gradients"] == sum(layer_bytes(model, element))
    assert report.ratio == 1.0


@pytest.mark.parametrize("pack", [1, 2])
def test_swaps_do_not_grow_with_the_number_of_micro_batches(pack: int) -> None:
    reports = [report_of(accumulation, {"pack_layers": pack})[0] for accumulation in (1, 4, 16)]

    assert len({report.swap_bytes for report in reports}) == 1
    assert [report.ratio for report in reports] == [1.0, 1.0, 1.0]
    assert reports[0].zero3_offload_bytes < reports[1].zero3_offload_bytes < reports[2].zero3_offload_bytes


@pytest.mark.parametrize(("pack", "stashed"), [(1, 4), (2, 3), (3, 2), (WHOLE, 0)])
def test_activations_that_wait_on_the_host_are_each_input_of_an_unfused_layer_once(pack: int, stashed: int) -> None:
    report, _ = report_of(4, {"pack_layers": pack, "stash": "host"})

    tokens = 2 * sum(ragged_length(index) for index in range(4, 8))
    expected = stashed * tokens * HIDDEN * 4
    assert report.host_to_device["activations"] == report.device_to_host["activations"] == expected


@pytest.mark.parametrize("pack", [1, 2, 3])
@pytest.mark.parametrize("name", ["SkipNet", "t5", "whisper"])
def test_a_stash_that_several_calls_share_moves_once_with_each_of_their_packs(name: str, pack: int) -> None:
    one = family(name)
    with engine_for(one.build(0.0), sgd, config_of(2, None, {"pack_layers": pack, "stash": "host"})) as engine:
        engine.train_batch(iter([one.batch(0), one.batch(0)]))
        costs, _ = planner_of(engine).costs
        report, planned = engine.swap_report(), swaps_of(engine.plan, costs)

    assert report.device_to_host["activations"] == planned.stash_out
    assert report.host_to_device["activations"] == planned.stash_in == planned.stash_out


class Instead(nn.Module):
    """Layers of which the second one raises, and another one is called instead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), Raising(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[0](inputs).tanh()
        try:
            hidden = self.layers[1](hidden)
        except ValueError:
            hidden = self.layers[2](hidden)
        loss: Tensor = self.head(hidden).square().mean()
        return loss


class Raising(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        raise ValueError("not these inputs")


@pytest.mark.parametrize("moved", [False, True])
def test_the_input_of_a_call_that_raised_is_stashed_for_the_one_that_came_instead(
    moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moved:  # of boundaries on the host, a stash takes copies over
        move_crossing(monkeypatch)
    with engine_for(Instead(), sgd, config_of(4, None, {"pack_layers": 1, "stash": "host"})) as engine:
        engine.train_batch(torch.randn(2, HIDDEN) for _ in range(4))
        costs, _ = planner_of(engine).costs
        report, planned = engine.swap_report(), swaps_of(engine.plan, costs)

    assert report.device_to_host["activations"] == planned.stash_out + planned.crossing_out
    assert report.host_to_device["activations"] == planned.stash_in + planned.crossing_in
    assert planned.stash_in == 4 * 2 * HIDDEN * 4


def test_a_stash_on_the_device_moves_nothing_and_data_is_the_batches_once() -> None:
    report, _ = report_of(4, {"pack_layers": 1, "stash": "device"})

    tokens = 2 * sum(ragged_length(index) for index in range(4, 8))
    assert report.host_to_device["activations"] == report.device_to_host["activations"] == 0
    assert report.host_to_device["data"] == 3 * 8 * tokens  # words, mask, labels
    assert report.device_to_host["data"] == 0


@pytest.mark.parametrize(("bf16", "element"), [(False, 4), (True, 2)])
def test_zero3_offload_moves_weights_and_gradients_twice_for_every_micro_batch(bf16: bool, element: int) -> None:
    report, model = report_of(4, {}, bf16={"enabled": bf16})

    count = sum(p.numel() for p in model.parameters())
    assert report.zero3_offload_bytes == 4 * (4 * element * count) + 4 * count


def test_frozen_parameters_send_no_gradients() -> None:
    model = LLAMA.build(0.0)
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(False)
    for parameter in model.model.embed_tokens.parameters():
        parameter.requires_grad_(False)
    with engine_for(model, adamw, config_of(2, None, {"pack_layers": 1})) as engine:
        for group in groups_of(LLAMA, 2, 2):
            engine.train_batch(iter(group))
        report = engine.swap_report()

    layers = layer_bytes(model, 4)
    # Nothing flows back through the embedding, so it is not swapped in again.
    assert report.host_to_device["weights"] == sum(layers) + sum(layers[1:-1])
    assert report.device_to_host["gradients"] == sum(layers) - layers[0] - layers[2]
    assert report.ratio == 1.0
    count = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.zero3_offload_bytes == 2 * (8 * count + 8 * trainable) + 4 * trainable


def test_the_first_step_is_reported_without_the_bytes_of_measuring() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(1, None, {"pack_layers": 99})) as engine:
        engine.train_batch(iter(groups_of(LLAMA, 1, 1)[0]))
        report = engine.swap_report()
        assert report.ratio == 1.0
        assert str(report).startswith("swaps of one step, 1 micro-batch ")
        assert "1 pack of 99 calls" in str(engine.plan_report())


def test_there_is_no_report_before_the_first_step() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine:
        with pytest.raises(RuntimeError, match="no optimizer step"):
            engine.swap_report()
        with pytest.raises(RuntimeError, match="no optimizer step has trained"):
            engine.plan_report()
        assert engine.plan is None
