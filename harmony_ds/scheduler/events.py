"""Jobs on streams: when does each begin and end? Knows neither packs nor devices.

A job begins when the jobs it comes after have ended and every stream it occupies has finished what was queued there
before; a job that occupies two streams (a copy between devices) begins on both at once. The jobs of one stream may have
priorities instead of an order: of those whose time has come, the stream then runs the one with the lowest number first.
Jobs that draw on a shared resource (a link, host memory) slow each other down while they overlap: where the demands exceed
the capacity, each of them runs at capacity / demand of its full speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

Demands = tuple[tuple[str, float], ...]
"""Resources, each with how much of it is drawn."""


class Job(NamedTuple):
    """One piece of work (a named tuple: a search makes hundreds of thousands).

    Attributes:
        streams: the streams it occupies, each in the order of the list that the job stands in.
        duration_ms: at full speed.
        after: places of jobs before it in the list that must have ended.
        demands: resources and how much of each it draws at full speed, in the unit of their capacities.
        priority: its place among the jobs of its one stream, all of which have one; None: they run in the list's order.
    """

    streams: tuple[str, ...]
    duration_ms: float
    after: tuple[int, ...] = ()
    demands: Demands = ()
    priority: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each job began and ended, in ms, in the order of the list of jobs."""

    begin_ms: tuple[float, ...]
    end_ms: tuple[float, ...]


def run_jobs(
    jobs: Sequence[Job], capacities: Mapping[str, float] | None = None, crowded: Collection[str] = ()
) -> Timeline:
    """Return when each of `jobs` runs, slowed down by those beside it.

    Args:
        jobs: in the order in which they are queued on their streams.
        capacities: of resources; one that is not named has no limit.
        crowded: resources that have a limit only while several jobs use them: two together may do less than one alone.
    """
    speeds = _Speeds(jobs, capacities or {}, crowded)
    begin, end = [0.0] * len(jobs), [0.0] * len(jobs)
    missing, followers = _dependencies(jobs)
    ready = [place for place, count in enumerate(missing) if not count]
    chosen = _ChosenByPriority(jobs)
    running: list[int] = []
    left: list[float] = []  # the ms at full speed that each of them still takes
    rounding_ms = [1e-9 * job.duration_ms for job in jobs]  # a job of which no more is left has ended
    now = 0.0
    while ready or running or chosen.any_waiting:
        for place in chosen.startable(ready):
            begin[place] = now
            left.append(jobs[place].duration_ms)
            running.append(place)
        ready = []
        speed = speeds.rates_of(running)
        step = min([ms / v for ms, v in zip(left, speed, strict=True)])
        now += step
        left = [ms - step * v for ms, v in zip(left, speed, strict=True)]
        ended = [place for place, ms in zip(running, left, strict=True) if ms <= rounding_ms[place]]
        for place in ended:
            end[place] = now
            chosen.ended(place)
            for other in followers[place]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
            at = running.index(place)
            del running[at], left[at]
    return Timeline(tuple(begin), tuple(end))


def run_alone(jobs: Sequence[Job]) -> Timeline:
    """Return when each of `jobs` runs if none slows another down: no later than in `run_jobs`, unless by priorities.

    Of jobs with priorities, one may come later here: where the job before it is slowed down, a more urgent one may arrive
    in time to go first.
    """
    begin, end = [0.0] * len(jobs), [_UNKNOWN] * len(jobs)
    free: dict[str, float] = {}  # stream -> when it has finished what was queued
    served: dict[str, _ServedByPriority] = {}
    for place, job in enumerate(jobs):
        now = 0.0
        for before in job.after:
            if end[before] == _UNKNOWN:
                served[jobs[before].streams[0]].serve_until(before)
            now = max(now, end[before])
        if job.priority is not None:
            (stream,) = job.streams
            if stream not in served:
                served[stream] = _ServedByPriority(jobs, begin, end)
            served[stream].arrive(place, now)
            continue
        for stream in job.streams:
            now = max(now, free.get(stream, 0.0))
        begin[place], end[place] = now, now + job.duration_ms
        for stream in job.streams:
            free[stream] = end[place]
    for server in served.values():
        server.serve_all()
    return Timeline(tuple(begin), tuple(end))


_UNKNOWN = -1.0


