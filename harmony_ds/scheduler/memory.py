"""Counts the device bytes that are alive at each task of a plan.

`activation_bytes` of a task is everything that autograd and the code between the layers hold while it runs: waiting
micro-batches, the stash, gradients, the working memory of the call. Weights come on top, from swap-in to evict.

`DeviceMemory` has the table of what each kind of task allocates and releases. What a micro-batch adds in a pack comes from
`PackBytes`, worked out once per pack, and totals are carried from task to task: a plan may have ten thousand tasks.

In tests/scheduler/test_memory.py, `test_a_plan_of_two_packs_and_two_micro_batches_by_hand` adds up a whole plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.crossing import waiting_bytes
from harmony_ds.scheduler.pack_bytes import PackBytes, with_stash_on_host
from harmony_ds.scheduler.plan import Pack, Task, TaskKind

_STASH_MOVES = (TaskKind.STASH_OUT, TaskKind.STASH_IN)
_LEAVE_AFTER_RUNS = (TaskKind.STASH_OUT, TaskKind.CROSSING_OUT, TaskKind.CROSSING_GRADIENTS_OUT)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Per task: bytes of swapped-in weights, and of everything else but what stays from step to step; on which device."""

    weight_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def device_peaks(self) -> tuple[int, ...]:
        """The most on each device."""
        peaks = [0] * (1 + max(self.devices, default=0))
        for device, weights, rest in zip(self.devices, self.weight_bytes, self.activation_bytes, strict=True):
            peaks[device] = max(peaks[device], weights + rest)
        return tuple(peaks)


def walk_memory(
    packs: tuple[Pack, ...],
    tasks: tuple[Task, ...],
    costs: CostTable,
    others: Mapping[int, CostTable] | None = None,
    shared_losses: Sequence[tuple[int, ...]] = (),
    slices_from_host: bool = False,
    forwarded: Sequence[int] = (),
) -> MemoryProfile:
    """Return the bytes alive while each task runs.

    Args:
        others: costs by micro-batch, where they are not `costs`.
        shared_losses: sets of micro-batches that share a loss.
        slices_from_host: see `Policy`.
        forwarded: micro-batches whose forward pass ran before the first task.
    """
    walks = MemoryWalks(costs, slices_from_host)
    return walks.walk(packs, tasks, others=others, shared_losses=shared_losses, forwarded=forwarded)


class CostView:
    """The costs of micro-batches as they count in one plan, and what they add up to in its packs.

    Attributes:
        measured: the table as it was measured.
        costs: the same; with each pack's own stash, where stashes go to the host.
        packs: `packs[i]` is of pack number i. Packs that have calls are numbered first (see `plan.Packing`): there are
            no gaps.
        fused: the position at which the fused pack begins.
        backward_ends: the first position that a gradient flows through.
        loss_bytes: a micro-batch's loss and its scaled copy.
    """

    def __init__(self, measured: CostTable, costs: CostTable, packs: list[PackBytes]) -> None:
        self.measured = measured
        self.costs = costs
        self.packs = packs
        self.fused = max(pack.first for pack in packs)
        needing = [position for position, cost in enumerate(costs.costs) if cost.needs_backward]
        self.backward_ends = min(needing, default=0)
        self.loss_bytes = 2 * costs.scalar_bytes
        self._crossing_bytes: dict[tuple[TaskKind, int], int] = {}

    def crossing_bytes(self, task: Task) -> int:
        """Return the bytes of a micro-batch that a task moves between its pack and the next one."""
        key = task.kind, task.pack
        if key not in self._crossing_bytes:
            self._crossing_bytes[key] = self._count_crossing(task.kind, self.packs[task.pack])
        return self._crossing_bytes[key]

    def _count_crossing(self, kind: TaskKind, pack: PackBytes) -> int:
        match kind:
            case TaskKind.CROSSING_OUT:
                return waiting_bytes(self.costs.crossing, pack.last + 1)
            case TaskKind.CROSSING_IN:
                return waiting_bytes(self.costs.crossing, pack.first)
            case TaskKind.CROSSING_GRADIENTS_OUT:
                return self.costs.crossing_gradient_bytes(pack.first, self.fused)
            case _:
                return self.costs.crossing_gradient_bytes(pack.last + 1, self.fused)


