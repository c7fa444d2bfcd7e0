"""Estimates of a model that is not run, against the engine's measurements."""

from __future__ import annotations

import copy
import json
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from harmony_ds.assembly.assemble import assemble
from harmony_ds.config import Config, load_config
from harmony_ds.device import Device
from harmony_ds.device.allocator_room import fragment_bytes, reserve_bytes
from harmony_ds.device.meta import MetaDevice
from harmony_ds.errors import ModelError, ProfileError
from harmony_ds.estimate.forecast import forecast, joining
from harmony_ds.estimate.subject import Subject, load_subject
from harmony_ds.estimate.survey import Survey, estimate, measure, smallest_peak_bytes, update_cost, with_profile
from harmony_ds.profiling import roofline
from harmony_ds.profiling.hardware import hardware_of
from harmony_ds.profiling.measurement import Measurement
from harmony_ds.profiling.roofline import on_meta
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.micro_batch import loss_of
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.profile import Profile
from harmony_ds.step.engine_state import EngineState
from tests.cover import spread
from tests.engine.drive import engine_for, family, sgd
from tests.families import Family

HARDWARE = hardware_of("rtx4090")
MODELS = Path(__file__).parents[2] / "benchmarks" / "estimate" / "models"
EXACT = ("gpt2", "llama", "qwen3", "mistral", "phi3", "gpt_neox", "bert", "t5", "vit", "clip", "mamba")
ANCHOR_BYTES = 64
"""Every cut of the autograd graph has an anchor of 4 bytes, which is host memory where the device is none."""


def config_of(**more: Any) -> Config:
    device = {"harmony": {"device": "cpu"}}
    return load_config({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, **device, **more})


