"""Loops that do by hand what an engine does by itself, against plain PyTorch."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds import HarmonyEngine, UnsupportedError
from harmony_ds.utils import safe_get_full_fp32_param
from tests.engine.drive import adamw, config_of, engine_for, sgd, weights_of
from tests.engine.test_parameters import Net, batch, net
from tests.oracle import assert_same

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
def test_gradients_dropped_right_behind_a_step_are_those_of_the_next_one(drop: Any) -> None:
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


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_parameter_that_only_the_users_loss_uses(clip: float | None) -> None:
    plain, model = net(), net()
    for one in (plain, model):
        torch.manual_seed(1)
        one.spare = nn.Linear(3, 3)
    optimizer = adamw(plain.parameters())

    def penalty(one: Any) -> Tensor:
        return 0.1 * sum(p.pow(2).sum() for p in one.spare.parameters())

    with engine_for(model, adamw, config_of(1, clip, {"pack_layers": 1})) as engine:
        for step in range(3):
            engine.backward(engine(*batch(step)) + penalty(model))
            engine.step()
            (plain(*batch(step)) + penalty(plain)).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain, bitwise=True)


class Branches(nn.Module):
    """One of two layers, by a number; an AdamW of it decays weights that have a gradient, if only of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        out: Tensor = self.head(self.branches[branch](x))
        return out


@pytest.mark.parametrize("harmony", [{"pack_layers": 1}, {"pack_layers": 1, "residency": 2}])
def test_gradients_zeroed_in_place_go_on_and_those_that_never_were_do_not(harmony: Any) -> None:
    def train(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer) -> None:
        for step, branch in enumerate((0, 0, 1, 0)):
            optimizer.zero_grad(set_to_none=False)
            call(torch.full((2, 8), 1.0 + step), branch).square().mean().backward()
            if step == 1:
                model.branches[branch].bias.grad = None  # never came
            optimizer.step()

    torch.manual_seed(0)
    plain = Branches()
    model = copy.deepcopy(plain)
    train(plain, plain, adamw(plain.parameters()))
    optimizer = adamw(model.parameters())
    with engine_for(model, lambda _: optimizer, config_of(1, None, harmony)) as engine:
        train(model, engine, optimizer)
    assert_same(model, plain, bitwise=True)


def test_a_hook_on_a_parameter_of_several_calls_is_refused() -> None:
    class Twice(Net):
        def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
            for block in (*self.blocks, *self.blocks):
                inputs = torch.tanh(block(inputs))
            return F.cross_entropy(self.head(inputs), targets)  # type: ignore[arg-type]

    model = Twice()
    model.blocks[0].weight.register_hook(lambda g: g.clamp(-1, 1))
    before = weights_of(model)
    with (
        engine_for(model, adamw, config_of(1)) as engine,
        pytest.raises(UnsupportedError, match=r"blocks\.0\.weight has a hook .* used by 2 layer calls"),
    ):
        engine.train_batch([batch(0)])
    assert_same(model, before, bitwise=True)


def test_a_closure_is_refused() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine.backward(engine(*batch(0)))
        with pytest.raises(UnsupportedError, match="closure"):
            optimizer.step(lambda: 0.0)
        engine.step()
    assert "step" not in optimizer.__dict__


def test_gradients_through_an_engine_by_autograd_grad_or_create_graph_are_refused() -> None:
    model = net()
    inputs, targets = batch(0)
    inputs.requires_grad_()
    with engine_for(model, sgd, config_of(1)) as engine:
        for wanted in (list(model.parameters()), inputs):
            for loss in (engine(inputs, targets), F.cross_entropy(engine(inputs), targets)):
                with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad"):
                    torch.autograd.grad(loss, wanted)
        loss = F.cross_entropy(engine(inputs), targets)
        with pytest.raises(UnsupportedError, match="create_graph"):
            loss.backward(create_graph=True)


def test_gradients_that_a_program_uses_again_behind_its_step_are_refused() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine(*batch(0)).backward()
        optimizer.step()
        engine(*batch(1)).backward()
        with pytest.raises(
            UnsupportedError, match=r"blocks\.0\.bias and 7 other parameters .* behind optimizer\.step\(\)"
        ):
            optimizer.step()


class Remembering(torch.optim.SGD):
    """Keeps the momentum of each parameter in a dictionary of its own."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.momentum: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.momentum.setdefault(parameter, torch.zeros_like(parameter))
                    parameter.sub_(kept.mul_(0.9).add_(parameter.grad), alpha=group["lr"])


def test_an_optimizer_may_keep_things_by_its_parameters_in_bf16() -> None:
    trained = []
    for make in (Remembering, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)):
        model = net().bfloat16()
        config = config_of(1, None, **BF16)
        with engine_for(model, make, config) as engine:
            for step in range(3):
                inputs, targets = batch(step)
                engine.backward(F.cross_entropy(engine(inputs.bfloat16()).float(), targets))
                engine.step()
        trained.append(model)
    assert_same(trained[0], trained[1], bitwise=True)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("looks", [True, False], ids=["gradient", "loss"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_what_had_run_of_a_step_that_loading_a_checkpoint_cuts_off_is_dropped(
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
