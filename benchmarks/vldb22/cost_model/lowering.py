"""A task graph to jobs on streams, under the cost model of Harmony's scheduler (VLDB'22).

Each device has six streams: swap in, swap out, receive and send (from and to other devices), compute, and its host
process, which hands stashes over and updates. What a job waits for is said in `waits`.

A swap takes longer the more devices are at work: they share the host's link. Weights that stay on the device (`PIN`)
are charged as if they were swapped, as in the original.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import accumulate

from benchmarks.vldb22.cost_model.graph import Content, DeviceTask, DeviceTaskKind, Medium, Mode, Port, TaskGraph
from benchmarks.vldb22.cost_model.profile import PackCosts
from benchmarks.vldb22.cost_model.server import Server
from benchmarks.vldb22.cost_model.waits import Done, Overlapped, Places, Serial
from harmony_ds.scheduler.events import Job


def lower(graph: TaskGraph, costs: PackCosts, machine: Server, overlap: bool) -> list[Job]:
    """Return the jobs of a graph; of a data-parallel one those of device 0, which has the largest share.

    Every job stands after those that it waits for. Times are in ms.
    """
    shop = _Shop(graph, costs, machine, overlap)
    for task in graph.tasks:
        if graph.setup.mode is Mode.PIPELINE or task.device == 0:
            _TaskJobs(shop, task).add()
    return shop.jobs


def taken_with(given: tuple[int, ...], taken: tuple[int, ...]) -> list[list[int]]:
    """For each micro-batch that is given, those that can be taken once its samples are there; all as their sizes."""
    if given == taken:
        return [[size] for size in given]
    ends = list(accumulate(given))
    complete: list[list[int]] = [[] for _ in given]
    for size, end in zip(taken, accumulate(taken), strict=True):
        complete[bisect_left(ends, end)].append(size)
    return complete


class _Lanes:
    """The streams of one device."""

    def __init__(self, device: int) -> None:
        self.swap_in = f"{device} swap in"
        self.swap_out = f"{device} swap out"
        self.receive = f"{device} receive"
        self.send = f"{device} send"
        self.compute = f"{device} compute"
        self.host = f"{device} host"


class _Shop:
    """The jobs so far, and what all tasks need to know."""

    def __init__(self, graph: TaskGraph, costs: PackCosts, machine: Server, overlap: bool) -> None:
        self.jobs: list[Job] = []
        self.tasks = graph.tasks
        self.costs = costs
        self.devices = graph.devices_at_work
        self.swap = machine.swap / self.devices
        self.message = machine.message / self.devices / 2  # written and read: host memory is half duplex
        self.peer = machine.peer
        self.free_ms = machine.free_ms
        self.pipeline = graph.setup.mode is Mode.PIPELINE and graph.setup.devices > 1
        self.waits = Overlapped if overlap else Serial
        self.lanes = {task.device: _Lanes(task.device) for task in graph.tasks}
        self.history: dict[int, list[Done]] = {device: [] for device in self.lanes}
        self.done: dict[int, Done] = {}
        self.taken_with = cache(taken_with)

    def job(self, duration_ms: float, after: Places, *streams: str) -> int:
        self.jobs.append(Job(streams, duration_ms, after))
        return len(self.jobs) - 1


class _TaskJobs:
    """Adds the jobs of one task."""

    def __init__(self, shop: _Shop, task: DeviceTask) -> None:
        history = shop.history[task.device]
        self._shop = shop
        self._task = task
        self._lanes = shop.lanes[task.device]
        self._source = task.taken(Content.INPUT) or task.taken(Content.STASH)
        self._gradient = task.taken(Content.GRADIENT)
        self._stashes = task.given(Content.STASH)
        self._handed = task.given(Content.INPUT if task.kind is DeviceTaskKind.FORWARD else Content.GRADIENT)
        self._done = Done(task)
        self._waits = shop.waits(self._done, history, shop.pipeline)
        if task.kind is not DeviceTaskKind.UPDATE:
            history.append(self._done)
            shop.done[task.index] = self._done

    def add(self) -> None:
        if self._task.kind is DeviceTaskKind.UPDATE:
            self._update()
        elif self._task.kind is DeviceTaskKind.FORWARD:
            self._forward()
        else:
            self._backward()

    def _update(self) -> None:
        peer = self._task.takes[0].peer
        assert peer is not None
        duration_ms = self._shop.costs.update_ms(self._task.first, self._task.last)
        self._shop.job(duration_ms, (self._shop.done[peer].gradients,), self._lanes.host)

    def _forward(self) -> None:
        done = self._done
        for i, size in enumerate(self._task.micro_batches):
            arrived, _ = self._arrivals(i, size)
            done.computed.append(self._compute_forward(i, size, arrived))
            self._hand_on(i, size)
        done.freed = self._shop.job(self._shop.free_ms, self._waits.end(), self._lanes.compute)

    def _compute_forward(self, i: int, size: int, arrived: Places) -> int:
        """Up to each stash in turn: what is stashed inside the pack has to be computed first."""
        costs, compute = self._shop.costs, self._lanes.compute
        first, waits = self._task.first, arrived
        for port in self._stashes:
            if port.first == first:
                copy = self._copy_out(port, i, size, arrived[:1] + self._waits.stash(i))
                waits += self._waits.computation_after(copy)
            else:
                computed = self._shop.job(costs.forward_ms(size, first, port.first), waits, compute)
                copy = self._copy_out(port, i, size, (computed,))
                first, waits = port.first, self._waits.computation_after(copy)
        return self._shop.job(costs.forward_ms(size, first, self._task.last), waits, compute)

    def _backward(self) -> None:
        task, done, shop, compute = self._task, self._done, self._shop, self._lanes.compute
        for i, size in enumerate(task.micro_batches):
            forward_ms = shop.costs.forward_ms(size, task.first, task.last)
            both_ms = shop.costs.backward_ms(size, task.first, task.last)
            arrived, came = self._arrivals(i, size)
            done.recomputed.append(shop.job(forward_ms, arrived, compute))
            if self._gradient and not came:
                came = (self._take(self._gradient, i, size, (done.recomputed[i],)),)
            done.computed.append(shop.job(both_ms - forward_ms, came, compute))
            self._hand_on(i, size)
        self._give_gradients()
        done.freed = shop.job(shop.free_ms, (done.gradients,), compute)

    def _arrivals(self, i: int, size: int) -> tuple[Places, Places]:
        """Queues what micro-batch `i` needs for its first computation, and what may come early for the second."""
        assert self._source is not None
        waits = self._waits
        came: Places = ()
        if i == 0 and waits.weights_come_first:
            self._swap_weights_in()
        arrived: Places = (self._take(self._source, i, size, waits.input(i)),)
        if self._gradient and (early := waits.gradient_before_recomputation(i)) is not None:
            came = (self._take(self._gradient, i, size, early),)
        if i == 0:
            if not waits.weights_come_first:
                self._swap_weights_in()
            arrived += (self._done.weights,)
        return arrived, came

    def _swap_weights_in(self) -> None:
        size = self._shop.costs.state_bytes(self._task.first, self._task.last)
        self._done.weights = self._shop.job(size / self._shop.swap, self._waits.weights(), self._lanes.swap_in)

    def _take(self, port: Port, i: int, size: int, waits: Places) -> int:
        """Return the job that brings an input or a gradient of micro-batch `i`, which has `size` samples."""
        shop = self._shop
        moved = shop.costs.input_bytes(port.first, size)
        if port.peer is None:
            return shop.job(moved / shop.swap, waits, self._lanes.swap_in)
        source = shop.done[port.peer]
        if port.medium is Medium.PEER:
            send = shop.lanes[source.task.device].send
            return shop.job(moved / shop.peer, (source.computed[i], *waits), self._lanes.receive, send)
        ready = source.handed[port.first][i]
        return shop.job(moved / shop.swap, (ready, *waits), self._lanes.swap_in)

    def _hand_on(self, i: int, size: int) -> None:
        """Return an output or a gradient; what goes to another device directly, the receiver fetches."""
        for port in self._handed:
            if port.medium is not Medium.PEER:
                self._done.copied.append(self._copy_out(port, i, size, (self._done.computed[i],)))

    def _copy_out(self, port: Port, i: int, size: int, after: Places) -> int:
        """To the host, and on to the receiver: those of its micro-batches that are complete now."""
        shop = self._shop
        copy = shop.job(shop.costs.input_bytes(port.first, size) / shop.swap, after, self._lanes.swap_out)
        assert port.peer is not None
        target = shop.tasks[port.peer]
        handed = self._done.handed.setdefault(port.first, [])
        for other in shop.taken_with(self._task.micro_batches, target.micro_batches)[i]:
            if port.medium is Medium.MESSAGE:
                to_itself = target.device == self._task.device
                message_ms = 0.0 if to_itself else shop.costs.input_bytes(port.first, other) / shop.message
                handed.append(shop.job(message_ms, (copy,), self._lanes.host))
            else:
                handed.append(copy)
        return copy

    def _give_gradients(self) -> None:
        """All-reduced on the compute stream, as in the original, then to the host."""
        shop, task = self._shop, self._task
        size = shop.costs.state_bytes(task.first, task.last)
        after: Places = (self._done.computed[-1],)
        if any(port.medium is Medium.REDUCE for port in task.gives):
            duration_ms = 2 * (shop.devices - 1) / shop.devices * size / shop.peer
            after = (shop.job(duration_ms, self._waits.end(), self._lanes.compute),)
        self._done.gradients = shop.job(size / shop.swap, after, self._lanes.swap_out)
