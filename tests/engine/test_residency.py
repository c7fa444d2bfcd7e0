"""Packs that stay on the device: the same bits, the bytes of the formula, and a host that is true whenever it is read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harmony_ds import ConfigError, DoesNotFitError, EngineFailedError, HarmonyEngine, OptimizerError
from harmony_ds.optim.device_optimizer import DeviceOptimizer
from harmony_ds.optim.resident_packs import ResidentPacks
from harmony_ds.scheduler import candidates
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.plan import Packing
from harmony_ds.scheduler.resident import resident_packs, tied_closure
from harmony_ds.scheduler.search import Choice
from harmony_ds.step import plan_search
from tests.cover import spread
from tests.engine.drive import (
    adamw,
    assert_trains_like_plain,
    config_of,
    engine_for,
    family,
    groups_of,
    means_of,
    plainly,
    seed_of,
    sgd,
    train_groups,
)
from tests.engine.failing import Mishap
from tests.engine.sizes import layer_bytes, rounded
from tests.engine.test_precision import BF16, assert_masters_and_weights_are_plain
from tests.inside import assembly_of, planner_of, updater_of
from tests.oracle import assert_same, train_plainly

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 4, 3)
EVERY = 100
"""More packs than any family has."""
CLIPS = (0.5, None)
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": sgd,
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": adamw,
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def config_with(residency: Any, clip: float | None = None, accumulation: int = 3, **more: Any) -> dict[str, Any]:
    return config_of(accumulation, clip, {"pack_layers": 1, "residency": residency}, **more)


def resident_in(engine: HarmonyEngine) -> int:
    assert engine.plan is not None
    return len(engine.plan.policy.resident)


def _first_packs(packing: Packing, count: int | None) -> tuple[int, ...]:
    return tied_closure(packing, packing.backward[:count] if count else ())


def test_resident_packs_are_not_counted_as_foreign_memory(caplog: pytest.LogCaptureFixture) -> None:
    """From the second step on they are there before it begins."""
    with engine_for(LLAMA.build(0.0), sgd, config_with(3)) as engine:
        train_groups(engine, GROUPS[:2])
        peak = engine.memory_report().device_peak_bytes
        assert "more than planned" not in caplog.text
        one = planner_of(engine)
        one.choices = (replace(one.choices[0], plan=replace(engine.plan, peak_bytes=peak - 1)), *one.choices[1:])
        train_groups(engine, GROUPS[2:3])
    assert f"this step took {peak:,} bytes of device memory, 1 more than planned" in caplog.text


# ---- the same bits


@pytest.mark.parametrize(("residency", "clip"), [(1, 0.5), (1, None), (2, None), (3, 0.5)])
def test_the_first_packs_may_stay_as_well_as_the_last(
    residency: int, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may choose them, whose update the next step would wait for."""
    monkeypatch.setattr(candidates, "resident_packs", _first_packs)
    with engine_for(LLAMA.build(0.1), adamw, config_with(residency, clip)) as engine:
        train_groups(engine, GROUPS)
        assert engine.plan is not None
        assert engine.plan.policy.resident == tuple(range(residency))
    assert_trains_like_plain(LLAMA, 0.1, GROUPS, config_with(residency, clip), adamw)


@pytest.mark.parametrize(("name", "clip"), spread(list(OPTIMIZERS), CLIPS))
def test_optimizers_step_on_the_device(name: str, clip: float | None) -> None:
    assert_trains_like_plain(LLAMA, 0.0, GROUPS, config_with(3, clip), OPTIMIZERS[name])


SHARED = [(name, sgd, {}, clip) for name, clip in spread(["gpt2", "t5", "SharedDepthNet"], CLIPS)]
HALF = [("llama", adamw, {"data_types": {"grad_accum_dtype": "bf16"}, **BF16}, clip) for clip in CLIPS]
BY_NAME = [
    ("llama", None, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}}, 0.5),
    ("llama", None, {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}, None),
]


@pytest.mark.parametrize(("name", "make", "more", "clip"), [*SHARED, *HALF, *BY_NAME])
def test_weights_and_norms_are_those_of_the_host(name: str, make: Any, more: Any, clip: float | None) -> None:
    """Sums of shared weights and in bf16, which plain PyTorch makes otherwise, and DeepSpeed's own optimizers."""
    one = family(name)
    groups, models, norms = groups_of(one, 3, 3), [], []
    for residency in ("off", 3, EVERY):
        models.append(one.build(0.0))
        with engine_for(models[-1], make, config_with(residency, clip, **more)) as engine:
            train_groups(engine, groups)
            norms.append(engine.get_global_grad_norm())
            assert residency == 3 or resident_in(engine) == (0 if residency == "off" else len(engine.plan.packs))
    assert norms[0] == norms[1] == norms[2]
    assert_same(models[1], models[0], bitwise=True)
    assert_same(models[2], models[0], bitwise=True)