def on_meta_device(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def built_on_meta(one: Family, dropout: float) -> nn.Module:
    """A copy of the model; `.to("meta")` would untie tied weights."""
    model = one.build(dropout)
    memo: dict[int, Any] = {id(b): b.to("meta") for b in model.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def estimated(one: Family, dropout: float, config: Config) -> Survey:
    with patch.object(roofline.Attention, "fused", fused_on_cpu):
        return estimate(Subject(built_on_meta(one, dropout), on_meta_device(one.batch(0))), config, HARDWARE)


def fused_on_cpu(call: roofline.Attention) -> torch.Tensor | None:
    """The CPU's flash attention, which knows no dropout, nor a gradient of the mask."""
    query, value, mask = call.query, call.value, call.attn_mask
    if call.dropout_p or (mask is not None and mask.requires_grad) or query.shape[-1] != value.shape[-1]:
        return None
    mask = None if mask is None else roofline.additive(mask, query.dtype)
    flash: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, call.key, value, 0.0, call.is_causal, attn_mask=mask, scale=call.scale
    )[0]
    return flash


@pytest.mark.parametrize(("name", "dropout"), spread(EXACT, [0.0, 0.1]))
def test_bytes_are_those_that_the_engine_measures_on_the_cpu(name: str, dropout: float) -> None:
    config = config_of()
    known = measure(Subject(family(name).build(dropout), family(name).batch(0)), config).costs
    survey = estimated(family(name), dropout, config)
    found, shapes = survey.costs, {spec.name: spec.shape for spec in survey.graph.parameters}

    assert shapes == {n: tuple(p.shape) for n, p in family(name).build(dropout).named_parameters()}
    assert found.calls == known.calls
    for ours, theirs in zip(found.costs, known.costs, strict=True):
        assert ours.stash.new_bytes == theirs.stash.new_bytes
        assert ours.backward.input_gradient_bytes == theirs.backward.input_gradient_bytes
        assert ours.needs_backward == theirs.needs_backward
        assert abs(ours.waiting.alive_bytes - theirs.waiting.alive_bytes) <= ANCHOR_BYTES
        assert abs(ours.forward.peak_bytes - theirs.forward.peak_bytes) <= ANCHOR_BYTES
        assert abs(ours.forward.graph_bytes - theirs.forward.graph_bytes) <= ANCHOR_BYTES
        assert abs(ours.backward.peak_bytes - theirs.backward.peak_bytes) <= ANCHOR_BYTES
    assert abs(found.tail_bytes - known.tail_bytes) <= ANCHOR_BYTES
    assert abs(found.held_bytes - known.held_bytes) <= ANCHOR_BYTES


def test_equal_layers_are_propagated_through_once_with_the_same_result() -> None:
    assert table_on(MetaDevice) == table_on(ApartDevice)


class ApartDevice(MetaDevice):
    """Every call is propagated through, as on a device whose tensors have contents."""

    has_values = True


def table_on(device: type[MetaDevice]) -> CostTable:
    one = family("llama")
    model = built_on_meta(one, 0.1)
    inputs = on_meta_device(one.batch(0))
    with on_meta(HARDWARE.kernels()) as clock:
        made: EngineState = assemble(model, config_of(), None, None, device(clock))
        measurement = Measurement(made.runtime, made.layers)
        try:
            return measurement.measure(Sample(inputs, lambda named: model(**named), loss_of, 0))
        finally:
            made.destroy()


def llama(name: str, rows: int, sequence: int) -> tuple[nn.Module, dict[str, Any]]:
    subject = load_subject(str(MODELS / f"{name}.json"), "meta", rows, sequence)
    return subject.model, subject.inputs


def test_flops_are_those_of_the_closed_formula() -> None:
    rows, sequence = 2, 1024
    model, inputs = llama("llama-2-7b", rows, sequence)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - 32000 * 4096  # looked up, not multiplied
    with on_meta(HARDWARE.kernels()) as clock:
        loss = model.to(torch.bfloat16)(**inputs).loss
        forward = clock.flops
        loss.backward()

    tokens = rows * sequence
    attention = 32 * 4 * tokens * sequence * 4096 // 2  # causal: half of all scores
    assert forward == pytest.approx(2 * matrices * tokens + attention, rel=1e-4)
    # Fused attention recomputes its scores in backward: five products for two.
    assert clock.flops - forward == pytest.approx(4 * matrices * tokens + 2.5 * attention, rel=1e-4)


def test_a_model_of_70_billion_parameters_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, inputs = llama("llama-2-70b", 1, 2048)
    found = estimate(Subject(model, inputs), config_of(bf16={"enabled": True}), HARDWARE)

    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert sum(spec.numel for spec in found.graph.parameters) == 68_976_648_192
    assert len(found.graph.calls) == 83
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 512 * 1024


def test_times_are_the_rooflines() -> None:
    """Matrix products at 0.8 of the peak are most of a large layer; the rest cannot make it twice as long."""
    rows, sequence = 2, 2048
    model, inputs = llama("llama-2-7b", rows, sequence)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    found = estimate(Subject(model, inputs), config_of(bf16={"enabled": True}), HARDWARE).costs

    products = 2 * layer * rows * sequence / (165.2e9 * 0.8)
    assert found.costs[1].forward_ms == pytest.approx(1.4 * products, rel=0.3)
    assert found.costs[1].backward_ms == pytest.approx(3 * found.costs[1].forward_ms, rel=0.25)
    assert found.costs[2] == found.costs[32]


def test_a_mixture_of_experts_can_be_estimated_in_bf16() -> None:
    found = estimated(family("mixtral"), 0.0, config_of(bf16={"enabled": True}))

    assert found.costs.costs[1].forward_ms > 0


def test_parameters_used_between_layers_join_the_resident_set() -> None:
    model = OutsideNet().to("meta")
    inputs = {"words": torch.zeros(2, 4, dtype=torch.long, device="meta")}

    assert estimate(Subject(model, inputs), config_of(), HARDWARE).graph.unlayered == ("embed.weight",)
    assert not any("forward" in module.__dict__ for module in model.modules())  # no interception is left


class OutsideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden @ self.embed.weight.T).mean()


class AskingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: int(inputs.sum().item())]:
            inputs = block(inputs)
        return inputs.mean()


def test_a_model_that_looks_at_numbers_is_told_to_be_profiled() -> None:
    with pytest.raises(ModelError, match="profile it with data"):
        estimate(Subject(AskingNet().to("meta"), {"inputs": torch.zeros(2, 8, device="meta")}), config_of(), HARDWARE)


