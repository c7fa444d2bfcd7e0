"""Collections within a step go through what was made lately, those between steps through everything."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from harmony_ds.runtime.garbage import StepCollections, collection_within_steps, no_collections
from tests.engine.drive import config_of, engine_for, sgd


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """The tests' process has frozen what it began with (see conftest.py)."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    callbacks = list(gc.callbacks)
    yield
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    if frozen:
        gc.freeze()


class Cycle:
    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.me = self
        self.tensor = tensor


def test_within_a_step_new_garbage_is_collected_and_old_garbage_waits() -> None:
    gc.collect()
    gc.disable()
    try:
        old = Cycle()
        seen = weakref.ref(old)
        collections = StepCollections()
        with collections.step():
            new = weakref.ref(Cycle())
            del old
            gc.collect()
            assert new() is None
            assert seen() is not None
        gc.collect()
        assert seen() is None
    finally:
        gc.enable()


def test_garbage_that_is_there_when_objects_are_frozen_is_collected_before() -> None:
    gc.disable()
    try:
        garbage = weakref.ref(Cycle())
        with StepCollections().step():
            assert garbage() is None
    finally:
        gc.enable()


def test_a_collection_between_steps_goes_through_everything_also_after_an_error() -> None:
    collections = StepCollections()
    seen = []

    @collections.step()
    def fail() -> None:
        seen.append(gc.get_freeze_count())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen[0]
    gc.collect()
    assert not gc.get_freeze_count()
    with collections.step():
        assert gc.get_freeze_count()


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with collection_within_steps()():
        pass
    gc.collect()
    assert gc.get_freeze_count()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.real_collections
@pytest.mark.parametrize("dies", ["before the step", "after the step", "after three steps"])
def test_memory_stays_level_where_every_iteration_leaves_a_cycle_with_a_large_tensor(dies: str) -> None:
    living: set[int] = set()
    most = 0
    kept: list[Cycle | None] = [None] * {"before the step": 0, "after the step": 1, "after three steps": 3}[dies]
    with engine_for(Small(), sgd, config_of(1)) as engine:
        for number in range(200):
            tensor = torch.empty(10_000)
            living.add(number)
            weakref.finalize(tensor, living.discard, number)
            kept = [*kept, Cycle(tensor)][1:] if kept else kept
            if not kept:
                Cycle(tensor)
            del tensor
            engine.train_batch([torch.ones(2, 3)])
            most = max(most, len(living))
    assert most <= 30, f"{most} tensors were alive at once"


@pytest.mark.parametrize("collects", [True, False])
def test_python_looks_for_garbage_again_after_a_search_if_it_did_before(collects: bool) -> None:
    did = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
    finally:
        (gc.enable if did else gc.disable)()