class MemoryWalks:
    """Walks of many task lists, over packs of one model: what a micro-batch adds in a pack is worked out once."""

    def __init__(self, costs: CostTable, slices_from_host: bool = False) -> None:
        self._costs = costs
        self._slices_from_host = slices_from_host
        # Both by the calls that stash more because a pack begins there; None: no stash goes to the host.
        self._tables: dict[frozenset[int] | None, CostTable] = {None: costs}
        self._known: dict[tuple[int, int, frozenset[int] | None], PackBytes] = {}

    def walk(
        self,
        packs: tuple[Pack, ...],
        tasks: tuple[Task, ...],
        counts: Sequence[int] = (),
        others: Mapping[int, CostTable] | None = None,
        shared_losses: Sequence[tuple[int, ...]] = (),
        forwarded: Sequence[int] = (),
    ) -> MemoryProfile:
        """Return the bytes alive while each task runs.

        Args:
            counts: how many micro-batches each one stands for; empty: for itself. A task of one that stands for several
                takes 0 bytes: the micro-batches before and after it in the plan show what running takes.
            others, shared_losses, forwarded: see `walk_memory`.
        """
        device_count = 1 + max(pack.device for pack in packs)
        kinds = {task.kind for task in tasks}
        # On several devices each pack has what it takes for itself, as it has where its stash waits on the host.
        stash_on_host = device_count > 1 or not kinds.isdisjoint(_STASH_MOVES) or self._slices_from_host
        view = self.view(packs, stash_on_host)
        other_views = self._views_by_micro_batch(packs, others or {}, stash_on_host)
        devices = [
            DeviceMemory(packs, view, other_views, counts, shared_losses, self._slices_from_host)
            for _ in range(device_count)
        ]
        swapped_in = {task.pack for task in tasks if task.kind is TaskKind.SWAP_IN}
        for pack in packs:
            if not pack.positions and pack.index not in swapped_in:  # an earlier part of the step brought it
                devices[pack.device].load_weights(pack.index)
        if forwarded:
            for micro_batch, stashing in _packs_with_stash(tasks, forwarded).items():
                for number, device in enumerate(devices):
                    device.hold_forwarded(micro_batch, [pack for pack in stashing if packs[pack].device == number])
        device_of_task = [packs[task.pack].device for task in tasks] if device_count > 1 else [0] * len(tasks)
        held = [devices[device].run_task(task) for device, task in zip(device_of_task, tasks, strict=True)]
        weights, activations = zip(*held, strict=True) if held else ((), ())
        return MemoryProfile(weights, activations, tuple(device_of_task))

    def view(self, packs: tuple[Pack, ...], stash_on_host: bool) -> CostView:
        """Return what micro-batches add in these packs; `stash_on_host`: whether any stash waits there."""
        cuts = None
        if stash_on_host:
            calls = self._costs.costs
            firsts = {pack.positions[0] for pack in packs if pack.positions}
            cuts = frozenset(first for first in firsts if calls[first].stash.again_at_cut_bytes)
            if cuts not in self._tables:
                self._tables[cuts] = with_stash_on_host(cuts, self._costs)
        costs = self._tables[cuts]
        found: list[PackBytes] = []
        for pack in packs:
            if pack.positions:
                assert len(found) == pack.index, "packs without calls come last"
                key = pack.positions[0], pack.positions[-1], cuts
                if key not in self._known:
                    self._known[key] = PackBytes(pack, costs, self._slices_from_host)
                found.append(self._known[key])
        return CostView(self._costs, costs, found)

    def _views_by_micro_batch(
        self, packs: tuple[Pack, ...], others: Mapping[int, CostTable], stash_on_host: bool
    ) -> dict[int, CostView]:
        """Return a view for each micro-batch; micro-batches of the same table share one."""
        views: list[CostView] = []
        by_micro_batch: dict[int, CostView] = {}
        for micro_batch, costs in others.items():
            view = next((known for known in views if known.measured is costs), None)
            if view is None:
                view = MemoryWalks(costs, self._slices_from_host).view(packs, stash_on_host)
                views.append(view)
            by_micro_batch[micro_batch] = view
        return by_micro_batch