@pytest.mark.parametrize(("optimizer", "state"), [("AdamW", 8), ("Adam", 8), ("Adagrad", 4), ("SGD", 0), (None, 8)])
def test_what_a_resident_parameter_takes_is_what_the_engine_would_keep(optimizer: str | None, state: int) -> None:
    model, inputs = llama("llama-2-7b", 1, 128)
    block = {} if optimizer is None else {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    found = estimate(Subject(model, inputs), config_of(bf16={"enabled": True}, **block), HARDWARE)

    assert found.request.settings.residency == "auto"
    for spec in found.graph.parameters:
        counter = 512 * (state > 0)  # an allocator's piece for one number
        assert spec.state_bytes == (4 + state) * spec.numel + counter
        assert (spec.update_bytes == 0) == (optimizer != "Adagrad")


@pytest.mark.parametrize(
    ("more", "stays"),
    [({}, "kept"), ({"residency": "kept"}, "kept"), ({"residency": 2}, "off"), ({"pack_layers": 2}, "off")],
)
def test_packs_do_not_stay_where_the_engine_lets_none_stay(more: dict[str, Any], stays: str) -> None:
    model, inputs = llama("llama-2-7b", 1, 128)
    uncorrected = {"type": "AdamW", "params": {"bias_correction": False}}  # torch's Adam does not know that
    optimizer = {"type": "AdamW", "params": {}} if "pack_layers" in more else uncorrected
    found = estimate(Subject(model, inputs), config_of(optimizer=optimizer, harmony=more), HARDWARE)

    assert found.request.settings.residency == stays


_BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("more", "stays"),
    [
        ({"gradient_clipping": 1.0}, "auto"),
        ({"harmony": {"device": "cpu", "split_masters": True}}, "kept"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "."}}}, "kept"),
        ({"optimizer": {"type": "Lion", "params": {}}}, "kept"),
        ({"bf16": _BF16_MASTERS, "zero_optimization": {"stage": 1}}, "kept"),
        ({"optimizer": {"type": "Adagrad", "params": {}}}, "auto"),
    ],
)
def test_a_change_lets_packs_stay_where_the_engine_would_let_them_stay_after_it(
    more: dict[str, Any], stays: str
) -> None:
    hardware, one = replace(HARDWARE, disk_gb_per_s=3.0), family("gpt2")
    changed = config_of(**{"bf16": {"enabled": True}, **more})

    def estimated_under(config: Config) -> Survey:
        return estimate(Subject(built_on_meta(one, 0.0), on_meta_device(one.batch(0))), config, hardware)

    assert estimated_under(config_of(bf16={"enabled": True})).under(changed).request.settings.residency == stays
    assert estimated_under(changed).request.settings.residency == stays


def test_the_budget_is_the_ds_configs_or_what_the_engine_would_take() -> None:
    model, inputs = llama("llama-2-7b", 1, 128)
    small = config_of(harmony={"device_memory_gib": 3})

    assert estimate(Subject(model, inputs), config_of(), HARDWARE).request.budget_bytes == int(24 * 2**30 * 0.9)
    found = estimate(Subject(model, inputs), small, HARDWARE)
    room = reserve_bytes((9, 0)) + fragment_bytes(3 * 2**30, found.costs.working_bytes)
    assert found.request.budget_bytes == 3 * 2**30 - room
    assert found.request.beside_bytes == room


@pytest.mark.parametrize(
    ("optimizer", "params", "states"),
    [
        ("AdamW", {}, 2),
        ("Lion", {}, 1),
        ("Adagrad", {}, 1),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("SomethingElse", {}, 2),
        (None, {}, 2),
    ],
)
def test_what_an_optimizer_keeps(optimizer: str | None, params: dict[str, float], states: int) -> None:
    block = {} if optimizer is None else {"optimizer": {"type": optimizer, "params": params}}

    assert update_cost(config_of(**block)).states == states


