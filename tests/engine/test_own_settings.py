"""Settings that the code of a micro-batch makes on modules are its own, while it waits and when layers are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import UnsupportedError
from harmony_ds.runtime.executor import Executor
from tests.engine.drive import config_of, engine_for, loop_plainly, loop_with, weights_of
from tests.exactness.cases_adapters import Adapted, PolicyFirst, Stack, TakenBack, inputs, left_by
from tests.families import build_seeded
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

WIDTH, ACCUMULATION = 8, 3
PLANS: list[dict[str, Any]] = [{"pack_layers": 1}, {"pack_layers": 2}, {"device_memory_gib": 0.001}, {}]
plans = pytest.mark.parametrize("plan", PLANS, ids=str)


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def steps_of(count: int, make: Callable[[int], Tensor] = inputs) -> list[list[Tensor]]:
    return [[make(step * ACCUMULATION + number) for number in range(ACCUMULATION)] for step in range(count)]


def plainly(build: Callable[[], Stack], steps: list[list[Tensor]]) -> Stack:
    model = build_seeded(build)
    batches = [x for group in steps for x in group]
    loop_plainly(model, batches, ACCUMULATION, lambda call, x: call(x), sgd, seeded=True)
    return model


class Later(Stack):
    """Sets something once its data says so, which measuring has not seen."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] < 90:
            return self.body(x).mean()
        before = self.set_adapter("b", flags=False)
        loss = self.body(x).mean()
        self.set_adapter(before, flags=False)
        return loss


def later(index: int) -> Tensor:
    x = inputs(index)
    if index in (4, 8):  # in the middle and at the end of a step
        x[0, 0] = 91.0 + index
    return x


class LeftLater(Stack):
    """Sets something else late, and leaves it so; the next micro-batch sets it again."""

    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("b" if x[0, 0] > 90 else "a", flags=False)
        loss = self.body(x).mean()
        self.is_late = bool(x[0, 0] > 90)
        return loss


class LeftAtTheEndLater(Stack):
    """Leaves its layers, late and after their last calls, in a mode that the next forward pass takes back."""

    above, left = 90, slice(None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.disabled = False
        loss = self.body(x).mean()
        for layer in self.layers[self.left]:
            layer.disabled = bool(x[0, 0] > self.above)
        return loss


class LeftByTheLast(LeftAtTheEndLater):
    """The same of the first layer, in the last micro-batch of a step alone."""

    above, left = 97, slice(1)


class LeftAtTheEndOfTwo(LeftAtTheEndLater):
    """The same with an adapter for each micro-batch, which measuring has seen."""

    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("a" if x[0, 1] > 0.5 else "b", flags=False)
        return super().forward(x)


class CountingLater(Stack):
    """A layer that counts the rows of some calls."""

    class Counting(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.rows = 0

        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 90:
                self.rows += len(x)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = self.Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


@pytest.mark.parametrize("by_loop", [False, True])
@pytest.mark.parametrize(
    "build",
    [Later, LeftLater, LeftAtTheEndLater, LeftByTheLast, LeftAtTheEndOfTwo, CountingLater],
    ids=lambda build: build.__name__,
)
@plans
def test_what_is_set_first_in_a_later_step_is_as_in_plain_training(
    build: type[Stack], plan: dict[str, Any], by_loop: bool
) -> None:
    steps = steps_of(4, later)
    plain, model = plainly(build, steps), build_seeded(build)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, plan)) as engine:
        for group in steps:
            if by_loop:
                loop_with(engine, group, lambda call, x: call(x))
            else:
                engine.train_batch(group)
        assert engine.swap_report().ratio <= 1.0  # unused adapters have no gradients
        assert_same(weights_of(model), weights_of(plain), bitwise=True)
        assert torch.equal(left_by(model), left_by(plain))


def test_it_is_joined_with_its_likes() -> None:
    plain, model = plainly(TakenBack, steps_of(2)), build_seeded(TakenBack)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1, "micro_batch": 6})) as engine:
        for group in steps_of(2):
            engine.train_batch(group)
        for name, weight in weights_of(plain).items():
            torch.testing.assert_close(weights_of(model)[name], weight, rtol=1e-5, atol=1e-6)