def _packs_with_stash(tasks: Sequence[Task], forwarded: Sequence[int]) -> dict[int, list[int]]:
    """Return, by micro-batch whose forward pass ran before the first of `tasks`, the packs whose stash is on the device."""
    returning = {(task.pack, task.micro_batch) for task in tasks if task.kind is TaskKind.STASH_IN}
    found: dict[int, list[int]] = {micro_batch: [] for micro_batch in forwarded}
    for task in tasks:
        is_held = task.micro_batch in found and (task.pack, task.micro_batch) not in returning
        if task.kind is TaskKind.BACKWARD and is_held:
            found[task.micro_batch].append(task.pack)
    return found


class _Total:
    """A sum of bytes, of all owners that count to it."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class _BytesByOwner:
    """Bytes by owner (a pack, a micro-batch, or both), which count to a total."""

    __slots__ = ("_by_owner", "_total")

    def __init__(self, total: _Total) -> None:
        self._total = total
        self._by_owner: dict[object, tuple[int, int]] = {}

    def set(self, owner: object, nbytes: int, times: int = 1) -> None:
        """Set the bytes of `owner` to `nbytes`, whatever they were; they count so many `times`."""
        before, counted = self._by_owner.get(owner, (0, 0))
        self._total.nbytes += times * nbytes - counted * before
        self._by_owner[owner] = nbytes, times

    def add(self, owner: object, nbytes: int, times: int = 1) -> None:
        """Add to the bytes of `owner`, or take from them what they are at most; they count so many `times`."""
        before, _ = self._by_owner.get(owner, (0, 0))
        self.set(owner, max(0, before + nbytes), times)

    def release(self, owner: object) -> int:
        """Set the bytes of `owner` to none; return what they were, counted once."""
        held = self._by_owner.pop(owner, None)
        if held is None:
            return 0
        nbytes, times = held
        self._total.nbytes -= times * nbytes
        return nbytes

    def __contains__(self, owner: object) -> bool:
        return owner in self._by_owner

    def __len__(self) -> int:
        return len(self._by_owner)


class DeviceMemory:
    """The bytes on one device, task by task.

    In this table m is the task's micro-batch and p its pack. "All" is what all micro-batches hold on the device, without
    weights and gradients, after the task has released what stands in the second column. The peak of a task is the third
    column, and the weights and gradients that are there.

        task                     releases first        peak                             holds afterwards
        I swap in                                      all                              weights of p
        F forward                waiting of m          all + forward peak               waiting of m, stash of m for p
        K forward for graph      waiting of m          all + forward peak with graphs   the same, and the graph of m in p
        L fused                  waiting of m          all + fused peak                 waiting of m, gradients of p
        B backward               waiting of m,         all + what m holds between its   waiting of m, gradients of p
                                 stash of m for p      passes + backward peak
        P backward from graph    the same, and the     the same, recomputing nothing    the same
                                 graph of m in p
        S stash out              stash of m for p      all + the copy that leaves       that copy, until the next S or T
        T stash in               the copy that left    all                              returned stash of m for p, until B
        X, V crossing out        what crosses of m     all + what crosses of m          that, until the next run is over
        Y, Z crossing in                               all                              what crosses of m, until its run
        M move, W move back                            all                              waiting of m
        G free gradients         gradients of p        all
        D update on device                             all + update bytes of p          no gradients of p
        E evict                                        all                              no weights of p

    The gradients of p are there from the beginning of L, B or P. All tasks that compute have the table's margin on top.

    "Waiting of m" is what the micro-batch holds while others run, without its stash: before a pack runs forward, the
    waiting bytes of its first call; between the passes, `_between_passes` and the gradients that wait for earlier
    packs; when no gradient flows any further, its loss. "What crosses of m" is the part of it that X and V move: its
    crossing values before p's next pack, or the gradients that wait for the packs before p. A micro-batch that has gone
    on to another device holds on this one what it held when it left.

    Where slices take their inputs from the host, no stash is there in B, L has sent its own away before the loss, and what
    S, X and V send away is gone after them.
    """

    def __init__(
        self,
        packs: tuple[Pack, ...],
        view: CostView,
        other_views: Mapping[int, CostView],
        counts: Sequence[int],
        shared_losses: Sequence[tuple[int, ...]],
        slices_from_host: bool,
    ) -> None:
        self._packs = packs
        self._slices_from_host = slices_from_host
        self._default_view = self._view = view  # `_view`: of the task that runs
        self._other_views = other_views  # by micro-batch
        self._counts = counts
        self._first_to_propagate = {micro_batches[-1]: micro_batches[:-1] for micro_batches in shared_losses}
        self._last_to_propagate = {micro_batches[0] for micro_batches in shared_losses}
        self._weight_total, self._gradient_total, self._held_total = _Total(), _Total(), _Total()
        held = self._held_total  # by micro-batches, beside what leaves
        self._weights = _BytesByOwner(self._weight_total)  # by pack
        self._gradients = _BytesByOwner(self._gradient_total)  # by pack
        self._updated: set[int] = set()  # packs, on the device
        self._waiting = _BytesByOwner(held)  # by micro-batch: without its stash
        self._stash = _BytesByOwner(held)  # by micro-batch: what of it is on the device, never having left
        self._returned_stash = _BytesByOwner(held)  # by (pack, micro-batch)
        self._leaving_bytes = 0  # stash on its way to the host
        self._leaving_crossing_bytes = 0  # the same of crossing tensors
        self._returned_crossing = _BytesByOwner(held)  # by micro-batch
        self._graphs = _BytesByOwner(held)  # by (pack, micro-batch)
        self._outputs = _BytesByOwner(held)  # by micro-batch: of the model, until the loss that it shares has been made
        # By pack: sums of gradients, while those of one shared loss are added up:
        self._copied_sums = _BytesByOwner(held)
        self._held_between_passes: dict[int, int] = {}  # by micro-batch, where it is not what the table says

    def run_task(self, task: Task) -> tuple[int, int]:
        """Return the bytes of weights, and of everything else, while `task` runs; allocate and release what it does."""
        if self._other_views:
            self._view = self._other_views.get(task.micro_batch, self._default_view)
        compute = _COMPUTING.get(task.kind)
        if compute is not None:
            peak = compute(self, task, self._view.packs[task.pack])
            self._leaving_crossing_bytes = 0  # computing goes on when the copy is done
            if self._times(task) > 1:  # what running takes is shown by the micro-batches around those it stands for
                return 0, 0
            return self._weight_total.nbytes, peak + self._view.costs.margin_bytes + self._gradient_total.nbytes
        held = self._run_other(task)
        # Between its run and what leaves after it, one that stands for several holds what no several ever do.
        return (0, 0) if task.kind in _LEAVE_AFTER_RUNS and self._times(task) > 1 else held

    def load_weights(self, index: int) -> None:
        """Hold the weights of a pack; of a pack without calls its gradients, too, which any call may add to."""
        pack = self._packs[index]
        if pack.positions:
            self._weights.set(index, self._view.packs[index].weight_bytes)
        else:
            self._weights.set(index, pack.weight_bytes)
            self._gradients.set(index, pack.gradient_bytes)

    def hold_forwarded(self, micro_batch: int, stashing: Sequence[int]) -> None:
        """Hold what a micro-batch has whose forward pass ran before the first task; `stashing`: packs with stash here."""
        view = self._other_views.get(micro_batch, self._default_view)
        self._waiting.set(micro_batch, view.costs.held_bytes + view.loss_bytes)
        if not self._slices_from_host:  # then it waits on the host
            self._stash.set(micro_batch, sum(view.packs[pack].stash_bytes for pack in stashing))

    # ---- tasks that compute: they return the peak, without weights, gradients and the margin

    def _run_forward(self, task: Task, pack: PackBytes) -> int:
        micro_batch, times = task.micro_batch, self._times(task)
        keeps_graph = task.kind is TaskKind.FORWARD_FOR_GRAPH
        self._release_waiting(micro_batch)
        peak = self._all_bytes + pack.forward_peak_bytes(keeps_graph)
        if keeps_graph:
            self._graphs.set((task.pack, micro_batch), pack.kept_graph_bytes, times)
        following, calls = pack.last + 1, self._view.costs.costs
        if following < len(calls):
            self._waiting.set(micro_batch, calls[following].waiting.alive_bytes, times)
        else:  # the end of its forward pass
            self._waiting.set(micro_batch, self._between_passes(task), times)
            self._outputs.set(micro_batch, self._view.costs.output_bytes, times)
        self._stash.add(micro_batch, pack.stash_bytes, times)
        return max(peak, self._all_bytes)

    def _run_fused(self, task: Task, pack: PackBytes) -> int:
        micro_batch = task.micro_batch
        sums_exist = self._add_gradients(task, pack)
        self._release_waiting(micro_batch)
        peak = self._all_bytes + pack.fused_peak_bytes(sums_exist)
        if micro_batch in self._first_to_propagate:
            # The outputs of all that share the loss are freed before it is propagated back from.
            freed_bytes = sum(map(self._freed_output_bytes, self._first_to_propagate[micro_batch]))
            peak = max(peak - freed_bytes, self._all_bytes + pack.making_peak_bytes(sums_exist))
        # What it holds from before this pack waited with it; what came with this pack goes with its graph.
        from_before = min(self._view.costs.held_bytes, pack.after_forward_bytes)
        self._held_between_passes[micro_batch] = from_before + self._view.loss_bytes
        self._wait_after_backward(task, pack)
        return max(peak, self._all_bytes)

    def _freed_output_bytes(self, micro_batch: int) -> int:
        """Return what of the outputs that a micro-batch holds is freed when the loss that it shares has been made."""
        if micro_batch not in self._outputs:
            return 0
        return self._other_views.get(micro_batch, self._default_view).measured.output_freed_bytes

    def _run_backward(self, task: Task, pack: PackBytes) -> int:
        micro_batch, from_graph = task.micro_batch, task.kind is TaskKind.BACKWARD_FROM_GRAPH
        sums_exist = self._add_gradients(task, pack)
        ends_model = self._ends_model(pack)
        if ends_model and not pack.runs_with_loss:
            self._outputs.release(micro_batch)
        own_stash_bytes = pack.stash_bytes if self._slices_from_host else self._take_stash(task, pack)
        self._release_waiting(micro_batch)
        if from_graph:
            self._graphs.release((task.pack, micro_batch))
        running = pack.backward_peak_bytes(from_graph, sums_exist) - pack.stash_bytes + own_stash_bytes
        peak = self._all_bytes + self._between_passes(task) + running
        if ends_model and pack.runs_with_loss:  # then it is a head's input, which has now been propagated through
            self._outputs.release(micro_batch)
        self._wait_after_backward(task, pack)
        peak = max(peak, self._all_bytes)
        if micro_batch in self._last_to_propagate:
            self._copied_sums.release(task.pack)
        return peak

    def _add_gradients(self, task: Task, pack: PackBytes) -> bool:
        """Hold the sums of the pack's gradients; return whether an earlier micro-batch has left some.

        While the micro-batches of a shared loss add up theirs, the sums of the others are kept apart.
        """
        sums_exist = task.pack in self._gradients
        if not sums_exist:
            self._gradients.set(task.pack, pack.gradient_bytes)
        elif task.micro_batch in self._first_to_propagate:
            self._copied_sums.set(task.pack, pack.copied_sums_bytes)
        return sums_exist

    def _release_waiting(self, micro_batch: int) -> None:
        """Release what a micro-batch holds while it waits, which running it counts, and what came back of it."""
        self._waiting.release(micro_batch)
        if self._returned_crossing:
            self._returned_crossing.release(micro_batch)

    def _take_stash(self, task: Task, pack: PackBytes) -> int:
        """Release the micro-batch's stash for the pack, which running it backward counts; return its bytes."""
        if self._returned_stash and self._returned_stash.release((task.pack, task.micro_batch)):
            return pack.returning_bytes
        self._stash.add(task.micro_batch, -pack.stash_bytes, self._times(task))
        return pack.stash_bytes

    def _wait_after_backward(self, task: Task, pack: PackBytes) -> None:
        """Hold what the micro-batch keeps when it has been propagated through the pack."""
        if pack.first <= self._view.backward_ends:
            waiting = self._view.loss_bytes
        else:
            waiting = self._between_passes(task) + pack.input_gradient_bytes
        self._waiting.set(task.micro_batch, waiting, self._times(task))

    # ---- tasks that compute nothing

    def _run_other(self, task: Task) -> tuple[int, int]:
        working = 0
        match task.kind:
            case TaskKind.SWAP_IN:
                self.load_weights(task.pack)
            case TaskKind.STASH_OUT:
                # The copy leaves the device when the next one moves.
                pack = self._view.packs[task.pack]
                self._leaving_bytes = pack.stash_bytes
                self._stash.add(task.micro_batch, -pack.stash_bytes, self._times(task))
            case TaskKind.STASH_IN:
                self._leaving_bytes = 0
                returning_bytes = self._view.packs[task.pack].returning_bytes
                self._returned_stash.set((task.pack, task.micro_batch), returning_bytes)
            case TaskKind.CROSSING_OUT | TaskKind.CROSSING_GRADIENTS_OUT:
                nbytes = self._view.crossing_bytes(task)
                waiting = self._waiting.release(task.micro_batch)
                self._waiting.set(task.micro_batch, max(0, waiting - nbytes), self._times(task))
                self._leaving_crossing_bytes = min(waiting, nbytes)
            case TaskKind.CROSSING_IN | TaskKind.CROSSING_GRADIENTS_IN:
                self._returned_crossing.set(task.micro_batch, self._view.crossing_bytes(task))
            case TaskKind.MOVE:
                first = self._view.costs.costs[self._view.packs[task.pack].first]
                self._waiting.set(task.micro_batch, first.waiting.alive_bytes, self._times(task))
            case TaskKind.MOVE_BACK:
                following = self._view.costs.costs[self._view.packs[task.pack].last + 1]
                gradient_bytes = following.backward.input_gradient_bytes
                waiting = self._between_passes(task) + gradient_bytes
                self._waiting.set(task.micro_batch, waiting, self._times(task))
            case TaskKind.FREE_GRADIENTS:
                self._gradients.release(task.pack)
            case TaskKind.UPDATE_ON_DEVICE:
                working = self._packs[task.pack].update_bytes
            case (
                TaskKind.EVICT | TaskKind.GATHER | TaskKind.REDUCE | TaskKind.SWAP_OUT | TaskKind.NORM | TaskKind.UPDATE
            ):
                pass  # what was there before is there while it runs
            case _:
                raise AssertionError(f"it is not known what {task.kind} takes")
        held = self._weight_total.nbytes, self._gradient_total.nbytes + self._all_bytes + working
        if self._slices_from_host:
            self._leaving_bytes = self._leaving_crossing_bytes = 0
        if task.kind is TaskKind.EVICT:
            self._weights.release(task.pack)
        if task.kind is TaskKind.UPDATE_ON_DEVICE:
            self._free_updated(task.pack)
        return held

    def _free_updated(self, updated: int) -> None:
        """Release gradients of packs that have been updated on the device.

        Gradients of a parameter that resident packs share are kept until the pack that owns the parameter is updated.
        """
        self._updated.add(updated)
        done = {name for index in self._updated for name in self._packs[index].owned}
        for index in self._updated:
            if done.issuperset(self._packs[index].parameters):
                self._gradients.release(index)

    # ---- what is held

    @property
    def _all_bytes(self) -> int:
        """Everything that micro-batches hold between two tasks, but weights and gradients."""
        return self._held_total.nbytes + self._leaving_bytes + self._leaving_crossing_bytes

    def _between_passes(self, task: Task) -> int:
        """Return what a micro-batch holds from the end of its forward pass on, without its stash."""
        table_says = self._view.costs.held_bytes + self._view.loss_bytes
        return self._held_between_passes.get(task.micro_batch, table_says)

    def _ends_model(self, pack: PackBytes) -> bool:
        return pack.last == len(self._view.costs.costs) - 1

    def _times(self, task: Task) -> int:
        """Return how many micro-batches the task's micro-batch stands for."""
        return self._counts[task.micro_batch] if self._counts else 1


_COMPUTING: dict[TaskKind, Callable[[DeviceMemory, Task, PackBytes], int]] = {
    TaskKind.FORWARD: DeviceMemory._run_forward,
    TaskKind.FUSED: DeviceMemory._run_fused,
    TaskKind.BACKWARD: DeviceMemory._run_backward,
    TaskKind.FORWARD_FOR_GRAPH: DeviceMemory._run_forward,
    TaskKind.BACKWARD_FROM_GRAPH: DeviceMemory._run_backward,
}
