"""Changes by hand to parameters, gradients and optimizers: as in plain PyTorch, or refused by name."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds import HarmonyEngine, ModelError, OptimizerError, UnsupportedError, UsageError
from harmony_ds.model.link import ParameterLink
from harmony_ds.offload.host_gradients import HostGradients
from harmony_ds.utils import safe_get_full_fp32_param
from tests.engine.drive import adamw, config_of, engine_for, sgd, weights_of
from tests.exactness.models import Net, batches
from tests.families import build_seeded
from tests.inside import updater_of
from tests.oracle import assert_same


def net() -> Net:
    return build_seeded(Net)


def batch(number: int) -> tuple[Tensor, Tensor]:
    return batches(1, seed=number)[0]


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (lambda net: setattr(net.head, "weight", nn.Parameter(torch.zeros(5, 6))), ModelError, "'weight' is replaced"),
        (lambda net: net.half().float(), ModelError, r"front\.weight is to become .*float16"),
        (
            lambda net: setattr(net.head.weight, "data", torch.zeros(4, 6)),
            ModelError,
            r"head\.weight is to become \(4, 6\)",
        ),
        (lambda net: net.load_state_dict(weights_of(net), assign=True), RuntimeError, "'weight' is replaced"),
        (
            lambda net: net.head.weight.register_post_accumulate_grad_hook(lambda p: None),
            UnsupportedError,
            "register_post_accumulate_grad_hook",
        ),
    ],
    ids=["assign", "other dtype", "other shape", "load by assignment", "post accumulate"],
)
def test_detaching_a_parameter_is_refused_and_changes_nothing(act: Any, kind: Any, message: str) -> None:
    plain, model = net(), net()
    optimizer = sgd(plain.parameters())
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine:
        for step in range(2):
            engine.train_batch([batch(step)])
            plain(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(kind, match=message) as raised:
                act(model)
            assert kind is UnsupportedError or "call engine.destroy() first" in str(raised.value)
            assert_same(model, plain, bitwise=True)


def test_training_with_a_thawed_parameter_that_was_frozen_at_the_start_is_refused() -> None:
    model = net()
    model.head.requires_grad_(False)
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        model.requires_grad_(True)
        with torch.no_grad():
            engine(*batch(0))
        for train in (lambda: engine.train_batch([batch(0)]), lambda: engine(*batch(0))):
            with pytest.raises(UnsupportedError, match=r"head\.weight is not trained by this engine"):
                train()
        model.head.requires_grad_(False)
        engine.train_batch([batch(1)])


def test_a_parameter_group_that_is_added_later_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        before = weights_of(model)
        optimizer.add_param_group({"params": list(model.head.parameters())})
        with pytest.raises(OptimizerError, match=r"hold \[12, 2\] parameters, and held \[12\]"):
            engine.train_batch([batch(1)])
        assert_same(model, before, bitwise=True)


def test_writing_while_a_micro_batch_waits_for_its_backward_is_refused() -> None:
    model = net()
    with engine_for(model, sgd, config_of(1)) as engine:
        loss = engine(*batch(0))
        assert model.head.weight.data.norm() > 0.0
        assert len(model.state_dict()) == 16
        torch.zeros(model.head.weight.shape).add_(model.head.weight)  # which is only read
        with torch.no_grad(), pytest.raises(UsageError, match=r"head\.weight is about to be changed"):
            model.head.weight.zero_()
        engine.backward(loss)
        engine.step()


BF16 = {"bf16": {"enabled": True}}


def half_step(engine: HarmonyEngine, number: int) -> None:
    """A step of a model in bf16."""
    inputs, targets = batch(number)
    engine.backward(F.cross_entropy(engine(inputs.bfloat16()).float(), targets))
    engine.step()


class Waiting(torch.optim.SGD):
    """Steps once the program has gone on."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.began, self.gone_on = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> None:
        self.began.set()
        assert self.gone_on.wait(60)
        super().step()


