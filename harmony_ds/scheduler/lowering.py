"""Lowers a `Plan` to jobs: its tasks, as the executor would issue them, on the streams of a `Machine`.

    host      issues tasks in order; a swap-in makes it wait until the host has updated those weights
    swap_in   I, T, Y, Z     waits for the compute so far, in whose memory it copies; T for the stash that left, Y and Z for
                             the crossing tensors that left
    disk      I, where weights come from a disk
    compute   F, L, B, K, P, D   waits for the weights of its pack, stash and crossing tensors, after a G for the gradients
                             on their way, and after another run for the crossing tensors that left before that one
    peer      R, A, M, W     waits for the compute so far, or for the device's share of the weights
    swap_out  S, X, V, O     waits for the compute so far, or for the gradients to be reduced
    update    norms, U, R    waits for the gradients to arrive; without grouping, adds up what each micro-batch sends; R is
                             here where gradients are reduced on the host. Of several whose gradients are there, norms and
                             sums go first, then the update of the pack that the next step needs first

Each of several devices that one process drives has streams and a link of its own; they share the host, its memory and the
updates. Where copies do not overlap with compute (the CPU device), all but updates are one stream.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.events import Demands, Job
from harmony_ds.scheduler.plan import BACKWARD_KINDS, FORWARD_KINDS, RUNS, Pack, Plan, Task, TaskKind
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.spans import COMPUTE, DISK, HOST, PEER, SWAP_IN, SWAP_OUT, UPDATE, of_device
from harmony_ds.scheduler.swaps import CrossingTaskBytes, StashMoves, moved_bytes

_STASHING = (TaskKind.FORWARD, TaskKind.FUSED, TaskKind.BACKWARD)
_CROSSING_OUT = (TaskKind.CROSSING_OUT, TaskKind.CROSSING_GRADIENTS_OUT)
_CROSSING_IN = (TaskKind.CROSSING_IN, TaskKind.CROSSING_GRADIENTS_IN)
_MOVES_OUT = (TaskKind.STASH_OUT, *_CROSSING_OUT)
_MOVES_IN = (TaskKind.STASH_IN, *_CROSSING_IN)
_RUNNING = frozenset(RUNS)
_THROUGH = frozenset((*_STASHING, *_MOVES_OUT, *_MOVES_IN))
STASH_PIECES = 16
"""In so many pieces, at most, the stash of all micro-batches for one pack is simulated."""
_ADDITION, _SCALING = 3.0, 2.0
"""Adding gradients up reads two and writes one, clipping them reads and writes one, where their norm reads one."""
_BEFORE_UPDATES = -1
"""Priority on the update stream of norms and sums: before the updates of all packs that have calls."""


class _Several(NamedTuple):
    """Tasks of one kind through one pack, which one job does; `micro_batches`: how many they stand for."""

    tasks: tuple[Task, ...]
    micro_batches: int


class Lowering:
    """Tasks to jobs. Runs of the same pack's micro-batches, between which nothing else is issued, become one job.

    Attributes:
        jobs: of all steps so far.
        work: for each job, its stream and its tasks.
    """

    def __init__(
        self, plan: Plan, costs: CostTable, machine: Machine, counts: Sequence[int], pieces: int = STASH_PIECES
    ) -> None:
        """Keep what to lower; `counts`: micro-batches that each stands for; empty: itself; `pieces`: of a pack's stash."""
        self._plan = plan
        self._packs = plan.packs
        self._costs = costs
        self._machine = machine
        self._times: dict[tuple[TaskKind, int], float] = {}  # of one micro-batch through a pack
        self._unlayered = tuple(pack.index for pack in plan.packing.unlayered_packs)
        self._runs = _merged(plan.tasks, -(-plan.micro_batches // pieces), counts)
        self._steps = 0
        self._rounds = 1 if plan.policy.grouping else plan.micro_batches
        self.jobs: list[Job] = []
        self.work: list[tuple[str, tuple[Task, ...]]] = []
        self._arrived: dict[int, int] = {}  # pack -> its swap-in, or what brings its shares together
        # pack -> what brings its stash back, and of how many micro-batches that have not run yet
        self._stashed: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._reduced: dict[int, int] = {}  # pack -> what adds its gradients up
        self._gradients_left: dict[int, int] = {}  # pack -> what copies its gradients to the host
        # pack -> what its update waits for: that, or the sum on the host of what several devices have copied
        self._on_host: dict[int, int] = {}
        self._updated: dict[str, int] = {}  # parameter -> the update of it
        self._last: dict[str, int] = {}  # stream -> the last job on it
        self._device = 0  # of the task
        # By device: the names of its own streams and links
        self._names: defaultdict[int, dict[str, str]] = defaultdict(dict)
        self._link_demands: dict[tuple[int, float], Demands] = {}  # by device and rate
        self._host_demand = _host_demand(machine)
        self._compute_after: defaultdict[int, list[int]] = defaultdict(list)  # device -> what compute there waits for
        self._leaving: dict[int, int] = {}  # device -> the last stash that left it
        self._stash_out: dict[int, tuple[int, ...]] = {}  # device -> the last stash that was copied to the host
        self._crossing_bytes = CrossingTaskBytes(plan.packing, plan.policy, costs)
        self._stash_moves = StashMoves(plan, costs, self._crossing_bytes)
        self._crossing_left: dict[int, int] = {}  # micro-batch -> what took its crossing tensors to the host
        self._crossing_back: dict[int, int] = {}  # micro-batch -> what brings that back
        self._crossing_leaving: dict[int, int] = {}  # device -> what takes crossing tensors there to the host
        self._moved_bytes = moved_bytes(plan.packing, costs.flow)
        self._ran: dict[int, int] = {}  # micro-batch -> what ran it last
        self._moved: dict[tuple[int, int], int] = {}  # (pack, micro-batch) -> what brought it to the pack's device
        self._norms: list[int] = []
        self._updates: list[int] = []
        self._sums: list[int] = []
        self._sent: Counter[int] = Counter()  # pack -> how often its gradients have left in this step

    def step(self) -> range:
        """Queues one step; returns the places of its jobs."""
        first = len(self.jobs)
        self._steps += 1
        self._sent.clear()
        for several in self._runs:
            self._issue(several)
        return range(first, len(self.jobs))

    # ---- one task

    def _issue(self, several: _Several) -> None:
        task = several.tasks[0]
        pack = self._packs[task.pack]
        self._device = pack.device
        match task.kind:
            case kind if kind in _RUNNING:
                self._run(several, pack)
            case TaskKind.STASH_OUT | TaskKind.STASH_IN:
                self._move_stash(several, pack)
            case TaskKind.SWAP_IN | TaskKind.GATHER:
                self._arrived[task.pack] = self._weights_in(task, pack)
            case TaskKind.REDUCE | TaskKind.SWAP_OUT:
                self._gradients_out(task, pack)
            case TaskKind.FREE_GRADIENTS:
                self._compute_after[pack.device].append(self._gradients_left[task.pack])
            case kind if kind in _CROSSING_OUT or kind in _CROSSING_IN:
                self._move_crossing(several, pack)
            case TaskKind.MOVE | TaskKind.MOVE_BACK:
                self._move(task, self._moved_bytes[task.kind, task.pack])
            case TaskKind.NORM:
                self._norms.append(self._add(UPDATE, (task,), 0.0, tuple(self._norms)))
            case TaskKind.UPDATE | TaskKind.UPDATE_ON_DEVICE:
                self._update_pack(task, pack)
            case TaskKind.EVICT:
                pass  # the allocator's work alone
            case _:
                raise AssertionError(f"it is not known how long {task.kind} takes")

    def _weights_in(self, task: Task, pack: Pack) -> int:
        if task.kind is TaskKind.GATHER:
            return self._exchange(task, pack.gathered_bytes, (self._arrived[task.pack],))
        updates = tuple({self._updated[name] for name in pack.parameters if name in self._updated})
        nbytes = pack.swap_in_bytes(self._plan.policy.swaps_in_shares)
        issued = self._host((task,), self._machine.task_ms, updates)
        return self._copy_in(
            _Several((task,), 1), nbytes, (*issued, *updates), self._machine.disk_bytes_per_ms or math.inf
        )

    def _move_stash(self, several: _Several, pack: Pack) -> None:
        if pack.device in self._leaving:
            # Compute goes on over the memory of the last stash that left only when its copy is done.
            self._compute_after[pack.device].append(self._leaving.pop(pack.device))
        if several.tasks[0].kind is TaskKind.STASH_OUT:
            left = self._leaving[pack.device] = self._copy_out(several, self._stash_moves.out_bytes(several.tasks[0]))
            self._stash_out[pack.device] = (left,)
        else:
            issued = self._host(several.tasks, several.micro_batches * self._machine.task_ms)
            nbytes = self._stash_moves.in_bytes(several.tasks[0])
            done = self._copy_in(several, nbytes, (*issued, *self._stash_out.get(pack.device, ())))
            self._stashed[pack.index].append((done, several.micro_batches))

    def _move_crossing(self, several: _Several, pack: Pack) -> None:
        nbytes, device = self._crossing_bytes.of(several.tasks[0]), pack.device
        micro_batches = [task.micro_batch for task in several.tasks]
        if several.tasks[0].kind in _CROSSING_OUT:
            left = self._crossing_leaving[device] = self._copy_out(several, nbytes)
            self._crossing_left.update(dict.fromkeys(micro_batches, left))
        else:
            copied = sorted({self._crossing_left[m] for m in micro_batches})
            issued = self._host(several.tasks, several.micro_batches * self._machine.task_ms)
            back = self._copy_in(several, nbytes, (*issued, *copied))
            self._crossing_back.update(dict.fromkeys(micro_batches, back))

    def _move(self, task: Task, nbytes: int) -> None:
        machine = self._machine
        rate = machine.peer_bytes_per_ms or machine.link_bytes_per_ms / 2
        demands = () if machine.peer_bytes_per_ms and not machine.peers_share_link else self._link_demand(rate)
        ran = self._ran[task.micro_batch]
        after = (*self._host((task,), machine.task_ms), ran)
        duration = machine.peer_ms + nbytes / rate
        self._moved[task.pack, task.micro_batch] = self._add(PEER, (task,), duration, after, demands)

    def _update_pack(self, task: Task, pack: Pack) -> None:
        normed = tuple(self._norms[-1:])
        if task.kind is TaskKind.UPDATE:
            gradients = (self._on_host[task.pack],) if task.pack in self._on_host else ()
            duration = self._machine.host_update_ms(pack.update_elements) + self._before_update_ms(pack)
            demands = (*self._host_demand, *_disk_demand(self._machine.update_disk))
            done = self._add(UPDATE, (task,), duration, (*gradients, *normed), demands, pack.needed_at)
            self._updates.append(done)
        else:
            duration = pack.update_elements / self._machine.device_update_elements_per_ms
            done = self._compute(_Several((task,), 1), duration, normed)
        self._updated.update(dict.fromkeys(pack.owned, done))

    def _before_update_ms(self, pack: Pack) -> float:
        """Add what the host does to gradients first: it clips those that waited for their norm, or takes it of others."""
        if self._plan.policy.deferred_update:
            return _SCALING * pack.update_elements / self._machine.norm_elements_per_ms
        return self._machine.host_norm_ms(pack.update_elements, self._plan.policy.leave_whole)

    def _run(self, several: _Several, pack: Pack) -> None:
        task = several.tasks[0]
        arrived = [self._arrived[task.pack]] if task.pack in self._arrived else []
        arrived += [self._arrived[index] for index in self._unlayered if index in self._arrived]
        stash = self._stash_back(task.pack, several.micro_batches) if task.kind is TaskKind.BACKWARD else ()
        came = self._came(several.tasks) if self._moved or self._crossing_back else ()
        after = (*arrived, *self._compute_after.pop(pack.device, ()), *stash, *came)
        duration = self._times.get((task.kind, task.pack))
        if duration is None:
            duration = self._times[task.kind, task.pack] = self._micro_batch_ms(task, pack)
        # One thread issues the work of several devices; that of one was measured with what issuing it takes.
        issue_ms = duration * self._costs.issue_share * (self._plan.policy.pipeline > 1)
        ran = self._compute(several, several.micro_batches * duration, after, issue_ms)
        if pack.device in self._crossing_leaving:
            self._compute_after[pack.device].append(self._crossing_leaving.pop(pack.device))
        if self._plan.policy.pipeline > 1:
            self._ran.update((one.micro_batch, ran) for one in several.tasks)

    def _came(self, tasks: tuple[Task, ...]) -> list[int]:
        """Return the jobs that brought what runs of micro-batches take over from the packs before."""
        moved = [self._moved.pop((task.pack, task.micro_batch), -1) for task in tasks]
        crossed = {self._crossing_back.pop(task.micro_batch, -1) for task in tasks}
        return sorted(job for job in (*moved, *crossed) if job >= 0)

    def _micro_batch_ms(self, task: Task, pack: Pack) -> float:
        """Return how long one micro-batch takes through the pack, with what comes before the model's first layer call."""
        copies_ms = self._slices_in_ms(task, pack) if self._plan.policy.slices_from_host else 0.0
        duration = run_ms(task.kind, pack, self._costs) + copies_ms
        first = task.pack in self._plan.packing.forward[:1] or not self._plan.packing.forward
        return duration + (self._costs.head_ms if first and task.kind not in BACKWARD_KINDS else 0.0)

    def _stash_back(self, pack: int, count: int) -> tuple[int, ...]:
        """Return the jobs that bring the stash of the pack's next `count` micro-batches back, as far as it left."""
        waiting = self._stashed[pack]
        jobs: list[int] = []
        while waiting and count:
            job, micro_batches = waiting.popleft()
            if micro_batches > count:
                waiting.appendleft((job, micro_batches - count))
            count -= min(micro_batches, count)
            jobs.append(job)
        return tuple(jobs)

    def _slices_in_ms(self, task: Task, pack: Pack) -> float:
        """Return the time of copies that a run waits for: slices' inputs, and the stash that leaves before the loss."""
        if task.kind not in (TaskKind.FUSED, TaskKind.BACKWARD):
            return 0.0
        out_bytes = self._stash_moves.out_bytes(task) if task.kind is TaskKind.FUSED else 0
        in_ms = self._stash_moves.in_slices_bytes(pack) / self._machine.swap_in_bytes_per_ms
        return in_ms + out_bytes / self._machine.swap_out_bytes_per_ms

    def _gradients_out(self, task: Task, pack: Pack) -> None:
        on_host = self._plan.policy.reduce_on_host
        if task.kind is TaskKind.SWAP_OUT:
            self._swap_out(task, pack)
            if not on_host:
                self._note_on_host(task, pack, self._gradients_left[task.pack])
        elif on_host:
            duration = self._machine.host_sum_ms(pack.update_elements, self._plan.policy.devices)
            added = self._add(UPDATE, (task,), duration, (self._gradients_left[task.pack],), self._host_demand)
            self._sums.append(added)
            self._note_on_host(task, pack, added)
        else:
            sent = max(pack.sent_bytes, default=0)
            self._reduced[task.pack] = self._exchange(task, sent, self._latest(COMPUTE))

    def _swap_out(self, task: Task, pack: Pack) -> None:
        policy, updates = self._plan.policy, self._updates
        # Where only a few wait, the host waits for a slab that an earlier update, or sum, has done with.
        done = self._sums if policy.reduce_on_host else [] if policy.gradients_wait else updates
        freed = tuple(done[-policy.gradient_slabs :][:1]) if len(done) >= policy.gradient_slabs else ()
        reduced = self._reduced.get(pack.index)
        self._gradients_left[pack.index] = self._copy_out(_Several((task,), 1), pack.swap_out_bytes(), freed, reduced)

    def _note_on_host(self, task: Task, pack: Pack, arrival: int) -> None:
        """Note that gradients are on the host after job `arrival`; add them to those before, and take their norm."""
        policy = self._plan.policy
        self._on_host[pack.index] = arrival
        addition_ms = _ADDITION * pack.update_elements / self._machine.norm_elements_per_ms
        duration = addition_ms if self._sent[pack.index] else 0.0
        self._sent[pack.index] += 1
        measured = policy.deferred_update and self._sent[pack.index] == self._rounds
        if measured or duration:
            if measured:
                duration += self._machine.host_norm_ms(pack.update_elements, policy.leave_whole)
            done = self._add(UPDATE, (task,), duration, (arrival,), self._host_demand)
            self._norms += [done] if measured else []

    def _exchange(self, task: Task, sent_bytes: int, last: tuple[int, ...]) -> int:
        machine = self._machine
        demands = self._link_demand(machine.peer_bytes_per_ms) if machine.peers_share_link else ()
        after = (*self._host((task,), machine.task_ms), *last)
        return self._add(PEER, (task,), machine.peer_exchange_ms(sent_bytes), after, demands)

    # ---- jobs

    def _compute(self, several: _Several, duration_ms: float, after: tuple[int, ...], issue_ms: float = 0.0) -> int:
        demands = (("cores", 1.0),) if self._machine.beside_update < 1.0 else ()
        issuing_ms = (self._machine.task_ms + issue_ms) * several.micro_batches
        after = (*self._host(several.tasks[:1], issuing_ms), *after)
        extra = 0.0 if self._machine.copies_overlap else issuing_ms
        return self._add(COMPUTE, several.tasks, duration_ms + extra, after, demands)

    def _copy_in(
        self, several: _Several, nbytes: int, after: tuple[int, ...], disk_bytes_per_ms: float = math.inf
    ) -> int:
        machine = self._machine
        after = (*after, *self._latest(COMPUTE))
        rate = min(machine.swap_in_bytes_per_ms, disk_bytes_per_ms)
        demands = (*self._link_demand(rate), *_disk_demand(rate / disk_bytes_per_ms))
        stream = SWAP_IN if math.isinf(disk_bytes_per_ms) else DISK
        return self._add(
            stream, several.tasks, several.micro_batches * (machine.swap_ms + nbytes / rate), after, demands
        )

    def _copy_out(self, several: _Several, nbytes: int, freed: tuple[int, ...] = (), last: int | None = None) -> int:
        """Add the host's work for each task, after job `last`; None: after the compute so far."""
        machine = self._machine
        ready = self._latest(COMPUTE) if last is None else (last,)
        after = (*self._host(several.tasks, several.micro_batches * machine.task_ms, freed), *freed, *ready)
        demands = self._link_demand(machine.swap_out_bytes_per_ms)
        return self._add(SWAP_OUT, several.tasks, several.micro_batches * machine.swap_out_ms(nbytes), after, demands)

    def _host(self, tasks: tuple[Task, ...], duration_ms: float, after: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the host's part in a task; where nothing overlaps, it is part of the task itself."""
        if not self._machine.copies_overlap or (not duration_ms and not after):
            return ()
        return (self._add(HOST, tasks, duration_ms, after),)

    def _latest(self, stream: str) -> tuple[int, ...]:
        known = self._last.get(self._own(stream))
        return () if known is None else (known,)

    def _own(self, stream: str) -> str:
        """Return the name of the device's own `stream`, or link."""
        names = self._names[self._device]
        if stream not in names:
            names[stream] = of_device(stream, self._device)
        return names[stream]

    def _link_demand(self, bytes_per_ms: float) -> Demands:
        key = self._device, bytes_per_ms
        known = self._link_demands.get(key)
        if known is None:
            demands = [(self._own("link"), bytes_per_ms), ("host memory", bytes_per_ms)]
            if self._machine.beside_update < 1.0 and not self._machine.copies_overlap:
                demands.append(("cores", 1.0))
            known = self._link_demands[key] = tuple(demands)
        return known

    def _add(
        self,
        stream: str,
        tasks: tuple[Task, ...],
        duration_ms: float,
        after: tuple[int, ...],
        demands: Demands = (),
        needed_at: int = _BEFORE_UPDATES,
    ) -> int:
        """Add a job, and return its place; `needed_at`: of the pack that it updates on the host."""
        assert duration_ms >= 0, f"{tasks[0]} would take {duration_ms} ms"
        own, place = self._own(stream), len(self.jobs)
        if stream == UPDATE:
            priority: tuple[int, ...] | None = (self._steps, needed_at)  # as in `harmony_ds.optim.updater`
            lane = own
        else:
            priority = None
            lane = own if self._machine.copies_overlap else COMPUTE
        self._last[own] = place
        self.jobs.append(Job((lane,), duration_ms, after, demands, priority))
        self.work.append((own, tasks))
        return place


def _host_demand(machine: Machine) -> Demands:
    """Return what an update, a norm or a sum draws on."""
    demands = [("host memory", machine.update_elements_per_ms * machine.update_bytes_per_element)]
    if machine.beside_update < 1.0:
        demands.append(("cores", 1.0))
    return tuple(demands)


def _disk_demand(share: float) -> Demands:
    return (("disk", share),) if share else ()


def run_ms(kind: TaskKind, pack: Pack, costs: CostTable) -> float:
    """How long one micro-batch takes through a pack."""
    calls = [costs.costs[p] for p in pack.positions]
    if kind in FORWARD_KINDS:
        return sum(call.forward_ms for call in calls)
    if kind is TaskKind.BACKWARD_FROM_GRAPH:
        return sum(call.propagate_ms for call in calls)
    if kind is TaskKind.BACKWARD:
        return sum(call.backward_ms for call in calls)
    return costs.tail_ms + sum(call.fused_ms for call in calls)


def _merged(tasks: tuple[Task, ...], at_once: int, counts: Sequence[int]) -> list[_Several]:
    """Group runs: further micro-batches through the same pack go with the first one; where stash moves between them,
    `at_once` do, and as many moves, so that a plan of many micro-batches has few jobs.
    """
    merged: list[_Several] = []
    for (_, through), tasks_there in groupby(tasks, key=_pack_and_way):
        there = [
            _Several((task,), counts[task.micro_batch] if counts and task.micro_batch >= 0 else 1)
            for task in tasks_there
        ]
        if through and (visit := _Visit(there)).is_alternating:
            merged += visit.cut(at_once)
            continue
        for kind, same in groupby(there, key=_kind_of):
            if kind in _RUNNING:
                merged.append(_joined([*same]))
            else:
                merged += [piece for one in same for piece in _cut([one], at_once)]
    return merged


def _pack_and_way(task: Task) -> tuple[int, bool]:
    return task.pack, task.kind in _THROUGH


def _kind_of(one: _Several) -> TaskKind:
    return one.tasks[0].kind


class _Visit:
    """The tasks of a pack's runs in one pass, and what moves between them."""

    def __init__(self, there: list[_Several]) -> None:
        by_kind: defaultdict[TaskKind, list[_Several]] = defaultdict(list)
        for one in there:
            by_kind[one.tasks[0].kind].append(one)
        self._runs = [one for one in there if one.tasks[0].kind in _RUNNING]
        self._out = [by_kind[kind] for kind in _MOVES_OUT if kind in by_kind]
        self._in = [by_kind[kind] for kind in _MOVES_IN if kind in by_kind]
        # Runs for which what comes back came before all of these tasks.
        self._early = _count(self._runs) - _count(self._in[0]) if self._in else 0

    @property
    def is_alternating(self) -> bool:
        """Whether every run has a move of each kind; of those that come back the first two runs may have none, since they
        may come back early.
        """
        if not self._runs or not (self._out or self._in):
            return False
        count = _count(self._runs)
        all_out = all(_count(moves) == count for moves in self._out)
        all_in = all(_count(moves) == count - self._early for moves in self._in)
        are_alike = not self._early or len({run.tasks[0].kind for run in self._runs}) == 1
        return all_out and all_in and 0 <= self._early <= 2 and are_alike

    def cut(self, at_once: int) -> Iterator[_Several]:
        """Yield runs and moves, so many of each kind together: what leaves does so after its runs, and what comes back
        while the runs before its own are under way.
        """
        runs = self._pieces(self._runs, at_once)
        out = [self._pieces(moves, at_once) for moves in self._out]
        coming = [_cut(moves, at_once) for moves in self._in]
        for pieces in coming:
            yield pieces[0]
        first = 0 if self._early else 1  # of the pieces that come back during the first runs
        for place, some in enumerate(runs):
            for pieces in coming:
                if (place or not self._early) and place + first < len(pieces):
                    yield pieces[place + first]
            yield some
            for pieces in out:
                yield pieces[place]

    def _pieces(self, there: list[_Several], at_once: int) -> list[_Several]:
        """Return the tasks of the first runs, whose moves came early, together, and those of the others cut."""
        first = [_joined(there[: self._early])] if self._early else []
        return first + _cut(there[self._early :], at_once)


def _count(several: list[_Several]) -> int:
    return sum([one.micro_batches for one in several])


def _joined(several: list[_Several]) -> _Several:
    if len(several) == 1:
        return several[0]
    return _Several(tuple([task for one in several for task in one.tasks]), _count(several))


def _cut(several: list[_Several], at_once: int) -> list[_Several]:
    """Return tasks of the same micro-batches in pieces of `at_once` micro-batches each; the last may have fewer.

    One that stands for several is in each piece that has some of these.
    """
    pieces: list[_Several] = []
    piece: list[_Several] = []
    room = at_once  # in `piece`
    for tasks, count in several:
        left = count
        while left:
            taken = min(left, room)
            piece.append(_Several(tasks, taken))
            left -= taken
            room -= taken
            if not room:
                pieces.append(_joined(piece))
                piece, room = [], at_once
    return [*pieces, _joined(piece)] if piece else pieces