# ---- a profile that was saved


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", None])
def test_a_saved_profile_stands_in_for_measuring(optimizer: str | None) -> None:
    one = family("gpt2")
    block = {} if optimizer is None else {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    config = config_of(harmony={"device": "cpu", "device_memory_gib": 1}, **block)
    measured = measure(Subject(one.build(0.0), one.batch(0)), config)
    saved = Profile.from_json(measured.profile.to_json())
    found = with_profile(Subject(built_on_meta(one, 0.0), on_meta_device(one.batch(0))), config, saved)

    assert measured.request.settings.residency == "auto"
    assert (found.graph, found.costs, found.element) == (measured.graph, measured.costs, measured.element)
    assert found.profile.machine == measured.profile.machine
    assert found.request == measured.request


def test_a_profile_measured_in_tiles_stands_in_for_measuring() -> None:
    one = family("llama")
    config = config_of(harmony={"device": "cpu", "device_memory_gib": 1, "tokens": {"head": 8, "layers": 8}})
    measured = measure(Subject(one.build(0.0), one.batch(0)), config)
    assert measured.request.policy.layer_tile_tokens == 8

    found = with_profile(Subject(built_on_meta(one, 0.0), on_meta_device(one.batch(0))), config_of(), measured.profile)

    assert found.costs == measured.costs
    assert (found.request.policy.tile_tokens, found.request.policy.layer_tile_tokens) == (8, 8)


def test_a_profile_of_another_model_is_refused() -> None:
    one, other = family("gpt2"), family("bert")
    saved = measure(Subject(one.build(0.0), one.batch(0)), config_of()).profile

    with pytest.raises(ProfileError, match="something else"):
        with_profile(Subject(built_on_meta(other, 0.0), on_meta_device(other.batch(0))), config_of(), saved)


def test_the_engine_takes_a_profile_that_a_survey_saved(tmp_path: Path) -> None:
    one, file = family("gpt2"), tmp_path / "profile.json"
    text = measure(Subject(one.build(0.0), one.batch(0)), config_of()).profile.to_json()
    file.write_text(text, encoding="utf-8")
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "harmony": {"device": "cpu", "profile": str(file)},
    }
    with engine_for(one.build(0.0), sgd, raw) as engine:
        engine.train_batch(iter([one.batch(0)]))

    assert file.read_text(encoding="utf-8") == text


def short_llama(folder: Path, sequence: int) -> Subject:
    """Four layers of Llama-2-7B and a row of so many tokens."""
    file = folder / "four_layers.json"
    file.write_text(json.dumps(json.loads((MODELS / "llama-2-7b.json").read_text()) | {"num_hidden_layers": 4}))
    return load_subject(str(file), "meta", 1, sequence)


JOINABLE = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": True}}


def test_auto_joins_micro_batches_of_short_rows(tmp_path: Path) -> None:
    subject, auto = short_llama(tmp_path, 64), config_of(**JOINABLE, harmony={"device": "cpu", "micro_batch": "auto"})
    found = estimate(subject, auto, hardware_of("h100")).request

    assert found.policy.joined_count > 1
    assert found.policy.joined_count * found.micro_batches == 8


@pytest.mark.parametrize(("sequence", "machine", "advised"), [(64, "h100", True), (2048, "rtx4090", False)])
def test_joining_is_advised_for_short_rows_alone(sequence: int, machine: str, advised: bool, tmp_path: Path) -> None:
    subject = short_llama(tmp_path, sequence)
    found = estimate(subject, config_of(**JOINABLE), hardware_of(machine))
    assert (joining(forecast(found)) is not None) == advised