class FrozenReference(Stack):
    """The other adapter is not trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.adapters["b"].requires_grad_(False)


class Thawed(FrozenReference):
    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("b")
        return self.body(x).mean()


class ThawedWithoutGradients(FrozenReference, PolicyFirst):
    pass


def test_a_reference_that_is_not_trained_is_switched_to_without_gradients() -> None:
    plain, model = plainly(ThawedWithoutGradients, steps_of(2)), build_seeded(ThawedWithoutGradients)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        for group in steps_of(2):
            engine.train_batch(group)
        assert_same(weights_of(model), weights_of(plain), bitwise=True)


def test_gradients_of_what_is_not_trained_are_refused_by_name() -> None:
    model = build_seeded(Thawed)
    before = weights_of(model)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        with pytest.raises(UnsupportedError, match=r"layers\.\d\.adapters\.b\.\w+, which is not trained"):
            engine.train_batch(*steps_of(1))
        engine.finish_updates()
        assert_same(weights_of(model), before, bitwise=True)


def test_an_error_leaves_settings_as_they_were() -> None:
    class Failing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.set_adapter("b")
            if x[0, 0] > 90:
                raise ValueError("too large")
            loss = self.body(x).mean()
            self.set_adapter("a")
            return loss

    model = build_seeded(Failing)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        engine.train_batch(*steps_of(1))
        with pytest.raises(ValueError, match="too large"):
            engine.train_batch([later(number) for number in (3, 4, 5)])
        assert all(layer.active == ["a"] for layer in model.layers)


def test_a_loop_switches_to_a_reference_that_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's call waits while the reference runs at once, without gradients."""

    def loss_of(call: Any, model: Stack, x: Tensor) -> Tensor:
        policy = call(x)
        with torch.no_grad():
            before = model.set_adapter("b")
            reference = call(x)
            model.set_adapter(before)
        return (policy - reference).square().mean()

    class Body(FrozenReference):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    plain, model = build_seeded(Body), build_seeded(Body)
    optimizer = sgd(p for p in plain.parameters() if p.requires_grad)
    for number in range(ACCUMULATION):
        (loss_of(plain, plain, inputs(number)) / ACCUMULATION).backward()
    optimizer.step()
    runs = []
    run = Executor.run
    monkeypatch.setattr(Executor, "run", lambda *args, **kwargs: runs.append(args) or run(*args, **kwargs))
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        for number in range(ACCUMULATION):
            engine.backward(loss_of(engine, model, inputs(number)))
            engine.step()
        assert len(runs) == 1
        assert_same(weights_of(model), weights_of(plain), bitwise=True)


class OtherwiseInEvaluation(Stack):
    """Uses the other adapter where it is evaluated, which is not measured again."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.set_adapter("a" if self.training else "b", flags=False)
        loss = self.body(x).mean()
        self.set_adapter(before, flags=False)
        return loss


def test_evaluation_has_settings_of_its_own() -> None:
    model = build_seeded(OtherwiseInEvaluation)
    batches = [inputs(number) for number in range(ACCUMULATION)]
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        engine.train_batch(batches)
        engine.eval()
        found = engine.eval_batch(iter(batches))
    with torch.no_grad():
        assert found.item() == torch.stack([model(batch) for batch in batches]).mean().item()


class Outside(Stack):
    """Freezes a parameter that it uses between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.requires_grad_(bool(x[0, 0] > 0))
        return (self.body(x) * self.scale).mean()


def test_to_freeze_what_code_between_layers_uses_is_refused_by_name() -> None:
    assert len({bool(inputs(number)[0, 0] > 0) for number in range(ACCUMULATION)}) == 2
    with (
        engine_for(build_seeded(Outside), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine,
        pytest.raises(UnsupportedError, match="forward sets requires_grad of scale"),
    ):
        engine.train_batch(*steps_of(1))
