"""Predicts a step: the tasks of a `Plan`, as the executor would issue them, on the streams of a `Machine`.

    host      issues tasks in order; a swap-in makes it wait until the host has updated those weights
    swap_in   I, T           waits, behind an E, for the compute that the evicted weights served
    compute   F, L, B, D     waits for the swap-in of its pack and stash, and behind a G for the gradients on their way
    swap_out  S, O           waits for the compute so far
    update    norms, U       waits for the gradients to arrive; without grouping, adds up what each micro-batch sends

Where updates do not overlap, whatever is issued behind them waits for them.
Where copies do not overlap with compute (the CPU device), the first four are one stream. Steps follow each other: the
updates of one run under the forward pass of the next, so two are simulated and the second one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.compose import stash_moves
from harmony_ds.scheduler.events import Job, Timeline, run_jobs
from harmony_ds.scheduler.plan import Pack, Plan, Task, TaskKind

HOST, SWAP_IN, COMPUTE, SWAP_OUT, UPDATE = "host", "swap_in", "compute", "swap_out", "update"
STREAMS = (HOST, SWAP_IN, COMPUTE, SWAP_OUT, UPDATE)
RESIDENT_SET = "resident set"
_RUNS = (TaskKind.FORWARD, TaskKind.FUSED, TaskKind.BACKWARD)
_STEPS = 2
_ADDITION = 3.0
"""Adding gradients up reads two and writes one, where their norm reads one."""


@dataclass(frozen=True, slots=True)
class Swaps:
    """Bytes that one step moves, by kind."""

    weights_in: int = 0
    gradients_out: int = 0
    stash_out: int = 0
    stash_in: int = 0

    @property
    def total(self) -> int:
        return self.weights_in + self.gradients_out + self.stash_out + self.stash_in


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a stream, predicted or executed: its name, the task (or tasks) behind it, and when it ran.

    `tasks` is empty for the resident set, which no task of the plan moves.
    """

    stream: str
    name: str
    begin_ms: float
    end_ms: float
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan will take.

    Attributes:
        step_ms: from the end of one step to the end of the next, updates that lag behind apart.
        busy_ms: how long each stream works in a step.
        swaps: bytes between host and device.
        spans: the second of two steps, from its first task on.
    """

    step_ms: float
    busy_ms: Mapping[str, float]
    swaps: Swaps
    spans: tuple[Span, ...]

    @property
    def idle_share(self) -> float:
        """The part of the step in which the device does not compute."""
        return max(0.0, 1.0 - self.busy_ms[COMPUTE] / self.step_ms) if self.step_ms else 0.0

    @property
    def bottleneck(self) -> str:
        """The stream that works most."""
        return max(self.busy_ms, key=lambda stream: self.busy_ms[stream])


def simulate(plan: Plan, costs: CostTable, machine: Machine) -> Prediction:
    """Two steps of `plan`, the second of which is returned.

    Args:
        costs: of one micro-batch of the plan's size.
    """
    lowering = _Lowering(plan, costs, machine)
    ends = [lowering.step() for _ in range(_STEPS)]
    timeline = run_jobs(lowering.jobs, _capacities(machine), crowded=("cores",))
    finished = [
        max((timeline.end_ms[j] for j in range(first, last) if lowering.names[j][0] != UPDATE), default=0.0)
        for first, last in ends
    ]
    return Prediction(
        step_ms=finished[-1] - finished[-2],
        busy_ms=lowering.busy_ms(*ends[-1]),
        swaps=swaps_of(plan, costs),
        spans=_spans(lowering, timeline, *ends[-1]),
    )


def swaps_of(plan: Plan, costs: CostTable) -> Swaps:
    """The bytes that the tasks of `plan` move; what the ledger will count."""
    weights, gradients, out, back = plan.resident_set.weight_bytes, plan.resident_set.gradient_bytes, 0, 0
    leaving, _ = stash_moves(plan.packing, plan.policy)
    away = {p for index in leaving for p in plan.packs[index].positions}
    for task in plan.tasks:
        pack = plan.packs[task.pack]
        match task.kind:
            case TaskKind.SWAP_IN:
                weights += pack.weight_bytes
            case TaskKind.SWAP_OUT:
                gradients += pack.gradient_bytes
            case TaskKind.STASH_OUT:
                out += _stash_bytes(pack, costs)
            case TaskKind.STASH_IN:
                back += sum(costs.costs[p].stash_bytes for p in pack.positions if p in away)
            case _:
                pass
    return Swaps(weights, gradients, out, back)


def _stash_bytes(pack: Pack, costs: CostTable) -> int:
    return sum(costs.costs[p].stash_bytes for p in pack.positions)


def _capacities(machine: Machine) -> dict[str, float]:
    return {
        "link": machine.link_bytes_per_ms,
        "host memory": machine.host_bytes_per_ms,
        "cores": 2 * machine.beside_update,
    }


def _spans(lowering: _Lowering, timeline: Timeline, first: int, last: int) -> tuple[Span, ...]:
    begin = min(timeline.begin_ms[first:last], default=0.0)
    return tuple(
        Span(
            *_named(*lowering.names[j]),
            timeline.begin_ms[j] - begin,
            timeline.end_ms[j] - begin,
            lowering.tasks_of(*lowering.names[j][1:]),
        )
        for j in range(first, last)
        if timeline.end_ms[j] > timeline.begin_ms[j]
    )


def _named(stream: str, what: Task | str, count: int) -> tuple[str, str]:
    name = span_name(stream, what)
    return stream, name if count == 1 else f"{name}+{count - 1}"


def span_name(stream: str, what: Task | str) -> str:
    """What the work of a task on `stream` is called."""
    arrived = stream == UPDATE and isinstance(what, Task) and what.kind is TaskKind.SWAP_OUT
    return f"gradients {what}" if arrived else str(what)  # their norm, their sum with earlier ones


class _Lowering:
    """Tasks to jobs. Runs of the same pack's micro-batches, between which nothing else is issued, become one job."""

    def __init__(self, plan: Plan, costs: CostTable, machine: Machine) -> None:
        self._plan = plan
        self._costs = costs
        self._machine = machine
        self._times = _PackTimes(costs, None if plan.policy.fuse_last_pack else plan.packing.fused)
        self._runs = _merged(plan.tasks)
        self._places = {task: place for place, task in enumerate(plan.tasks) if task.kind in _RUNS}
        self._rounds = 1 if plan.policy.grouping else plan.micro_batches
        self.jobs: list[Job] = []
        self.names: list[tuple[str, Task | str, int]] = []  # stream, what it is, how many tasks in one
        self._arrived: dict[int, int] = {}  # pack -> its swap-in
        self._stashed: dict[tuple[int, int], int] = {}  # (pack, micro-batch) -> its stash's way back
        self._gone: dict[int, int] = {}  # pack -> its gradients' way out
        self._updated: dict[str, int] = {}  # parameter -> the update of it
        self._last: dict[str, int] = {}  # stream -> the last job on it
        self._compute_after: list[int] = []  # what the next compute job waits for
        self._swap_in_after: list[int] = []
        self._leaving: int | None = None
        self._norms: list[int] = []
        self._updates: list[int] = []
        self._sent: Counter[int] = Counter()  # pack -> how often its gradients have left in this step

    def step(self) -> tuple[int, int]:
        """Queues one step; returns the places of its first job and behind its last."""
        first = len(self.jobs)
        self._sent.clear()
        resident = self._plan.resident_set
        if resident.weight_bytes:
            self._compute_after.append(self._copy_in(RESIDENT_SET, resident.weight_bytes, self._owner_updates(("",))))
        for task, count in self._runs:
            self._issue(task, count)
        if resident.gradient_bytes:
            out = self._copy_out(RESIDENT_SET, resident.gradient_bytes)
            update = self._update(RESIDENT_SET, resident.update_elements, (out,))
            self._updated[""] = update
        return first, len(self.jobs)

    def busy_ms(self, first: int, last: int) -> dict[str, float]:
        busy = dict.fromkeys(STREAMS, 0.0)
        for place in range(first, last):
            busy[self.names[place][0]] += self.jobs[place].duration_ms
        return busy

    def tasks_of(self, what: Task | str, count: int) -> tuple[Task, ...]:
        """The tasks that became one job."""
        if isinstance(what, str):
            return ()
        place = self._places.get(what, 0)
        return (what,) if count == 1 else self._plan.tasks[place : place + count]

    # ---- one task

    def _issue(self, task: Task, count: int) -> None:
        pack = self._plan.packs[task.pack]
        match task.kind:
            case TaskKind.FORWARD | TaskKind.FUSED | TaskKind.BACKWARD:
                self._run(task, count)
            case TaskKind.STASH_OUT | TaskKind.STASH_IN:
                self._move_stash(task, pack)
            case TaskKind.NORM | TaskKind.UPDATE | TaskKind.UPDATE_ON_DEVICE:
                self._finish(task, pack)
            case _:
                self._swap(task, pack)

    def _swap(self, task: Task, pack: Pack) -> None:
        match task.kind:
            case TaskKind.SWAP_IN:
                after = self._owner_updates(pack.parameters)
                self._arrived[task.pack] = self._copy_in(task, pack.weight_bytes, after)
            case TaskKind.EVICT:
                self._swap_in_after = [self._last[COMPUTE]] if COMPUTE in self._last else []
            case TaskKind.SWAP_OUT:
                self._swap_out(task, pack)
            case _:
                assert task.kind is TaskKind.FREE_GRADIENTS, task
                self._compute_after.append(self._gone[task.pack])

    def _move_stash(self, task: Task, pack: Pack) -> None:
        if self._leaving is not None:
            # Compute goes on over the memory of the last stash that left only when its copy is done.
            self._compute_after.append(self._leaving)
            self._leaving = None
        nbytes = _stash_bytes(pack, self._costs)
        if task.kind is TaskKind.STASH_OUT:
            self._leaving = self._copy_out(task, nbytes)
        else:
            self._stashed[task.pack, task.micro_batch] = self._copy_in(task, nbytes, self._latest(SWAP_OUT))

    def _finish(self, task: Task, pack: Pack) -> None:
        if task.kind is TaskKind.NORM:
            self._norms.append(self._add(UPDATE, task, 0.0, tuple(self._norms)))
            return
        if task.kind is TaskKind.UPDATE:
            after = (self._gone[task.pack], *self._norms[-1:])
            done = self._update(task, pack.update_elements, after)
            self._updates.append(done)
        else:
            duration = pack.update_elements / self._machine.device_update_elements_per_ms
            done = self._compute(task, duration, tuple(self._norms[-1:]))
        self._updated.update(dict.fromkeys(pack.owned, done))

    def _run(self, task: Task, count: int) -> None:
        arrived = [self._arrived[task.pack]] if task.pack in self._arrived else []
        stash = self._stashed.pop((task.pack, task.micro_batch), None)
        after = (*arrived, *self._compute_after, *(() if stash is None else (stash,)))
        self._compute_after = []
        first = task.pack in self._plan.packing.forward[:1] or not self._plan.packing.forward
        duration = self._times.of(task.kind, self._plan.packs[task.pack], first and task.kind is not TaskKind.BACKWARD)
        self._compute(task, count * duration, after, count)

    def _swap_out(self, task: Task, pack: Pack) -> None:
        policy, updates = self._plan.policy, self._updates
        # Where only a few wait, the host waits for a slab that an earlier update has done with.
        full = not policy.gradients_wait and len(updates) >= policy.gradient_slabs
        freed = (updates[-policy.gradient_slabs],) if full else ()
        out = self._gone[pack.index] = self._copy_out(task, pack.gradient_bytes, freed)
        norm_ms = pack.update_elements / self._machine.norm_elements_per_ms
        duration = _ADDITION * norm_ms if self._sent[pack.index] else 0.0
        self._sent[pack.index] += 1
        measured = policy.deferred_update and self._sent[pack.index] == self._rounds
        if measured or duration:
            done = self._add(UPDATE, task, duration + norm_ms * measured, (out,), self._host_demand())
            self._norms += [done] if measured else []

    def _owner_updates(self, parameters: tuple[str, ...]) -> tuple[int, ...]:
        return tuple({self._updated[name] for name in parameters if name in self._updated})

    # ---- jobs

    def _compute(self, name: Task | str, duration_ms: float, after: tuple[int, ...], tasks: int = 1) -> int:
        demands = (("cores", 1.0),) if self._machine.beside_update < 1.0 else ()
        issued = self._host(name, self._machine.task_ms * tasks)
        extra = 0.0 if self._machine.copies_overlap else self._machine.task_ms * tasks
        return self._add(COMPUTE, name, duration_ms + extra, (*issued, *after), demands, tasks)

    def _copy_in(self, name: Task | str, nbytes: int, updates: tuple[int, ...]) -> int:
        machine = self._machine
        issued = self._host(name, machine.task_ms, updates)
        duration = machine.swap_ms + nbytes / machine.swap_in_bytes_per_ms
        after = (*issued, *updates, *self._swap_in_after)
        return self._add(SWAP_IN, name, duration, after, self._link_demand(machine.swap_in_bytes_per_ms))

    def _copy_out(self, name: Task | str, nbytes: int, freed: tuple[int, ...] = ()) -> int:
        machine = self._machine
        issued = self._host(name, machine.task_ms, freed)
        duration = machine.swap_ms + nbytes / machine.swap_out_bytes_per_ms
        after = (*issued, *freed, *self._latest(COMPUTE))
        return self._add(SWAP_OUT, name, duration, after, self._link_demand(machine.swap_out_bytes_per_ms))

    def _update(self, name: Task | str, elements: int, after: tuple[int, ...]) -> int:
        duration = self._machine.update_ms + elements / self._machine.update_elements_per_ms
        return self._add(UPDATE, name, duration, after, self._host_demand())

    def _host(self, name: Task | str, duration_ms: float, after: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The host's part in a task; where nothing overlaps, it is part of the task itself."""
        if not self._machine.copies_overlap or (not duration_ms and not after):
            return ()
        return (self._add(HOST, name, duration_ms, after),)

    def _latest(self, stream: str) -> tuple[int, ...]:
        return (self._last[stream],) if stream in self._last else ()

    def _link_demand(self, bytes_per_ms: float) -> tuple[tuple[str, float], ...]:
        demands = [("link", bytes_per_ms), ("host memory", bytes_per_ms)]
        if self._machine.beside_update < 1.0 and not self._machine.copies_overlap:
            demands.append(("cores", 1.0))
        return tuple(demands)

    def _host_demand(self) -> tuple[tuple[str, float], ...]:
        machine = self._machine
        demands = [("host memory", machine.update_elements_per_ms * machine.update_bytes_per_element)]
        if machine.beside_update < 1.0:
            demands.append(("cores", 1.0))
        return tuple(demands)

    def _add(
        self,
        stream: str,
        name: Task | str,
        duration_ms: float,
        after: tuple[int, ...],
        demands: tuple[tuple[str, float], ...] = (),
        count: int = 1,
    ) -> int:
        lane = stream if stream == UPDATE or self._machine.copies_overlap else COMPUTE
        if stream != UPDATE and not self._plan.policy.overlap_update:
            after = (*after, *self._latest(UPDATE))
        self.jobs.append(Job((lane,), duration_ms, after, demands))
        self.names.append((stream, name, count))
        place = len(self.jobs) - 1
        self._last[stream] = place
        return place


class _PackTimes:
    """How long one micro-batch takes through a pack; `parked`: the one whose backward pass begins with the loss."""

    def __init__(self, costs: CostTable, parked: Pack | None) -> None:
        self._costs = costs
        self._parked = parked
        self._known: dict[tuple[TaskKind, tuple[int, ...]], float] = {}

    def of(self, kind: TaskKind, pack: Pack, first: bool) -> float:
        known = self._known.get((kind, pack.positions))
        if known is None:
            known = self._known[kind, pack.positions] = self._sum(kind, pack)
        return known + (self._costs.head_ms if first else 0.0)

    def _sum(self, kind: TaskKind, pack: Pack) -> float:
        costs = [self._costs.costs[p] for p in pack.positions]
        if kind is TaskKind.FORWARD:
            return sum(cost.forward_ms for cost in costs)
        if kind is TaskKind.BACKWARD:
            tail_ms = self._costs.tail_ms if pack is self._parked else 0.0
            return tail_ms + sum(cost.backward_ms for cost in costs)
        return self._costs.tail_ms + sum(cost.fused_ms for cost in costs)


def _merged(tasks: tuple[Task, ...]) -> list[tuple[Task, int]]:
    """Tasks, and how many runs of further micro-batches through the same pack follow each."""
    merged: list[tuple[Task, int]] = []
    for task in tasks:
        if merged and task.kind in _RUNS:
            before, count = merged[-1]
            if (before.kind, before.pack) == (task.kind, task.pack):
                merged[-1] = (before, count + 1)
                continue
        merged.append((task, 1))
    return merged


def with_faster(machine: Machine, what: str, factor: float) -> Machine:
    """The machine with the link ("swap_in", "swap_out"), or the host's updates ("update"), `factor` times as fast."""
    if what == UPDATE:
        return replace(
            machine,
            update_elements_per_ms=machine.update_elements_per_ms * factor,
            norm_elements_per_ms=machine.norm_elements_per_ms * factor,
            update_bytes_per_element=machine.update_bytes_per_element / factor,
        )
    if what == SWAP_IN:
        return replace(
            machine,
            swap_in_bytes_per_ms=machine.swap_in_bytes_per_ms * factor,
            link_bytes_per_ms=machine.link_bytes_per_ms * factor,
        )
    assert what == SWAP_OUT, what
    return replace(
        machine,
        swap_out_bytes_per_ms=machine.swap_out_bytes_per_ms * factor,
        link_bytes_per_ms=machine.link_bytes_per_ms * factor,
    )