def llama_file(folder: Path, vocabulary: int) -> Path:
    """A config.json of a model as wide as an 8B one, with two layers."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    more = {"num_hidden_layers": 2, "vocab_size": vocabulary, "max_position_embeddings": 131072}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    path = folder / "config.json"
    path.write_text(json.dumps({**kind, **sizes, **more}))
    return path


def survey_of_a_row(path: Path, tokens_in_row: int, **harmony: Any) -> Survey:
    block = {"device_memory_gib": 12.0, **harmony}
    config = load_config(
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0, "harmony": block}
    )
    return estimate(load_subject(str(path), "meta", 1, tokens_in_row), config, HARDWARE)


def test_a_row_whose_logits_do_not_fit_is_estimated_in_tiles(tmp_path: Path) -> None:
    path = llama_file(tmp_path, 128256)

    surveyed = partial(survey_of_a_row, path, 16384)
    found, whole = surveyed(), surveyed(tokens="off")

    budget = found.request.budget_bytes
    assert budget is not None
    assert smallest_peak_bytes(found) <= budget < smallest_peak_bytes(whole)
    assert forecast(found).plan.policy.tile_tokens == 1024
    assert surveyed(tokens=512).costs.tail_bytes < found.costs.tail_bytes


def test_a_row_whose_layers_do_not_fit_is_estimated_in_tiles_of_both(tmp_path: Path) -> None:
    path = llama_file(tmp_path, 32000)

    surveyed = partial(survey_of_a_row, path, 65536)
    found, head_alone = surveyed(), surveyed(tokens=1024)

    budget = found.request.budget_bytes
    assert budget is not None
    assert smallest_peak_bytes(found) <= budget < smallest_peak_bytes(head_alone)
    policy = forecast(found).plan.policy
    assert (policy.tile_tokens, policy.layer_tile_tokens) == (1024, 16384)


@pytest.mark.parametrize(
    ("rows", "harmony"), [(1, {"tokens": {"head": 1000, "layers": 700}}), (7, {"micro_batch": 2, "tokens": "off"})]
)
def test_tiles_and_slices_that_repeat_others_are_left_out_of_an_estimate(
    rows: int, harmony: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        {"train_micro_batch_size_per_gpu": rows, "bf16": {"enabled": True}, "harmony": {"device": "cpu", **harmony}}
    )

    def costs() -> CostTable:
        subject = load_subject(str(llama_file(tmp_path, 32000)), "meta", rows, 4096 // rows)
        return estimate(subject, config, HARDWARE).costs

    found = costs()
    monkeypatch.setattr(MetaDevice, "parts_to_run", Device.parts_to_run)
    every = costs()

    untimed = {"costs": (), "head_ms": 0.0, "tail_ms": 0.0, "issue_share": 0.0}
    assert replace(found, **untimed) == replace(every, **untimed)
    assert found.issue_share == pytest.approx(every.issue_share, rel=1e-3)
    assert found.tail_ms == pytest.approx(every.tail_ms, rel=1e-3)
    for one, other in zip(found.costs, every.costs, strict=True):
        assert (one.forward, one.backward, one.stash) == (other.forward, other.backward, other.stash)
        assert one.forward_ms == pytest.approx(other.forward_ms, rel=1e-3)
        assert one.backward_ms == pytest.approx(other.backward_ms, rel=1e-3)
        assert one.fused_ms == pytest.approx(other.fused_ms, rel=1e-3)


def test_long_rows_take_no_more_device_memory_with_more_micro_batches(tmp_path: Path) -> None:
    path = llama_file(tmp_path, 32000)

    def surveyed(micro_batches: int, **harmony: Any) -> Survey:
        config = load_config(
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": micro_batches,
                "bf16": {"enabled": True},
                "gradient_clipping": 1.0,
                "harmony": {"device_memory_gib": 12.0, "pack_layers": 1, **harmony},
            }
        )
        return estimate(load_subject(str(path), "meta", 1, 32768), config, HARDWARE)

    few, many = surveyed(4), surveyed(64)
    crossing_bytes = 32768 * 4096 * 2

    assert smallest_peak_bytes(many) - smallest_peak_bytes(few) < 4 * crossing_bytes  # masks and rotary tables
    assert forecast(many).plan.policy.crossing_on_host
    assert forecast(many).host_bytes["stash"] >= 64 * 2 * crossing_bytes
    assert smallest_peak_bytes(surveyed(64, stash="device")) > 64 * crossing_bytes


def test_a_row_whose_logits_fit_is_estimated_whole(tmp_path: Path) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}})

    found = estimate(load_subject(str(llama_file(tmp_path, 32000)), "meta", 1, 2048), config, HARDWARE)

    assert found.request.policy.tile_tokens == 0
    assert not found.costs.costs[-1].runs_with_loss


def served_in_slices(plan: Plan, request: PlanRequest, costs: CostTable) -> bool:
    """An allocator that has room for slices of rows alone."""
    return plan.policy.backward_rows > 0


@pytest.mark.parametrize(("micro_batch", "rows"), [("config", 1), (2, 2)])
def test_rows_are_cut_where_only_the_allocator_is_short_of_room(
    micro_batch: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harmony_ds.step.plan_search.serves", served_in_slices)
    one = family("llama")
    harmony = {"device_memory_gib": 1.0, "micro_batch": micro_batch, "tokens": "off"}
    subject = Subject(built_on_meta(one, 0.0), on_meta_device(one.batch(0)))
    assert estimate(subject, config_of(harmony=harmony), HARDWARE).request.policy.backward_rows == rows
