"""Every remedy for an error in a run is used, driven through the engine with a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds.distributed import PeerDiverged
from harmony_ds.errors import DoesNotFitError, EngineFailedError, ModelError, PeerFailedError
from harmony_ds.runtime.micro_batch import OffPlanError
from harmony_ds.step import recovery
from harmony_ds.step.call_cuts import CallCuts
from harmony_ds.step.recovery import REMEDIES, ErrorKind, Recovery, Remedy, as_markdown, remedies
from harmony_ds.step.transitions import StepState
from tests.engine.drive import config_of, engine_for, sgd
from tests.step.drive import GIB, Before, Drive, Tiny

K = ErrorKind
ERRORS: dict[ErrorKind, Callable[[], BaseException]] = {
    K.USER_ERROR: lambda: ValueError("the model's own"),
    K.OFF_PLAN: OffPlanError,
    K.NO_PLAN: lambda: DoesNotFitError("too many bytes"),
    K.OUT_OF_MEMORY: lambda: torch.OutOfMemoryError("out of memory"),
    K.PEER_DIVERGED: lambda: PeerDiverged("another process"),
    K.PEER_FAILED: lambda: PeerFailedError(1, "has ended"),
}
"""What a forward pass raises, or a plan for it; an update that failed is no error of a forward pass."""
AGAIN = ("measure_again", "plan_for_less")
RUNS = ("alone", "at the boundary")


def is_possible(kind: ErrorKind, remedy: Remedy, run: str) -> bool:
    if run == "at the boundary":
        return remedy.action.__name__ != "refuse_another_forward"
    followed = [one.action.__name__ for one in REMEDIES[kind]]  # after a forward pass alone no later remedy is reached
    return "refuse_another_forward" not in followed[: followed.index(remedy.action.__name__)]


CASES = [(kind, remedy, run) for (kind, remedy), run in product(remedies(), RUNS) if is_possible(kind, remedy, run)]


def prepare(drive: Drive, kind: ErrorKind, remedy: Remedy, run: str) -> None:
    """Let the conditions of the remedy hold, and those of the ones before it not."""
    if remedy.action.__name__ == "refuse_another_forward":
        drive.several_processes()
    elif remedy.action.__name__ == "refuse_another_attempt":
        drive.patch.setattr(recovery, "MOST_ATTEMPTS", 1)
    elif remedy.action.__name__ == "plan_for_less":
        drive.engine._state.device.budget_bytes = GIB
    elif kind is K.NO_PLAN and remedy.action.__name__ == "raise_error":
        drive.patch.setattr(CallCuts, "may_change", False)
    elif run == "at the boundary" and remedy.action.__name__ not in AGAIN and kind in (K.OFF_PLAN, K.PEER_DIVERGED):
        drive.another_has_read()


@pytest.mark.parametrize(
    ("kind", "remedy", "run"), CASES, ids=[f"{k.name}-{r.action.__name__}-{run}" for k, r, run in CASES]
)
@pytest.mark.parametrize("before", list(Before))
@pytest.mark.filterwarnings("ignore")
def test_a_remedy_is_used(
    kind: ErrorKind, remedy: Remedy, run: str, before: Before, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[ErrorKind, Remedy]] = []
    choose = Recovery._remedy

    def record(recovery: Recovery, kind: ErrorKind) -> Remedy:
        chosen = choose(recovery, kind)
        used.append((kind, chosen))
        return chosen

    monkeypatch.setattr(Recovery, "_remedy", record)
    with engine_for(Tiny(), sgd, config_of(1)) as engine, monkeypatch.context() as patch, suppress(EngineFailedError):
        drive = Drive(engine, patch)
        drive.come_to(before)
        step = drive.step
        prepare(drive, kind, remedy, run)
        error = ERRORS[kind]() if kind in ERRORS else None
        if run == "alone":
            drive.fail_alone(error)
        else:
            drive.fail_at_boundary(error)
        assert (kind, remedy) in used
        if run == "alone":
            assert step.is_open and len(step.micro_batches) == (1 if before is Before.NOTHING else 2)
        elif remedy.action.__name__ in AGAIN:
            assert step.state is StepState.UPDATING
        else:
            assert step.state is StepState.FAILED and not step.micro_batches
            assert engine.usable is (remedy.action.__name__ != "give_up")


def test_every_kind_of_error_has_a_remedy() -> None:
    assert set(REMEDIES) == set(ErrorKind)
    for row in REMEDIES.values():
        assert [one.when is None for one in row] == [False] * (len(row) - 1) + [True]


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert as_markdown() in page, "run python -m harmony_ds.step, and put what it prints there"


def fail_in_runs(drive: Drive, troubles: list[BaseException]) -> None:
    """Let the next runs fail by `troubles`, the last one first, and what is measured in between not."""
    executor = drive.step.context.executor
    run = executor.run

    def failing(*arguments: Any) -> None:
        if troubles:
            raise troubles.pop()
        run(*arguments)

    drive.patch.setattr(executor, "run", failing)


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """An engine with a queued micro-batch and a budget, which makes a run three times at most."""
    monkeypatch.setattr(recovery, "MOST_ATTEMPTS", 3)
    with engine_for(Tiny(), sgd, config_of(1)) as engine:
        drive = Drive(engine, monkeypatch)
        drive.come_to(Before.NOTHING)
        engine._state.device.budget_bytes = GIB
        yield drive


def test_runs_for_less_memory_do_not_count_among_those_that_measure_anew(queued: Drive) -> None:
    out_of_memory = [torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError("out of memory")]
    troubles = [OffPlanError(), OffPlanError(), *out_of_memory]
    fail_in_runs(queued, troubles)
    queued.boundary()
    assert not troubles and queued.engine.global_steps == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [(OffPlanError, "measured and run 3 times"), (lambda: torch.OutOfMemoryError("the third"), "the third")],
    ids=["another way", "out of memory"],
)
def test_what_comes_in_each_run_is_raised_in_the_last(
    error: Callable[[], BaseException], said: str, queued: Drive
) -> None:
    troubles = [error() for _ in range(4)]
    fail_in_runs(queued, troubles)
    with pytest.raises((ModelError, torch.OutOfMemoryError), match=said):
        queued.boundary()
    assert len(troubles) == 1
