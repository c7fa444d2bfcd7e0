"""A failure surfaces as itself in the caller, leaves no thread running, and the engine says truly whether it can go on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds import EngineFailedError, HarmonyEngine
from harmony_ds.config.ablations import ABLATIONS
from harmony_ds.step.plan_composer import PlanComposer
from tests.cover import pairs
from tests.engine.drive import (
    adamw,
    config_of,
    engine_for,
    groups_of,
    lanes,
    loop,
    means_of,
    plainly,
    train_groups,
    weights_of,
)
from tests.engine.failing import LLAMA, Mishap, Trap, trapped_llama, unwrapped
from tests.families import Batch
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

GROUPS = groups_of(LLAMA, 3, 4)


def run(engine: HarmonyEngine, way: str, group: list[Batch]) -> None:
    if way == "train_batch":
        engine.train_batch(iter(group))
    else:
        loop(engine, [group])


FAILURES: dict[str, Callable[[int], Trap]] = {
    "exception": Trap,
    "interrupt": lambda at: Trap(at, KeyboardInterrupt()),
    "signal": lambda at: Trap(at, act=lambda: signal.raise_signal(signal.SIGINT)),
}


SETTINGS = [{"residency": 4}, {"residency": 0}, dict(ABLATIONS[-1].harmony)]
PLACES = [("backward", 2), ("forward", 0), ("forward", 2), ("forward", 5), ("backward", 0)]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    """The weights of plain PyTorch after all groups."""
    return weights_of(plainly(LLAMA, 0.1, GROUPS, adamw, 0.5)[0])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which it does not install where a shell's background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("place", "kind", "way", "harmony"), pairs(PLACES, list(FAILURES), ("train_batch", "loop"), SETTINGS), ids=str
)
def test_a_failed_step_changes_nothing(
    place: tuple[str, int], kind: str, way: str, harmony: dict[str, Any], undisturbed: dict[str, Tensor]
) -> None:
    """Clipping on: no layer is updated before all is known, so the engine is usable whatever failed."""
    where, at = place
    trap = FAILURES[kind](at)
    model = trapped_llama(trap, where)
    with engine_for(model, adamw, config_of(4, 0.5, {"pack_layers": 1, **harmony})) as engine:
        train_groups(engine, GROUPS[:1])
        ratio = engine.swap_report().ratio
        trap.arm()
        expected = Mishap if kind == "exception" else KeyboardInterrupt
        with pytest.raises(expected) as caught:
            run(engine, way, GROUPS[1])
        if kind != "signal":
            assert caught.value is trap.failure
        trap.left = None
        assert lanes() == []
        assert engine.usable
        assert engine.global_steps == 1
        restart(engine)
        run(engine, way, GROUPS[1])
        assert engine.swap_report().ratio == ratio == (4.0 if "grouping" in harmony else 1.0)  # no byte of what failed
        train_groups(engine, GROUPS[2:])
    assert_same(unwrapped(model), undisturbed, bitwise=True)


def restart(engine: HarmonyEngine) -> None:
    """The loop starts over at the first micro-batch of the group that failed."""
    engine.micro_steps = 4


def test_the_loop_can_start_the_failed_group_over() -> None:
    trap = Trap(2)
    with engine_for(trapped_llama(trap, "forward"), adamw, config_of(4, 0.5)) as engine:
        loop(engine, GROUPS[:1])
        trap.arm()
        with pytest.raises(Mishap):
            loop(engine, GROUPS[1:2])
        loop(engine, GROUPS[1:2])
        assert (engine.global_steps, engine.micro_steps) == (2, 8)


@pytest.mark.parametrize("residency", [0, 4])
@pytest.mark.parametrize(("where", "at"), [("forward", 3), ("backward", 0)])
def test_without_clipping_a_failure_after_an_early_update_ends_the_engine(where: str, at: int, residency: int) -> None:
    """The last packs have been updated when the trapped layer is propagated through, and none when it fails forward."""
    plain, _ = plainly(LLAMA, 0.1, GROUPS[:2], adamw)
    trap = Trap(at)
    model = trapped_llama(trap, where)
    with engine_for(model, adamw, config_of(4, None, {"pack_layers": 1, "residency": residency})) as engine:
        train_groups(engine, GROUPS[:1])
        trap.arm()
        with pytest.raises(Mishap):
            engine.train_batch(iter(GROUPS[1]))
        assert lanes() == []
        assert engine.usable is (where == "forward")
        if where == "backward":
            with pytest.raises(EngineFailedError, match="cannot go on"):
                engine.train_batch(iter(GROUPS[1]))
            return
        train_groups(engine, GROUPS[1:2])
    assert_same(unwrapped(model), weights_of(plain), bitwise=True)


def test_a_failure_before_anything_of_a_step_runs_is_not_taken_for_one_of_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, _ = plainly(LLAMA, 0.1, GROUPS[:2], adamw)
    trap = Trap(0)
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(4, None, {"pack_layers": 1})) as engine:
        train_groups(engine, GROUPS[:1])
        trap.arm()
        with monkeypatch.context() as patch:
            patch.setattr(PlanComposer, "forward", lambda *_: trap.spring())
            loss = engine(**GROUPS[1][0]).loss
            with pytest.warns(RuntimeWarning, match="before"), pytest.raises(Mishap):
                loss.item()
        assert engine.usable
        engine.backward(loss)
        engine.step()
        loop(engine, [GROUPS[1][1:]])
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_failure_while_measuring(clip: float | None) -> None:
    plain, losses = plainly(LLAMA, 0.1, GROUPS, adamw, clip)
    trap = Trap(0)
    model = trapped_llama(trap, "forward")
    with engine_for(model, adamw, config_of(4, clip)) as engine:
        trap.arm()
        with pytest.raises(Mishap):
            engine.train_batch(iter(GROUPS[0]))
        trap.left = None  # what measuring did to the model's objects is undone
        assert engine.usable
        assert train_groups(engine, GROUPS) == means_of(losses)
    assert_same(unwrapped(model), weights_of(plain), bitwise=True)


def test_a_failure_in_the_users_loss() -> None:
    plain, _ = plainly(LLAMA, 0.1, GROUPS, adamw)
    trap = Trap(2)

    def loss_of(outputs: Any) -> Tensor:
        trap.spring()
        loss: Tensor = outputs.loss
        return loss

    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(4)) as engine:
        engine.train_batch(iter(GROUPS[0]), loss_fn=loss_of)
        trap.arm()
        with pytest.raises(Mishap) as caught:
            engine.train_batch(iter(GROUPS[1]), loss_fn=loss_of)
        assert caught.value is trap.failure
        assert lanes() == []
        assert engine.usable
        for group in GROUPS[1:]:
            engine.train_batch(iter(group), loss_fn=loss_of)
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize(("accumulation", "micro_batch"), [(1, "config"), (2, "config"), (2, 4)])
def test_a_loss_that_no_weight_leads_to_is_torchs_error(accumulation: int, micro_batch: Any) -> None:
    class Net(nn.Sequential):
        detaches = False

        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x).square().mean()
            return loss.detach() if self.detaches else loss

    model = Net(nn.Linear(4, 4), nn.Linear(4, 4))
    config = config_of(accumulation, None, {"pack_layers": 1, "micro_batch": micro_batch})
    with engine_for(model, adamw, config) as engine:
        for model.detaches in (False, True, False):
            before = weights_of(model)
            for number in range(accumulation):
                engine.backward(engine(torch.ones(2, 4)))
                if not model.detaches or number < accumulation - 1:
                    engine.step()
                    continue
                with pytest.raises(RuntimeError, match="does not require grad"):
                    engine.step()
                assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


def test_a_failure_in_the_data_iterator() -> None:
    plain, _ = plainly(LLAMA, 0.1, GROUPS, adamw, 0.5)
    failure = Mishap("no more data")

    def broken() -> Iterator[Batch]:
        yield GROUPS[1][0]
        raise failure

    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(4, 0.5)) as engine:
        train_groups(engine, GROUPS[:1])
        with pytest.raises(Mishap) as caught:
            engine.train_batch(broken())
        assert caught.value is failure
        train_groups(engine, GROUPS[1:])
    assert_same(model, plain, bitwise=True)


class FailingSGD(torch.optim.SGD):
    elementwise = True
    failure: BaseException | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if FailingSGD.failure is not None:
            raise FailingSGD.failure
        super().step(closure)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_failure_in_the_optimizer_surfaces_in_the_caller(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = LLAMA.build(0.0), updating()
    failure = Mishap("the optimizer broke")
    config = config_of(4, clip, {"pack_layers": 1})
    engine, *_ = harmony_ds.initialize(model=model, optimizer=FailingSGD(model.parameters(), lr=0.01), config=config)
    train_groups(engine, GROUPS[:1])
    engine.finish_updates()
    monkeypatch.setattr(FailingSGD, "failure", failure)

    def until_it_surfaces() -> None:
        engine.train_batch(iter(GROUPS[1]))
        while engine.usable:  # the background thread gets there before the next call
            time.sleep(0.001)
        engine.train_batch(iter(GROUPS[2]))

    with pytest.raises(Mishap) as caught:
        until_it_surfaces()
    assert caught.value is failure
    assert lanes() == []
    assert not engine.usable
    with pytest.raises(EngineFailedError):
        engine.train_batch(iter(GROUPS[2]))
    engine.destroy()
    assert updating() <= before  # other engines of the process may be alive
    assert torch.isfinite(model(**GROUPS[0][0]).loss)


def updating() -> set[threading.Thread]:
    """Engines' threads."""
    return {thread for thread in threading.enumerate() if thread.name == "harmony-update"}


