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
    chosen = _ChosenByPriority(jobs)
    ready: list[int] = []  # those without a priority that begin now
    for place, count in enumerate(missing):
        if not count:
            if jobs[place].priority is None:
                ready.append(place)
            else:
                chosen.wait(place)
    # The jobs that run: their places, the numbers of their demands, the ms at full speed that each of them still takes, and
    # how little of that is left of a job that has ended.
    running: list[int] = []
    kinds: list[int] = []
    left: list[float] = []
    rounding_ms: list[float] = []
    now = 0.0
    while True:
        if chosen.has_changed:
            ready += chosen.startable()
        for place in ready:
            begin[place] = now
            duration_ms = jobs[place].duration_ms
            running.append(place)
            kinds.append(speeds.kinds[place])
            left.append(duration_ms)
            rounding_ms.append(1e-9 * duration_ms)
        if not running:
            return Timeline(tuple(begin), tuple(end))
        ready = []
        speed = speeds.rates_of(tuple(kinds))
        if speed is None:
            step = min(left)
            left = [ms - step for ms in left]
        else:
            step = min([ms / v for ms, v in zip(left, speed, strict=True)])
            left = [ms - step * v for ms, v in zip(left, speed, strict=True)]
        now += step
        ended = [at for at, ms in enumerate(left) if ms <= rounding_ms[at]]
        for at in ended:
            place = running[at]
            end[place] = now
            if jobs[place].priority is not None:
                chosen.ended(place)
            for other in followers[place]:
                missing[other] -= 1
                if missing[other]:
                    continue
                if jobs[other].priority is None:
                    ready.append(other)
                else:
                    chosen.wait(other)
        for at in reversed(ended):
            del running[at], kinds[at], left[at], rounding_ms[at]


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
    """Jobs with priorities that could begin but for their stream, which is busy with another one.

    Attributes:
        has_changed: whether a job has come to wait, or has ended, since `startable` was asked.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._waiting: dict[str, list[tuple[tuple[int, ...], int]]] = {}  # stream -> heap of priorities and places
        self._busy: set[str] = set()
        self.has_changed = False

    def wait(self, place: int) -> None:
        """Let a job with a priority wait, all before which has ended."""
        job = self._jobs[place]
        assert job.priority is not None
        heappush(self._waiting.setdefault(job.streams[0], []), (job.priority, place))
        self.has_changed = True

    def startable(self) -> list[int]:
        """Return the jobs that begin now: one for each stream that is free."""
        starting: list[int] = []
        for stream, waiting in self._waiting.items():
            if waiting and stream not in self._busy:
                _, place = heappop(waiting)
                self._busy.add(stream)
                starting.append(place)
        self.has_changed = False
        return starting

    def ended(self, place: int) -> None:
        """Note that the stream of a job with a priority is free again."""
        self._busy.discard(self._jobs[place].streams[0])
        self.has_changed = True


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
    for place, (streams, _, after, _, priority) in enumerate(jobs):
        before = {*after}
        if priority is None:
            for stream in streams:
                if stream in last_on:
                    before.add(last_on[stream])
                last_on[stream] = place
        missing.append(len(before))
        for other in before:
            assert other < place, "a job waits for a later one"
            followers[other].append(place)
    return missing, followers


class _Speeds:
    """Speeds of running jobs: capacity over demand at the resource where that is smallest, and at most 1.

    Attributes:
        kinds: for each job, the number of its demands: what is looked up at every event is short.
    """

    def __init__(self, jobs: Sequence[Job], capacities: Mapping[str, float], crowded: Collection[str]) -> None:
        numbers: dict[Demands, int] = {}
        self.kinds = [numbers.setdefault(job.demands, len(numbers)) for job in jobs]
        self._demands = list(numbers)
        self._capacities = tuple(capacities.items())
        self._crowded = frozenset(crowded)
        self._known: dict[tuple[int, ...], Sequence[float] | None] = {}

    def rates_of(self, running: tuple[int, ...]) -> Sequence[float] | None:
        """Return the speeds of jobs with demands of these numbers; None: all run at full speed."""
        if running not in self._known:
            demands = tuple([self._demands[kind] for kind in running])
            speeds = _share_out(demands, self._capacities, self._crowded)
            self._known[running] = None if all(speed == 1.0 for speed in speeds) else speeds
        return self._known[running]


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
