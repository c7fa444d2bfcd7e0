"""The recorder of device allocations: it sees what the engine has planned; and its replay in the allocator's model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.allocator.case import Case, Recording, answer, record
from benchmarks.allocator.events import Allocated, Event, Freed, PoolFilled, Refused, StepBegun, TaskDone, Used
from benchmarks.allocator.replay import STEPS, WORKSPACES, Pools, replay
from harmony_ds.device.base import Stream
from harmony_ds.scheduler.caching_allocator import CachingAllocator
from harmony_ds.scheduler.replay import Replay

MIB = 2**20
MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "llama-7m.json"


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(MODEL, rows=2, accumulation=3, sequence=256, cap_gib=0.22, ragged=True, clip=1.0)


@pytest.fixture(scope="module")
def recording(case: Case) -> Recording:
    return record(case)


def test_an_engine_allocates_what_it_has_planned(recording: Recording) -> None:
    allocated = replay(recording.events, None, expandable=True, pools=Pools.ENGINE).allocated_peak_bytes
    in_plan = allocated - sum(WORKSPACES)
    assert 0.9 * recording.planned_peak_bytes < in_plan <= recording.planned_peak_bytes


@pytest.mark.parametrize("harmony", [{}, {"stash": "host", "residency": "off"}, {"micro_batch": 1}])
def test_planning_replays_what_the_engine_allocates(harmony: dict[str, Any]) -> None:
    """As far as the fullest moment shows it; and the plan that was found needs no retry."""
    case = Case(MODEL, rows=2, accumulation=3, sequence=256, cap_gib=0.22, harmony=harmony)
    found = record(case)
    in_engine = replay(found.events, None, expandable=True, pools=Pools.ENGINE)
    allocator = CachingAllocator(expandable=True)
    for nbytes in WORKSPACES:
        allocator.malloc(nbytes, "compute")
    planned = Replay(found.plan, found.costs, allocator)
    planned.load_resident()
    for _ in range(STEPS):
        allocator.stats.reset()
        planned.step()
    assert allocator.stats.allocated_peak_bytes == pytest.approx(in_engine.allocated_peak_bytes, rel=0.03)
    assert allocator.stats.reserved_peak_bytes == pytest.approx(in_engine.reserved_peak_bytes, abs=20 * MIB)
    assert answer(case, found, Pools.ENGINE, expandable=True)["retries_a_step"] == 0


def test_planning_replays_the_gradients_of_a_head_that_are_added_up_while_the_loss_runs_in_tiles(
    tmp_path: Path,
) -> None:
    """They take 20 MiB here."""
    path = tmp_path / "wide.json"
    path.write_text(json.dumps({**json.loads(MODEL.read_text()), "vocab_size": 20_480, "num_hidden_layers": 2}))
    harmony = {"tokens": 64, "stash": "host", "residency": "off", "pack_layers": 1}
    found = record(Case(path, rows=2, accumulation=3, sequence=256, cap_gib=1, harmony=harmony))
    in_engine = replay(found.events, None, expandable=True, pools=Pools.ENGINE)
    allocator = CachingAllocator(expandable=True)
    planned = Replay(found.plan, found.costs, allocator)
    for _ in range(STEPS):
        allocator.stats.reset()
        planned.step()
    in_steps = in_engine.allocated_peak_bytes - sum(WORKSPACES)
    assert allocator.stats.allocated_peak_bytes == pytest.approx(in_steps, abs=MIB)


class OfEmbeddings(Case):
    """A case whose inputs are embeddings, which are larger than what layers make of them."""

    def batches(self, vocabulary: int, chance: random.Random) -> Iterator[dict[str, Tensor]]:
        for _ in range(self.accumulation):
            embeddings = torch.zeros(self.rows, self.sequence, 256, dtype=torch.bfloat16)
            yield {"inputs_embeds": embeddings, "labels": torch.zeros(self.rows, self.sequence, dtype=torch.long)}


def test_large_inputs_have_room_beside_what_is_computed() -> None:
    case = OfEmbeddings(MODEL, rows=48, accumulation=6, sequence=1024, cap_gib=1.9, harmony={"residency": "off"})
    found = record(case)
    answered = answer(case, found, Pools.ENGINE, expandable=True)
    filled = next(event for event in found.events if isinstance(event, PoolFilled))
    assert filled.other_bytes >= 6 * 48 * 1024 * (2 * 256 + 8)
    assert answered["retries_a_step"] == 0
    assert answered["reserved_peak_bytes"] <= answered["budget_bytes"]


def test_everything_but_what_stays_on_the_device_is_freed(recording: Recording) -> None:
    """What is alive at the end of the third step was alive at the end of the second."""
    alive: dict[int, int] = {}
    at_boundaries: list[int] = []
    for event in recording.events:
        match event:
            case Allocated():
                alive[event.number] = event.nbytes
            case Freed():
                del alive[event.number]
            case StepBegun():
                at_boundaries.append(sum(alive.values()))
    assert len(at_boundaries) == STEPS + 1
    assert at_boundaries[0] == 0
    assert at_boundaries[2] == at_boundaries[3] > 0


def test_streams_are_the_engines(recording: Recording) -> None:
    allocated = [event for event in recording.events if isinstance(event, Allocated)]
    assert {event.stream for event in allocated} == {Stream.COMPUTE, Stream.UPLOAD}
    assert all(event.stream is Stream.COMPUTE for event in allocated if event.is_buffer)  # weights
    assert any(isinstance(event, Used) for event in recording.events)  # inputs, which another stream has copied


def test_the_answer_has_all_numbers_of_the_third_step(case: Case, recording: Recording) -> None:
    found = answer(case, recording, Pools.ENGINE, expandable=True)
    assert found["case"] == "llama-7m, 3 x 2 rows of 256, 0.22 GiB, ragged, clipping at 1"
    assert not found["out_of_memory"]
    assert found["retries_a_step"] == 0
    assert found["allocated_peak_bytes"] < found["reserved_peak_bytes"] <= found["budget_bytes"]
    assert found["planned_peak_bytes"] + found["set_aside_bytes"] <= found["budget_bytes"]


def _third_step(*events: Event) -> list[Event]:
    return [StepBegun(STEPS - 1), *events, StepBegun(STEPS)]


def test_pools_decide_who_shares_memory() -> None:
    """One pool serves weights and what is computed with the same memory."""
    events = _third_step(
        Allocated(1, 40 * MIB, Stream.COMPUTE, is_buffer=False),
        Freed(1),
        Allocated(2, 40 * MIB, Stream.COMPUTE, is_buffer=True),
    )
    reserved = {}
    for pools in Pools:
        peak = replay(events, None, expandable=True, pools=pools).reserved_peak_bytes
        reserved[pools] = (peak - 80 * MIB) // MIB  # the workspaces take 64, and four pages
    assert reserved == {Pools.ENGINE: 40, Pools.WEIGHTS_APART: 80}


def test_a_step_that_is_out_of_memory_says_where() -> None:
    events = _third_step(TaskDone("task 1 of 2, F0.0"), Allocated(1, 400 * MIB, Stream.COMPUTE, is_buffer=False))
    found = replay(events, 300 * MIB, expandable=True, pools=Pools.ENGINE)
    assert found.failure.startswith("in step 3, after task 1 of 2, F0.0: 419,430,400 bytes do not fit")


def test_only_the_third_step_is_counted() -> None:
    events: list[Event] = [
        StepBegun(0),
        Allocated(1, 400 * MIB, Stream.COMPUTE, is_buffer=False),
        Freed(1),
        Allocated(2, 400 * MIB, Stream.UPLOAD, is_buffer=False),  # a retry
        Freed(2),
        *_third_step(Allocated(3, 100 * MIB, Stream.UPLOAD, is_buffer=False), Freed(3)),
    ]
    found = replay(events, 500 * MIB, expandable=True, pools=Pools.ENGINE)
    assert (found.failure, found.retries, found.returned_bytes) == ("", 0, 0)


def test_what_does_not_fit_while_it_is_measured_is_cut_as_on_a_gpu() -> None:
    harmony = {"pack_layers": 4, "residency": "off", "stash": "host", "tokens": "off"}
    case = Case(MODEL, rows=32, accumulation=2, sequence=1024, cap_gib=0.5, harmony=harmony)
    found = record(case)
    assert any(isinstance(event, Refused) for event in found.events)
    assert 0 < found.plan.policy.backward_rows < 32
    answered = answer(case, found, Pools.ENGINE, expandable=True)
    assert not answered["out_of_memory"]
    assert answered["reserved_peak_bytes"] <= answered["budget_bytes"]