def with_hook(engine: HarmonyEngine, before: bool, part: int | None) -> Callable[[], None]:
    """Let a hook on the optimizer's step raise a Mishap; return what removes it. `part`: of a chain of optimizers."""
    optimizer = engine.optimizer if part is None else engine.optimizer.parts[part]

    def raising(*_: Any) -> None:
        raise Mishap

    register = optimizer.register_step_pre_hook if before else optimizer.register_step_post_hook
    return register(raising).remove


def halves(parameters: Any) -> list[torch.optim.Optimizer]:
    both = list(parameters)
    return [torch.optim.AdamW(both[:3], lr=1e-2), torch.optim.SGD(both[3:], lr=1e-2)]


@pytest.mark.parametrize(
    ("make", "before", "part", "goes_on"),
    [
        (adamw, True, None, True),
        (adamw, False, None, False),
        (halves, True, None, True),
        (halves, True, 0, True),
        (halves, True, 1, False),  # the first optimizer has stepped
    ],
    ids=["before", "after", "before a chain", "before its first", "before its second"],
)
def test_a_hook_that_raises_before_the_optimizer_steps_changes_nothing(
    make: Callable[[Any], Any], before: bool, part: int | None, goes_on: bool
) -> None:
    def trained(fails: bool) -> dict[str, Tensor]:
        model = LLAMA.build(0.1)
        with engine_for(model, make, config_of(4, 0.5)) as engine:
            train_groups(engine, GROUPS[:1])
            if fails:
                weights = weights_of(model)
                remove = with_hook(engine, before, part)
                with pytest.raises(Mishap):
                    engine.train_batch(iter(GROUPS[1]))
                remove()
                assert engine.usable is goes_on
                if not goes_on:
                    with pytest.raises(EngineFailedError, match="its updates had begun"):
                        engine.train_batch(iter(GROUPS[1]))
                    return {}
                assert_same(model, weights, bitwise=True)
            train_groups(engine, GROUPS[1:])
        return weights_of(model)

    found = trained(fails=True)
    if goes_on:
        expected = trained(fails=False)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