def drop_each(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


@pytest.mark.parametrize(
    "drop",
    [lambda one: one.zero_grad(), lambda one: one.zero_grad(set_to_none=False), drop_each],
    ids=["none", "zero", "each"],
)
def test_gradients_dropped_right_after_a_step_are_those_of_the_next_one(drop: Any) -> None:
    """In bf16 the optimizer has masters, and the pending update steps with gradients on the same."""
    trained = []
    for waits in (True, False):
        model = net().bfloat16()
        optimizer = Waiting(model.parameters())
        config = config_of(1, 0.5, {"pack_layers": 1}, **BF16)
        with engine_for(model, lambda _, optimizer=optimizer: optimizer, config) as engine:
            for step in range(2):
                optimizer.gone_on.set()  # measuring steps, too
                inputs, targets = batch(step)
                engine.backward(F.cross_entropy(engine(inputs.bfloat16()).float(), targets))
                optimizer.began.clear()
                if waits:
                    optimizer.gone_on.clear()
                engine.step()
                assert optimizer.began.wait(60)
                if waits:
                    drop(optimizer)
                optimizer.gone_on.set()
                engine.module.state_dict()
        trained.append(model)
    assert_same(trained[0], trained[1], bitwise=True)


def test_an_optimizer_has_the_models_own_parameters_again_when_its_engine_is_gone() -> None:
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = config_of(1, None, **BF16)
    for step in range(2):
        with engine_for(model, lambda _: optimizer, config) as engine:
            half_step(engine, step)
            assert all(p.dtype == torch.float32 for p in optimizer.param_groups[0]["params"])
        mine = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(mine, model.parameters(), strict=True))
        assert set(map(id, optimizer.state)) == set(map(id, mine))
    before = copy.deepcopy(model)
    optimizer.zero_grad()
    inputs, targets = batch(2)
    F.cross_entropy(model(inputs.bfloat16()).float(), targets).backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_masters_that_are_read_or_saved_are_those_of_weights_written_by_hand(tmp_path: Path) -> None:
    config = config_of(1, None, **BF16)

    def trained(engine: HarmonyEngine) -> Any:
        half_step(engine, 0)
        return next(iter(engine.module.parameters()))

    with engine_for(net().bfloat16(), sgd, config) as engine:
        weight = trained(engine)
        with torch.no_grad():
            weight.fill_(0.5)
        engine.save_checkpoint(tmp_path)
        with torch.no_grad():
            weight.fill_(0.25)
        assert torch.equal(safe_get_full_fp32_param(weight), torch.full(weight.shape, 0.25))  # type: ignore[arg-type]
    with engine_for(net().bfloat16(), sgd, config) as engine:
        weight = trained(engine)
        engine.load_checkpoint(tmp_path)
        assert torch.equal(safe_get_full_fp32_param(weight), torch.full(weight.shape, 0.5))  # type: ignore[arg-type]


def test_a_kept_state_dict_is_compared_with_the_masters_once_a_step_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    update_master = ParameterLink.update_master
    monkeypatch.setattr(ParameterLink, "update_master", lambda link: (compared.append(link.name), update_master(link)))
    model = net()
    with engine_for(model, sgd, config_of(3, **BF16)) as engine:
        kept = model.state_dict()
        for value in (0.5, 0.25):
            kept["head.weight"].data.fill_(value)  # of which no version tells
            for number in range(3):
                half_step(engine, number)
            assert sorted(compared) == sorted(kept)
            compared.clear()
            master = safe_get_full_fp32_param(model.head.weight)
            assert master is not None and (master - value).abs().max() < 0.2
            compared.clear()


@pytest.mark.parametrize("clip", [None, 1e6])
def test_the_norm_of_a_step_over_the_programs_own_gradients_is_that_steps_alone(clip: float | None) -> None:
    model = net()
    model.scale = nn.Parameter(torch.ones(4))
    optimizer = sgd(model.parameters())
    with engine_for(model, lambda _: optimizer, config_of(1, clip)) as engine:
        (3.0 * model.scale).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.get_global_grad_norm() == pytest.approx(6.0)
        expected = copy.deepcopy(model)
        expected(*batch(0)).backward()
        engine.backward(engine(*batch(0)))
        engine.step()
        norm = nn.utils.get_total_norm([p.grad for p in expected.parameters() if p.grad is not None])
        assert engine.get_global_grad_norm() == pytest.approx(norm.item())


