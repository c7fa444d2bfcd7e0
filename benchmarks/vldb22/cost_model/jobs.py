"""Tasks to jobs on streams, and their time, under the cost model of Harmony's scheduler (VLDB'22).

Each device has six streams: swap in, swap out, receive and send (from and to other devices), compute, and its host
process, which hands stashes over and updates. With overlap and without:

    serial        overlapped
    W X0 X1       W X0 X1         swap in
        F0  F1          F0 F1     compute
          Y0  Y1          Y0 Y1   swap out

A swap takes longer the more devices are at work: they share the host's link. Weights that stay on the device are charged
as if they were swapped, as in the original.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

from benchmarks.vldb22.cost_model.profile import PackCosts
from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup, Task, Way, tasks_of, way
from harmony_ds.scheduler.events import Job, run_jobs

_GIB = 2**30
_Places = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Server:
    """Bandwidths in bytes per ms at full speed.

    Attributes:
        swap: between the host and the devices, each way; the devices that work share it.
        peer: between two devices, each way.
        message: of the host's memory, when one process hands a tensor to another; the devices that work share it.
        free_ms: what it takes to free a task's memory.
    """

    swap: float
    peer: float
    message: float
    free_ms: float


HARMONY_VLDB22 = Server(swap=11.5 * _GIB / 1000, peer=8.2 * _GIB / 1000, message=16 * _GIB / 1000, free_ms=40.0)
"""Four or eight GTX 1080 Ti on PCIe 3: the defaults of Harmony's scheduler (VLDB'22, msr-fiddle/harmony)."""


def step_ms(setup: Setup, schedule: Schedule, costs: PackCosts, server: Server, overlap: bool) -> float:
    """Return how long one optimizer step takes.

    Args:
        overlap: whether swaps, and hand-overs between tasks, go on while layers are computed.
    """
    return max(run_jobs(lower(setup, schedule, costs, server, overlap)).end_ms)


def lower(setup: Setup, schedule: Schedule, costs: PackCosts, server: Server, overlap: bool) -> list[Job]:
    """Return the jobs of a step; of a data-parallel one those of the first device, which has the largest share.

    Every job stands after those that it waits for. Times are in ms.
    """
    lowering = _Lowering(setup, schedule, costs, server, overlap)
    for turn in range(len(lowering.tasks)):
        _TaskJobs(lowering, turn).add()
    return lowering.jobs


@cache
def taken_with(given: tuple[int, ...], taken: tuple[int, ...]) -> list[list[int]]:
    """For each micro-batch that is given, those that can be taken once its samples are there; all as their sizes."""
    if given == taken:
        return [[size] for size in given]
    ends = list(accumulate(given))
    complete: list[list[int]] = [[] for _ in given]
    for size, end in zip(taken, accumulate(taken), strict=True):
        complete[bisect_left(ends, end)].append(size)
    return complete


@dataclass(slots=True)
class _Done:
    """The places of a task's jobs in the list, for the jobs that wait for them.

    Attributes:
        task: which.
        weights: the swap-in of its weights.
        computed: by micro-batch: the last computation.
        recomputed: by micro-batch: the one before it, in backward tasks.
        copied: by micro-batch: its output, or its gradient, to the host.
        handed: by layer, and by micro-batch of the task that takes it: what lies ready on the host.
        gradients: the copy of its weights' gradients.
        freed: its last job on the compute stream.
    """

    task: Task
    weights: int = -1
    computed: list[int] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    handed: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    gradients: int = -1
    freed: int = -1


class _Lowering:
    """The jobs so far, and what all tasks need to know."""

    def __init__(self, setup: Setup, schedule: Schedule, costs: PackCosts, server: Server, overlap: bool) -> None:
        self.jobs: list[Job] = []
        self.tasks = tasks_of(setup, schedule)
        self.costs = costs
        self.overlap = overlap
        self.replicas = setup.replicas
        at_work = self.replicas if setup.mode is Mode.DATA_PARALLEL else len({task.device for task in self.tasks})
        self.swap = server.swap / at_work
        self.message = server.message / at_work / 2  # written and read: host memory is half duplex
        self.peer = server.peer
        self.free_ms = server.free_ms
        self.pipeline = setup.mode is Mode.PIPELINE and setup.devices > 1
        self.takes_stash = {task.first: task for task in self.tasks if task.is_stashed}
        self.done: list[_Done] = []

    def job(self, duration_ms: float, after: _Places, *streams: str) -> int:
        self.jobs.append(Job(streams, duration_ms, after))
        return len(self.jobs) - 1


class _TaskJobs:
    """Adds the jobs of one task; `i` counts its micro-batches."""

    def __init__(self, lowering: _Lowering, turn: int) -> None:
        self._all = lowering
        self._task = task = lowering.tasks[turn]
        self._before = lowering.done[-1] if turn else None
        self._next = lowering.tasks[turn + 1] if turn + 1 < len(lowering.tasks) else None
        # What ran on this device before it. With overlap, buffers of the last task are taken over as it ends.
        mine = [done for done in lowering.done if done.task.device == task.device]
        self._left, self._left2 = (mine[-n] if len(mine) >= n else None for n in (1, 2))
        self._done = _Done(task)
        lowering.done.append(self._done)

    def add(self) -> None:
        task, done = self._task, self._done
        for i, size in enumerate(task.micro_batches):
            arrived, came = self._arrivals(i, size)
            if task.backward:
                self._compute_backward(i, size, arrived, came)
            else:
                done.computed.append(self._compute_forward(i, size, arrived))
            if self._next is not None and way(task, self._next) is not Way.PEER:  # from a peer the receiver fetches
                layer = task.handed_layer()
                is_message = way(task, self._next) is Way.MESSAGE
                done.copied.append(self._copy_out(layer, self._next, i, (done.computed[i],), is_message))
        if not task.backward:
            done.freed = self._job(self._all.free_ms, self._end(), "compute")
            return
        self._give_gradients()
        done.freed = self._job(self._all.free_ms, (done.gradients,), "compute")
        self._job(self._all.costs.update_ms(task.first, task.last), (done.gradients,), "host")

    def _job(self, duration_ms: float, after: _Places, stream: str) -> int:
        return self._all.job(duration_ms, after, f"{self._task.device} {stream}")

    # ---- computation

    def _compute_forward(self, i: int, size: int, arrived: _Places) -> int:
        """Up to each stash in turn: what is stashed inside the pack has to be computed first."""
        first, waits = self._task.first, arrived
        for layer in range(self._task.first, self._task.last):
            target = self._all.takes_stash.get(layer)
            if target is None:
                continue
            if layer == self._task.first:
                copy = self._copy_out(layer, target, i, arrived[:1] + self._stash(i), is_message=True)
                waits += self._computation_after(copy)
            else:
                computed = self._job(self._all.costs.forward_ms(size, first, layer), waits, "compute")
                copy = self._copy_out(layer, target, i, (computed,), is_message=True)
                first, waits = layer, self._computation_after(copy)
        return self._job(self._all.costs.forward_ms(size, first, self._task.last), waits, "compute")

    def _compute_backward(self, i: int, size: int, arrived: _Places, came: _Places) -> None:
        task, costs = self._task, self._all.costs
        forward_ms, both_ms = (ms(size, task.first, task.last) for ms in (costs.forward_ms, costs.backward_ms))
        self._done.recomputed.append(self._job(forward_ms, arrived, "compute"))
        if task.is_stashed and not came:
            came = (self._take_from_before(i, size, (self._done.recomputed[i],)),)
        self._done.computed.append(self._job(both_ms - forward_ms, came, "compute"))

    # ---- what comes

    def _arrivals(self, i: int, size: int) -> tuple[_Places, _Places]:
        """Queue what micro-batch `i` needs for its first computation, and what may come early for the second."""
        task = self._task
        came: _Places = ()
        if i == 0 and self._weights_come_first():
            self._swap_weights_in()
        if self._before is None:  # from the data loader
            arrived: _Places = (self._swap_in(0, size, self._input(i)),)
        elif task.is_stashed:
            source = next(
                one for one in self._all.done if not one.task.backward and one.task.first <= task.first < one.task.last
            )
            arrived = (self._swap_in(task.first, size, (source.handed[task.first][i], *self._input(i))),)
            early = self._gradient_before_recomputation(i)
            came = () if early is None else (self._take_from_before(i, size, early),)
        else:
            arrived = (self._take_from_before(i, size, self._input(i)),)
        if i == 0:
            if not self._weights_come_first():
                self._swap_weights_in()
            arrived += (self._done.weights,)
        return arrived, came

    def _swap_in(self, layer: int, size: int, after: _Places) -> int:
        return self._job(self._all.costs.input_bytes(layer, size) / self._all.swap, after, "swap in")

    def _swap_weights_in(self) -> None:
        size = self._all.costs.state_bytes(self._task.first, self._task.last)
        self._done.weights = self._job(size / self._all.swap, self._weights(), "swap in")

    def _take_from_before(self, i: int, size: int, waits: _Places) -> int:
        """Return the job that brings what the task before has given for micro-batch `i`, which has `size` samples."""
        source = self._before
        assert source is not None
        layer = source.task.handed_layer()
        if way(source.task, self._task) is not Way.PEER:
            return self._swap_in(layer, size, (source.handed[layer][i], *waits))
        duration_ms = self._all.costs.input_bytes(layer, size) / self._all.peer
        streams = f"{self._task.device} receive", f"{source.task.device} send"
        return self._all.job(duration_ms, (source.computed[i], *waits), *streams)

    # ---- what leaves

    def _copy_out(self, layer: int, target: Task, i: int, after: _Places, is_message: bool) -> int:
        """To the host, and on to the receiver: those of its micro-batches that are complete now."""
        task, nbytes = self._task, self._all.costs.input_bytes
        copy = self._job(nbytes(layer, task.micro_batches[i]) / self._all.swap, after, "swap out")
        for size in taken_with(task.micro_batches, target.micro_batches)[i]:
            ready = copy
            if is_message:
                message_ms = 0.0 if target.device == task.device else nbytes(layer, size) / self._all.message
                ready = self._job(message_ms, (copy,), "host")
            self._done.handed[layer].append(ready)
        return copy

    def _give_gradients(self) -> None:
        """All-reduced on the compute stream, as in the original, then to the host."""
        task, replicas = self._task, self._all.replicas
        size = self._all.costs.state_bytes(task.first, task.last)
        after: _Places = (self._done.computed[-1],)
        if replicas > 1:
            duration_ms = 2 * (replicas - 1) / replicas * size / self._all.peer
            after = (self._job(duration_ms, self._end(), "compute"),)
        self._done.gradients = self._job(size / self._all.swap, after, "swap out")

    # ---- what a job waits for, beside data: one thing after the other, or, with overlap, weights come during the last
    # micro-batch of the task before, inputs two ahead, and nobody waits for copies out

    def _weights_come_first(self) -> bool:
        """Whether the weights are queued before the first input, or after it."""
        first = self._left is None or (self._all.pipeline and not self._task.is_stashed)
        return first or not self._all.overlap

    def _weights(self) -> _Places:
        if self._left is None:
            return ()
        return (self._left.computed[-1],) if self._all.overlap else (self._left.freed,)

    def _input(self, i: int) -> _Places:
        if not self._all.overlap:
            return (self._done.weights,) if i == 0 else self._end() or (self._done.computed[i - 1],)
        if i < 2:
            return self._left_freed() if i else self._second_buffer()
        return (self._done.computed[i - 2],)

    def _stash(self, i: int) -> _Places:
        """Return what the copy of an input that is a stash too waits for, beyond the input itself."""
        if not self._all.overlap:
            return ()
        return (self._done.computed[i - 1],) if i else self._left_freed()

    def _computation_after(self, copy: int) -> _Places:
        """Return what the computation after a stash's copy waits for."""
        return () if self._all.overlap else (copy,)

    def _gradient_before_recomputation(self, i: int) -> _Places | None:
        """Return what the gradient waits for; None: it comes after the recomputation."""
        if not self._all.overlap:
            return None
        if i > 0:
            return (self._done.recomputed[i - 1],)
        if self._left is None:
            return ()
        if not self._all.pipeline or self._left.task.is_stashed:
            return (self._left.recomputed[-1],)
        return self._second_buffer()

    def _end(self) -> _Places:
        """Return the end of a task, or its all-reduce; what goes to other devices is not waited for."""
        return () if self._all.pipeline or self._all.overlap else tuple(self._done.copied[-1:])

    def _left_freed(self) -> _Places:
        return (self._left.freed,) if self._left else ()

    def _second_buffer(self) -> _Places:
        """Free when the task before has only one micro-batch left to compute."""
        if self._left is None:
            return ()
        if len(self._left.computed) > 1:
            return (self._left.computed[-2],)
        return (self._left2.freed,) if self._left2 else ()