def test_a_pack_that_shares_a_weight_with_one_that_is_not_resident_is_not_resident(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = family("gpt2")
    with engine_for(one.build(0.0), sgd, config_with(2)) as engine:
        train_groups(engine, groups_of(one, 1, 3))
        last = engine.plan.packs[-1].index
        assert engine.plan.policy.resident == (last - 1,)
    assert f"pack {last} is not resident: it shares transformer.wte.weight with pack 0" in caplog.text


@pytest.mark.parametrize(("residency", "clip", "first"), [(2, 0.5, False), (2, None, True), (EVERY, None, False)])
def test_bf16_with_masters(residency: int, clip: float | None, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "resident_packs", _first_packs if first else resident_packs)
    losses, expected = assert_masters_and_weights_are_plain(LLAMA, GROUPS, config_with(residency, clip, **BF16))
    assert losses == expected


# ---- bytes


@pytest.mark.parametrize(("residency", "clip"), [(0, None), (1, 0.5), (2, None), (4, 0.5), (6, None)])
def test_swapped_bytes_are_those_of_the_other_packs(residency: int, clip: float | None) -> None:
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_with(residency, clip)) as engine:
        train_groups(engine, GROUPS[:1])
        first = engine.swap_report()
        train_groups(engine, GROUPS[1:2])
        report = engine.swap_report()
        assert resident_in(engine) == residency
    sizes = layer_bytes(model, 4)
    swapped = sizes[: 6 - residency]
    fused = 0 if residency else sizes[-1]
    assert report.host_to_device["weights"] == 2 * sum(swapped) - fused
    assert report.device_to_host["gradients"] == sum(swapped)
    assert report.ratio == 1.0
    assert first.host_to_device["resident"] == sum(sizes[6 - residency :])
    assert report.host_to_device["resident"] == 0
    # A norm for each of their parameters.
    assert report.device_to_host["resident"] == 4 * resident_tensors(engine)


def resident_tensors(engine: HarmonyEngine) -> int:
    assert engine.plan is not None
    return sum(len(engine.plan.packs[index].parameters) for index in engine.plan.policy.resident)