def test_a_gradient_that_waits_for_its_update_is_not_shown_as_the_next_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parameter that no layer uses, whose update the next step's passes do not wait for."""
    plain, model, reads, shown = net(), net(), threading.Event(), threading.Event()
    for one in (plain, model):
        torch.manual_seed(1)
        one.spare = nn.Linear(3, 1, bias=False)
    optimizer, gradient = sgd(plain.parameters()), HostGradients.gradient

    def show(self: HostGradients, name: str) -> Tensor | None:
        if name == "spare.weight" and reads.is_set():
            shown.set()
        return gradient(self, name)

    monkeypatch.setattr(HostGradients, "gradient", show)
    with engine_for(model, sgd, config_of(1, 0.5, {"pack_layers": 1})) as engine:
        updater = updater_of(engine)
        next_job = updater._next_job

        def next_job_late() -> Any:
            """Come to the last update when there is something else to do."""
            with updater._changed:
                if [name for name, count in updater._updating.items() if count] == ["spare.weight"]:
                    updater._changed.wait_for(lambda: len(updater._jobs) > 1 or shown.is_set(), 60)
            return next_job()

        monkeypatch.setattr(updater, "_next_job", next_job_late)
        engine.backward(engine(*batch(0)) + 3.0 * model.spare.weight.sum())
        engine.step()
        reads.set()
        (plain(*batch(0)) + 3.0 * plain.spare.weight.sum()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

        engine.backward(engine(*batch(1)))
        assert model.spare.weight.grad is None
        engine.step()
        plain(*batch(1)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert engine.get_global_grad_norm() == norm.item()
    assert_same(model, plain, bitwise=True)


def test_a_closure_is_refused() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine.backward(engine(*batch(0)))
        with pytest.raises(UnsupportedError, match="closure"):
            optimizer.step(lambda: 0.0)
        engine.step()
    assert "step" not in optimizer.__dict__


def test_gradients_that_a_program_uses_again_after_its_step_are_refused() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine(*batch(0)).backward()
        optimizer.step()
        engine(*batch(1)).backward()
        with pytest.raises(
            UnsupportedError, match=r"blocks\.0\.linear\.bias and 15 other parameters .* optimizer\.step\(\)"
        ):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("looks", [True, False], ids=["gradient", "loss"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_loading_a_checkpoint_drops_the_part_of_a_step_that_has_run(
    clip: float | None, looks: bool, tmp_path: Path
) -> None:
    plain, model = net(), net()
    optimizer = adamw(plain.parameters())
    with engine_for(model, adamw, config_of(2, clip)) as engine:

        def steps(*batches: int) -> None:
            for number in batches:
                engine.backward(engine(*batch(number)))
                engine.step()

        steps(0, 1)
        engine.save_checkpoint(tmp_path)
        loss = engine(*batch(2))
        engine.backward(loss)
        found = next(iter(model.parameters())).grad if looks else loss
        assert found is not None and found.abs().sum() > 0
        engine.load_checkpoint(tmp_path)
        steps(3, 4)
        assert {float(state["step"]) for state in engine.optimizer.state.values()} == {2.0}
    for group in ((0, 1), (3, 4)):
        for number in group:
            (plain(*batch(number)) / 2).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, plain, bitwise=True)


def fp16_of_module(act: Any) -> Net:
    """Train two steps of two micro-batches in fp16, some losses of `engine.module`; return the model."""
    model = net()
    fp16 = {"enabled": True, "loss_scale": 256}
    with engine_for(model, adamw, config_of(2, 0.5, fp16=fp16)) as engine:
        for step in range(2):
            for number in range(2):
                inputs, targets = batch(2 * step + number)
                act(engine, number, inputs.half(), targets)
                engine.step()
        assert engine.global_steps == 2 and engine.skipped_steps == 0
    return model


@pytest.mark.parametrize("others", ["all", "first", "second"])
def test_losses_that_the_module_computed_are_scaled_by_backward_in_fp16(others: str) -> None:
    of_module = {"all": (0, 1), "first": (0,), "second": (1,)}[others]

    def mixed(engine: HarmonyEngine, number: int, inputs: Tensor, targets: Tensor) -> None:
        engine.backward((engine.module if number in of_module else engine)(inputs, targets))
        engine.module.head.weight.grad  # noqa: B018 - shown unscaled, and scaled again

    def whole(engine: HarmonyEngine, _number: int, inputs: Tensor, targets: Tensor) -> None:
        engine.backward(engine(inputs, targets))

    assert_same(fp16_of_module(mixed), fp16_of_module(whole), bitwise=False, relative=2e-3)


def test_gradients_are_shown_unscaled_whoever_computed_the_loss() -> None:
    shown = []
    for of_module in (False, True):
        with engine_for(net(), adamw, config_of(1, 0.5, fp16={"enabled": True, "loss_scale": 256})) as engine:
            inputs, targets = batch(0)
            engine.backward((engine.module if of_module else engine)(inputs.half(), targets))
            gradient = engine.module.head.weight.grad
            assert gradient is not None
            shown.append(gradient.clone().float())
    assert torch.allclose(shown[0], shown[1], rtol=1e-2, atol=1e-5)


def test_a_gradient_put_in_the_place_of_a_scaled_one_is_refused_in_fp16() -> None:
    model = net()
    with engine_for(model, adamw, config_of(1, 0.5, fp16={"enabled": True, "loss_scale": 256})) as engine:
        before = weights_of(model)
        inputs, targets = batch(0)
        engine.backward(engine.module(inputs.half(), targets))
        model.head.weight.grad = torch.ones_like(model.head.weight)
        with pytest.raises(UnsupportedError, match="cannot be told from scaled ones"):
            engine.step()
        assert_same(weights_of(model), before, bitwise=True)


class HalfUsed(Net):
    """Has a layer that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_unused_parameters_are_refused_where_the_ds_config_says_so(clip: float | None) -> None:
    zero = {"stage": 2, "ignore_unused_parameters": False}
    model = HalfUsed()
    with engine_for(model, sgd, config_of(2, clip, zero_optimization=zero)) as engine:
        before = weights_of(model)
        with pytest.raises(AssertionError, match=r"not used in producing loss \(unused\.(weight|bias), and 1 more\)"):
            engine.train_batch([batch(0), batch(1)])
        assert_same(weights_of(model), before, bitwise=True)
    for whole, block in ((net(), zero), (HalfUsed(), {**zero, "stage": 3})):
        with engine_for(whole, sgd, config_of(2, clip, zero_optimization=block)) as engine:
            engine.train_batch([batch(0), batch(1)])
            assert engine.was_step_applied()


def test_a_loop_that_calls_the_model_instead_of_the_engine_is_warned_once() -> None:
    model = net()
    with engine_for(model, adamw, config_of(2, None)) as engine:
        model(*batch(0)).backward()
        engine.step()
        model(*batch(1)).backward()
        with pytest.warns(RuntimeWarning, match=r"calls model\(\.\.\.\) instead of engine\(\.\.\.\)"):
            engine.step()
        for index in range(2):
            model(*batch(index)).backward()
            engine.step()
        assert engine.global_steps == 2
        with pytest.raises(RuntimeError, match="no optimizer step has trained on a loss of engine"):
            engine.swap_report()


def test_losses_of_the_model_that_the_engine_propagates_back_from_are_not_warned_of() -> None:
    model = net()
    with engine_for(model, adamw, config_of(2, None)) as engine:
        for index in range(2):
            engine.backward(engine.module(*batch(index)))
            engine.step()
        assert engine.global_steps == 1
