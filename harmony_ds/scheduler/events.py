"""Jobs on streams: when does each begin and end? Knows neither packs nor devices.

A job begins when the jobs it comes after have ended and every stream it occupies has finished what was queued there
before; a job that occupies two streams (a copy between devices) begins on both at once. Jobs that draw on a shared
resource (a link, host memory) slow each other down while they overlap: where the demands exceed the capacity, each of
them runs at capacity / demand of its full speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_Demands = tuple[tuple[str, float], ...]


class Job(NamedTuple):
    """One piece of work (a named tuple: a search makes hundreds of thousands).

    Attributes:
        streams: the streams it occupies, each in the order of the list that the job stands in.
        duration_ms: at full speed.
        after: places of jobs before it in the list that must have ended.
        demands: resources and how much of each it draws at full speed, in the unit of their capacities.
    """

    streams: tuple[str, ...]
    duration_ms: float
    after: tuple[int, ...] = ()
    demands: _Demands = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each job began and ended, in ms, in the order of the list of jobs."""

    begin_ms: tuple[float, ...]
    end_ms: tuple[float, ...]


def run_jobs(
    jobs: Sequence[Job], capacities: Mapping[str, float] | None = None, crowded: Collection[str] = ()
) -> Timeline:
    """Lets `jobs` run.

    Args:
        jobs: in the order in which they are queued on their streams.
        capacities: of resources; one that is not named has no limit.
        crowded: resources that have a limit only while several jobs use them: two together may do less than one alone.
    """
    speeds = _Speeds(jobs, capacities or {}, crowded)
    begin, end = [0.0] * len(jobs), [0.0] * len(jobs)
    missing, followers = _dependencies(jobs)
    ready = [place for place, count in enumerate(missing) if not count]
    running: list[int] = []
    left: list[float] = []  # the ms at full speed that each of them still takes
    now = 0.0
    while ready or running:
        for place in ready:
            begin[place] = now
            left.append(jobs[place].duration_ms)
        running += ready
        ready = []
        speed = speeds.of(running)
        step = min([ms / v for ms, v in zip(left, speed, strict=True)])
        now += step
        still, left_of = [], []
        for place, ms, v in zip(running, left, speed, strict=True):
            rest = ms - step * v
            if rest > 1e-9 * jobs[place].duration_ms:
                still.append(place)
                left_of.append(rest)
                continue
            end[place] = now
            for other in followers[place]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        running, left = still, left_of
    return Timeline(tuple(begin), tuple(end))


def run_alone(jobs: Sequence[Job]) -> Timeline:
    """Let `jobs` run as if none slowed another down: each ends no later than in `run_jobs`."""
    begin: list[float] = []
    end: list[float] = []
    free: dict[str, float] = {}  # stream -> when it has finished what was queued
    for job in jobs:
        now = max(
            [*[end[place] for place in job.after], *[free.get(stream, 0.0) for stream in job.streams]], default=0.0
        )
        begin.append(now)
        end.append(now + job.duration_ms)
        free.update(dict.fromkeys(job.streams, end[-1]))
    return Timeline(tuple(begin), tuple(end))


def _dependencies(jobs: Sequence[Job]) -> tuple[list[int], list[list[int]]]:
    """For how many jobs each one waits, and which ones wait for it."""
    assert all(before < place for place, job in enumerate(jobs) for before in job.after), "a job waits for a later one"
    last_on: dict[str, int] = {}
    missing: list[int] = []
    followers: list[list[int]] = [[] for _ in jobs]
    for place, job in enumerate(jobs):
        before = set(job.after)
        for stream in job.streams:
            if stream in last_on:
                before.add(last_on[stream])
            last_on[stream] = place
        missing.append(len(before))
        for other in before:
            followers[other].append(place)
    return missing, followers


class _Speeds:
    """Return for running jobs: capacity over demand at the resource where that is smallest, and at most 1."""

    def __init__(self, jobs: Sequence[Job], capacities: Mapping[str, float], crowded: Collection[str]) -> None:
        numbers: dict[_Demands, int] = {}
        # A number for the demands of each job: what is looked up at every event is short.
        self._kinds = [numbers.setdefault(job.demands, len(numbers)) for job in jobs]
        self._demands = list(numbers)
        self._capacities = tuple(capacities.items())
        self._crowded = frozenset(crowded)
        self._known: dict[tuple[int, ...], Sequence[float]] = {}

    def of(self, running: Sequence[int]) -> Sequence[float]:
        """By the places of the jobs that run."""
        kinds = tuple([self._kinds[place] for place in running])
        speeds = self._known.get(kinds)
        if speeds is None:
            demands = tuple([self._demands[kind] for kind in kinds])
            speeds = self._known[kinds] = _share_out(demands, self._capacities, self._crowded)
        return speeds


@lru_cache(maxsize=4096)  # the same jobs run together in plan after plan
def _share_out(
    running: tuple[_Demands, ...], capacities: tuple[tuple[str, float], ...], crowded: frozenset[str]
) -> Sequence[float]:
    capacity_of = dict(capacities)
    drawn: dict[str, float] = defaultdict(float)
    for demands in running:
        for resource, demand in demands:
            drawn[resource] += demand
    return [
        min(
            (
                capacity_of[resource] / drawn[resource]
                for resource, demand in demands
                if demand > 0
                and drawn[resource] > capacity_of.get(resource, drawn[resource])
                and (drawn[resource] > demand or resource not in crowded)
            ),
            default=1.0,
        )
        for demands in running
    ]
