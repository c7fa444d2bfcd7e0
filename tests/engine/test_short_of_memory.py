"""A device that turns out smaller than planned in the middle of a step: the step is undone and run again with less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from harmony_ds import EngineFailedError, HarmonyEngine
from harmony_ds.device.cpu import CpuDevice
from harmony_ds.device.group import DeviceGroup
from harmony_ds.errors import UnsupportedError
from harmony_ds.optim.user_gradients import UserGradients
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.micro_batch import OffPlanError
from harmony_ds.scheduler.plan import Task, TaskKind
from harmony_ds.step.planner import Planner
from harmony_ds.utils import safe_get_full_grad
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, train_groups, weights_of
from tests.inside import assembly_of

pytestmark = pytest.mark.fixed_times

K = TaskKind
MICRO_BATCHES = 4
LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, MICRO_BATCHES)
COUNTS = {
    K.SWAP_IN: 3,
    K.FORWARD: 4,
    K.FUSED: 4,
    K.BACKWARD: 8,
    K.EVICT: 3,
    K.SWAP_OUT: 2,
    K.FREE_GRADIENTS: 2,
    K.NORM: 1,
}
PLACES = [(kind, number) for kind, count in COUNTS.items() for number in range(count)]


class ShrinkingDevice(CpuDevice):
    """Has less memory than its budget from some moment on."""

    limit: int | None = None

    def available_bytes(self) -> int | None:
        return self.limit

    def charge(self, nbytes: int, what: str) -> None:
        if self.limit is not None and self.allocated_bytes() + nbytes > self.limit:
            raise torch.OutOfMemoryError(f"{self.allocated_bytes() + nbytes} bytes, and there are {self.limit}")
        super().charge(nbytes, what)


@cache
def undisturbed() -> tuple[dict[str, Any], list[float]]:
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(MICRO_BATCHES, 0.5)) as engine:
        losses = train_groups(engine, GROUPS)
    return weights_of(model), losses


@cache
def most_bytes() -> int:
    """Return the peak of a plan that has all the memory it wants."""
    config = config_of(MICRO_BATCHES, 0.5, {"residency": "off"})
    with engine_for(LLAMA.build(0.1), adamw, config, device=CpuDevice(2**30)) as engine:
        train_groups(engine, GROUPS[:1])
        assert engine.plan is not None
        return engine.plan.peak_bytes


@contextmanager
def shrinking(
    engine: HarmonyEngine, kind: TaskKind, number: int, members: list[ShrinkingDevice], share: float = 0.4
) -> Iterator[list[int]]:
    """While open, the devices have a share of `most_bytes` from task `number` of `kind` on; yields how many of them ran."""
    handlers = assembly_of(engine).executor._handlers
    handle, ran = handlers[kind], [0]

    def handler(task: Task) -> None:
        ran[0] += 1
        if ran[0] == number + 1:
            for member in members:
                member.limit = int(share * most_bytes())
        return handle(task)

    handlers[kind] = handler
    yield ran
    handlers[kind] = handle


@contextmanager
def engine_of(
    count: int, clip: float | None = 0.5, **harmony: Any
) -> Iterator[tuple[HarmonyEngine, list[ShrinkingDevice]]]:
    """An engine on so many devices with 0.6 of `most_bytes` each: some packs, and many tasks."""
    members = [ShrinkingDevice(most_bytes() * 3 // 5) for _ in range(count)]
    device = members[0] if count == 1 else DeviceGroup(members)
    config = config_of(MICRO_BATCHES, clip, {"residency": "off", "devices": count, **harmony})
    with engine_for(LLAMA.build(0.1), adamw, config, device=device) as engine:
        yield engine, members


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("kind", "number"), PLACES)
def test_the_step_is_run_again_with_a_smaller_plan(
    kind: TaskKind, number: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(count) as (engine, members):
        losses = train_groups(engine, GROUPS[:1])
        with shrinking(engine, kind, number, members) as ran:
            losses += train_groups(engine, GROUPS[1:2])
        assert ran[0] > number
        losses += train_groups(engine, GROUPS[2:])
        assert max(engine.memory_report().device_peaks) <= most_bytes() * 2 // 5
        assert "out of memory in the middle of a step" in caplog.text
        weights = weights_of(engine.module)
    expected, expected_losses = undisturbed()
    assert losses == expected_losses
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_micro_batches_that_are_alike_are_measured_once_for_the_smaller_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Sample] = []
    own = Planner.measure

    def measure(self: Planner, sample: Sample) -> tuple[int, ...]:
        measured.append(sample)
        return own(self, sample)

    alike = [GROUPS[0][0]] * MICRO_BATCHES
    with engine_of(1) as (engine, members):
        train_groups(engine, [alike])
        monkeypatch.setattr(Planner, "measure", measure)
        with shrinking(engine, K.BACKWARD, 1, members):
            train_groups(engine, [alike])
    assert len(measured) == 1


def test_where_weights_were_updated_already_the_error_comes_up_and_the_engine_says_so() -> None:
    with engine_of(1, clip=None) as (engine, members):
        train_groups(engine, GROUPS[:1])
        with (
            shrinking(engine, K.BACKWARD, 4, members, share=0.0),
            pytest.raises(torch.OutOfMemoryError, match="there are"),
        ):
            train_groups(engine, GROUPS[1:2])
        with pytest.raises(EngineFailedError, match="its updates had begun"):
            train_groups(engine, GROUPS[2:])


def test_where_no_smaller_plan_fits_the_error_comes_up_and_nothing_has_changed() -> None:
    with engine_of(1, pack_layers=100, stash="device", device_memory_gib=None) as (engine, members):
        members[0].budget_bytes = 2 * most_bytes()
        train_groups(engine, GROUPS[:1])
        before = {name: tensor.clone() for name, tensor in weights_of(engine.module).items()}
        with shrinking(engine, K.FUSED, 1, members), pytest.raises(torch.OutOfMemoryError, match="there are"):
            train_groups(engine, GROUPS[1:2])
        members[0].limit = None
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine.module).items())
        train_groups(engine, GROUPS[1:])


def with_own_gradients(engine: HarmonyEngine) -> None:
    """Come to the boundary of a group, with gradients of the program's own beside its."""
    train_groups(engine, GROUPS[:1])
    for index, batch in enumerate(GROUPS[1]):
        engine.backward(engine(**batch).loss)
        if index + 1 < MICRO_BATCHES:
            engine.step()
    engine.module.lm_head.weight.sum().backward()