class _ChosenByPriority:
    """Jobs with priorities that could begin but for their stream, which is busy with another one."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._waiting: dict[str, list[tuple[tuple[int, ...], int]]] = {}  # stream -> heap of priorities and places
        self._busy: set[str] = set()

    @property
    def any_waiting(self) -> bool:
        return any(self._waiting.values())

    def startable(self, ready: list[int]) -> list[int]:
        """Return the jobs that begin now: those of `ready` without a priority, and one for each stream that is free."""
        starting = []
        for place in ready:
            priority = self._jobs[place].priority
            if priority is None:
                starting.append(place)
            else:
                heappush(self._waiting.setdefault(self._jobs[place].streams[0], []), (priority, place))
        for stream, waiting in self._waiting.items():
            if waiting and stream not in self._busy:
                _, place = heappop(waiting)
                self._busy.add(stream)
                starting.append(place)
        return starting

    def ended(self, place: int) -> None:
        """Note that the stream of a job with a priority is free again."""
        if self._jobs[place].priority is not None:
            self._busy.discard(self._jobs[place].streams[0])


class _ServedByPriority:
    """One stream that runs, of the jobs that have arrived, the one with the lowest priority number first.

    The end of a job is worked out when another job needs it. All that could still come before it has arrived by then: the
    later jobs of the list begin after the job that needs it.
    """

    def __init__(self, jobs: Sequence[Job], begin: list[float], end: list[float]) -> None:
        """Write when jobs begin and end to `begin` and `end`."""
        self._jobs, self._begin, self._end = jobs, begin, end
        self._free_ms = 0.0
        self._arriving: list[tuple[float, int]] = []  # heap of when a job can begin, and its place
        self._waiting: list[tuple[tuple[int, ...], int]] = []  # heap of those that could begin now

    def arrive(self, place: int, now: float) -> None:
        heappush(self._arriving, (now, place))

    def serve_until(self, place: int) -> None:
        """Run jobs until the one at `place` has ended."""
        while self._end[place] == _UNKNOWN:
            self._serve_next()

    def serve_all(self) -> None:
        while self._arriving or self._waiting:
            self._serve_next()

    def _serve_next(self) -> None:
        if not self._waiting:
            self._free_ms = max(self._free_ms, self._arriving[0][0])
        while self._arriving and self._arriving[0][0] <= self._free_ms:
            _, arrived = heappop(self._arriving)
            priority = self._jobs[arrived].priority
            assert priority is not None
            heappush(self._waiting, (priority, arrived))
        _, place = heappop(self._waiting)
        self._begin[place] = self._free_ms
        self._free_ms += self._jobs[place].duration_ms
        self._end[place] = self._free_ms


def _dependencies(jobs: Sequence[Job]) -> tuple[list[int], list[list[int]]]:
    """Return for how many jobs each one waits, and which ones wait for it."""
    last_on: dict[str, int] = {}
    missing: list[int] = []
    followers: list[list[int]] = [[] for _ in jobs]
    for place, job in enumerate(jobs):
        before = set(job.after)
        for stream in job.streams if job.priority is None else ():
            if stream in last_on:
                before.add(last_on[stream])
            last_on[stream] = place
        missing.append(len(before))
        for other in before:
            assert other < place, "a job waits for a later one"
            followers[other].append(place)
    return missing, followers


class _Speeds:
    """Return for running jobs: capacity over demand at the resource where that is smallest, and at most 1."""

    def __init__(self, jobs: Sequence[Job], capacities: Mapping[str, float], crowded: Collection[str]) -> None:
        numbers: dict[Demands, int] = {}
        # A number for the demands of each job: what is looked up at every event is short.
        self._kinds = [numbers.setdefault(job.demands, len(numbers)) for job in jobs]
        self._demands = list(numbers)
        self._capacities = tuple(capacities.items())
        self._crowded = frozenset(crowded)
        self._known: dict[tuple[int, ...], Sequence[float]] = {}

    def rates_of(self, running: Sequence[int]) -> Sequence[float]:
        """By the places of the jobs that run."""
        kinds = tuple([self._kinds[place] for place in running])
        speeds = self._known.get(kinds)
        if speeds is None:
            demands = tuple([self._demands[kind] for kind in kinds])
            speeds = self._known[kinds] = _share_out(demands, self._capacities, self._crowded)
        return speeds


@lru_cache(maxsize=4096)  # the same jobs run together in plan after plan
def _share_out(
    running: tuple[Demands, ...], capacities: tuple[tuple[str, float], ...], crowded: frozenset[str]
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