def test_the_plan_counts_resident_packs() -> None:
    model = LLAMA.build(0.0)
    plans = {}
    for residency in ("off", EVERY):
        with engine_for(model if residency == EVERY else LLAMA.build(0.0), adamw, config_with(residency)) as engine:
            train_groups(engine, GROUPS[:2])
            plans[residency] = engine.plan
            assert engine.memory_report().device_peak_bytes <= engine.plan.peak_bytes
    tensors = [p.numel() * 4 for p in model.parameters()]
    # Adam's moments and its counter, each in pieces of 512 bytes.
    state = sum(2 * -(-nbytes // 512) * 512 + 512 for nbytes in tensors)
    weights = sum(rounded(nbytes) for nbytes in tensors)
    assert plans[EVERY].resident_bytes - plans["off"].resident_bytes == weights + state


def test_kept_packs_are_swapped_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    find = plan_search.search

    def keeping(graph: Any, costs: Any, machine: Any, element: Any, request: Any, top: int) -> tuple[Choice, ...]:
        choice = find(graph, costs, machine, element, request, top)[0]
        policy = replace(choice.plan.policy, kept=(1, 3))
        return (replace(choice, plan=make_plan(choice.plan.packing, costs, request, policy)),)

    monkeypatch.setattr(plan_search, "search", keeping)
    plain, losses = plainly(LLAMA, 0.1, GROUPS, adamw, 0.5)
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_with("off", 0.5)) as engine:
        assert train_groups(engine, GROUPS) == means_of(losses)
        report, memory = engine.swap_report(), engine.memory_report()
    assert_same(model, plain, bitwise=True)
    sizes = layer_bytes(model, 4)
    assert report.host_to_device["weights"] == 2 * sum(sizes) - sizes[5] - sizes[1] - sizes[3]
    assert report.device_to_host["gradients"] == sum(sizes)
    assert report.ratio == 1.0
    assert memory.device_peak_bytes <= memory.planned_peak_bytes


# ---- looks


def test_a_look_that_is_interrupted_leaves_the_devices_values_the_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = plainly(LLAMA, 0.0, GROUPS[:2], adamw, 0.5)
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(3, 0.5, {"pack_layers": 1, "residency": EVERY})) as engine:
        train_groups(engine, GROUPS[:1])
        with monkeypatch.context() as patched:
            patched.setattr(DeviceOptimizer, "copy_state_to_host", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.optimizer.state_dict()
        train_groups(engine, GROUPS[1:2])
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("make", [lambda p: torch.optim.RMSprop(p, lr=1e-3), torch.optim.NAdam])
def test_other_optimizers_keep_packs_from_forward_to_backward_alone(make: Make) -> None:
    with pytest.raises(
        OptimizerError, match=r"harmony\.residency needs updates on the device: what .* takes is not known"
    ):
        engine_for(LLAMA.build(0.0), make, config_with(3)).__enter__()
    config = config_of(3, None, {"device_memory_gib": 0.01})
    with engine_for(LLAMA.build(0.0), make, config) as engine:
        train_groups(engine, GROUPS[:1])
        assert resident_in(engine) == 0


def same_states(actual: Any, expected: Any) -> None:
    assert actual["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert actual["state"][index].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(actual["state"][index][key]), torch.as_tensor(value)), (index, key)


@pytest.mark.parametrize("name", ["momentum", "adam", "fused", "adagrad"])
def test_the_optimizers_state_is_true_whenever_it_is_read(name: str) -> None:
    plain, model = LLAMA.build(0.0), LLAMA.build(0.0)
    optimizer = OPTIMIZERS[name](plain.parameters())
    with engine_for(model, OPTIMIZERS[name], config_with(4, 0.5)) as engine:
        for group in GROUPS:
            train_plainly(plain, [group], optimizer, clip=0.5, seed_of=seed_of)
            engine.train_batch(iter(group))
            same_states(engine.optimizer.state_dict(), optimizer.state_dict())
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            for key, value in optimizer.state[theirs].items():
                assert torch.equal(engine.optimizer.state[mine][key], value)
        assert len(pickle.loads(pickle.dumps(engine.optimizer.state))) == len(list(model.parameters()))
    assert type(engine.optimizer.state).__name__ == "defaultdict"


class Fragile(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        made: torch.Tensor = super().forward(x).sum()
        return made


def test_a_step_that_failed_after_gradients_left_the_device_makes_no_later_one_wait_for_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Fragile(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    few, more = torch.ones(2, 4), torch.ones(5, 4)
    with engine_for(model, sgd, config_with(EVERY, 0.5)) as engine:
        for _ in range(3):
            engine.backward(engine(few))
            engine.step()
        engine.backward(engine(few))
        assert model[0].weight.grad is not None  # it has accumulated on the device
        engine.step()
        engine.backward(engine(more))  # measured, for which gradients leave the device
        engine.step()
        engine.backward(engine(few * torch.nan))
        with pytest.raises(ValueError, match="not a number"):
            engine.step()
        waits = Mock(side_effect=updater_of(engine).pop_gradients)
        monkeypatch.setattr(updater_of(engine), "pop_gradients", waits)
        for _ in range(3):
            engine.backward(engine(few))
            engine.step()
        assert engine.was_step_applied()
    waits.assert_not_called()


# ---- other passes


@pytest.mark.parametrize("residency", [2, EVERY])
def test_evaluation_and_streaming_use_resident_packs(residency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = plainly(LLAMA, 0.0, GROUPS[:2], adamw)
    expected = [plain.eval()(**batch).loss.item() for batch in GROUPS[2]]
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_with(residency)) as engine:
        train_groups(engine, GROUPS[:2])
        swapped: list[str] = []
        swap_in = (store := assembly_of(engine).runtime.device_copies).swap_in
        monkeypatch.setattr(
            store, "swap_in", lambda names, *more, **by: (swapped.extend(names), swap_in(names, *more, **by))[1]
        )
        assert engine.eval_batch(iter(GROUPS[2])).item() == torch.tensor(expected).mean().item()
        model.eval()
        with torch.inference_mode():
            assert engine.optimizer.state_dict()["state"]  # and the device gets it again
            assert [engine(**batch).loss.item() for batch in GROUPS[2]] == expected
        here = {n for index in engine.plan.policy.resident for n in engine.plan.packs[index].parameters}
        assert here
        assert here.isdisjoint(swapped)
        assert {*here, *swapped} == dict(plain.named_parameters()).keys()
        train_groups(engine, GROUPS[2:])  # steps that state
        monkeypatch.undo()


# ---- failures


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_failure_of_an_update_on_the_device_surfaces_and_ends_the_engine(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Mishap("the device's optimizer broke")

    def broken(self: ResidentPacks, *arguments: Any, **more: Any) -> None:
        raise failure

    with engine_for(LLAMA.build(0.0), adamw, config_with(3, clip)) as engine:
        train_groups(engine, GROUPS[:1])
        monkeypatch.setattr(ResidentPacks, "update", broken)
        with pytest.raises(Mishap) as caught:
            engine.train_batch(iter(GROUPS[1]))
        assert caught.value is failure
        assert not engine.usable
        with pytest.raises(EngineFailedError, match="cannot go on"):
            engine.train_batch(iter(GROUPS[1]))


def test_a_budget_that_the_resident_packs_do_not_fit_into_says_so() -> None:
    config = config_with(EVERY)
    config["harmony"]["device_memory_gib"] = 150_000 / 2**30
    with (
        engine_for(LLAMA.build(0.0), adamw, config) as engine,
        pytest.raises(DoesNotFitError, match=r"lower harmony\.residency"),
    ):
        engine.train_batch(iter(GROUPS[0]))


@pytest.mark.parametrize("value", [True, -1, "all", 1.5, None])
def test_other_settings_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"harmony\.residency"):
        engine_for(LLAMA.build(0.0), adamw, config_with(value)).__enter__()