def test_gradients_of_the_programs_own_are_not_lost() -> None:
    found = []
    for shrinks in (False, True):
        with engine_of(1) as (engine, members):
            with_own_gradients(engine)
            with shrinking(engine, K.FUSED, 1, members if shrinks else []) as ran:
                engine.step()
            assert (ran[0] > COUNTS[K.FUSED]) is shrinks
            found.append(weights_of(engine.module))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_step_whose_accumulated_gradients_are_lost_is_not_run_again() -> None:
    """Undoing a backward pass drops the gradients that had accumulated before: the rest alone would be another step."""
    with engine_of(1) as (engine, members):
        train_groups(engine, GROUPS[:1])
        before = {name: tensor.clone() for name, tensor in weights_of(engine.module).items()}
        for index, batch in enumerate(GROUPS[1]):
            engine.backward(engine(**batch).loss)
            if index == 0:
                assert safe_get_full_grad(engine.module.lm_head.weight) is not None
            if index + 1 < MICRO_BATCHES:
                engine.step()
        with shrinking(engine, K.BACKWARD, 1, members) as ran, pytest.raises(torch.OutOfMemoryError, match="there are"):
            engine.step()
        assert ran[0] > 1
        members[0].limit = None
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine.module).items())
        train_groups(engine, GROUPS[1:])
        weights = weights_of(engine.module)
    assert all(torch.equal(weights[name], tensor) for name, tensor in undisturbed()[0].items())


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (torch.OutOfMemoryError, torch.OutOfMemoryError, r"after \['lm_head.weight'\]"),
        (OffPlanError, UnsupportedError, "has used gradients of the program's own backward passes"),
    ],
    ids=["out of memory", "off plan"],
)
def test_a_step_that_has_taken_gradients_of_the_programs_own_is_not_run_again(
    error: type[Exception], raised: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pop = UserGradients.pop

    def pop_and_fail(self: UserGradients, names: Iterable[str]) -> dict[str, torch.Tensor]:
        if popped := pop(self, names):
            raise error(f"after {list(popped)}")
        return popped

    monkeypatch.setattr(UserGradients, "pop", pop_and_fail)
    with engine_of(1) as (engine, _):
        with_own_gradients(engine)
        with pytest.raises(raised, match=message):
            engine.step()
