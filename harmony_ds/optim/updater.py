"""The update thread: waits for gradients, measures and clips them, steps the optimizer and casts the weights.

    immediate   update(p) is queued after the swap-out of p; of several in the queue, the pack needed first is first
    deferred    measure(p) is queued after every swap-out, norm() once, then update(p) in forward order

`wait` returns when a pack's weights are updated. An error on the thread is raised as itself in the next caller.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from harmony_ds.offload.host_gradients import GradientTransfer, HostGradients
from harmony_ds.offload.host_store import HostStore, bypass_hooks
from harmony_ds.optim.cores import set_threads
from harmony_ds.optim.host_optimizer import HostOptimizer, Hyper

_FIRST = -1  # the priority of jobs that are no updates
_LAST = 2**31
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Clipping:
    """Treatment of gradients before they are used.

    Attributes:
        max_norm: clip to this global norm (0: not at all).
        loss_scale: factor of the losses.
        skip_overflow: skip the update if any gradient is inf or NaN.
    """

    max_norm: float = 0.0
    loss_scale: float = 1.0
    skip_overflow: bool = False


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """Global norm before clipping, the factor of every gradient, and whether the update is skipped for inf or NaN."""

    total: float
    coefficient: Tensor | None
    overflow: bool

    @staticmethod
    def of(total: Tensor, clipping: Clipping) -> GradientNorm:
        """Return the norm for `clipping`; `total`: the norm of the gradients, which may be scaled."""
        if clipping.loss_scale != 1.0:
            total = total / clipping.loss_scale
        coefficient: Tensor | None = None
        if clipping.max_norm > 0:
            coefficient = torch.clamp(clipping.max_norm / (total + 1e-6), max=1.0)
        if clipping.loss_scale != 1.0:
            coefficient = (torch.ones(()) if coefficient is None else coefficient) / clipping.loss_scale
        value = total.item()
        return GradientNorm(value, coefficient, clipping.skip_overflow and not math.isfinite(value))


class PendingNorm(Future[GradientNorm]):
    """A norm whose `result` waits for the parts of other processes."""

    def __init__(self, posted: Future[Callable[[], Tensor]]) -> None:
        super().__init__()
        self._posted = posted
        self._known: GradientNorm | None = None

    def result(self, timeout: float | None = None) -> GradientNorm:
        if self._known is None:
            self._known = GradientNorm.of(self._posted.result(timeout)(), Clipping())
        return self._known

    def done(self) -> bool:
        return self._posted.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._posted.exception(timeout)


class Updater:
    """Owner of the update thread. Methods return at once, except those that wait or return gradients."""

    def __init__(
        self,
        store: HostStore,
        optimizer: HostOptimizer | None,
        gradients: HostGradients,
        timed: Callable[[], AbstractContextManager[object]] = nullcontext,
        threads: int | None = None,
    ) -> None:
        """Start the thread, with `threads` compute threads (None: torch's). Without an optimizer it has nothing to do.

        `timed` is called when work is queued, and makes the context that the work, without waits, runs in.
        """
        self._store = store
        self._optimizer = optimizer
        self._timed = timed
        self._order = {name: place for place, name in enumerate(store.parameters)}
        self._gradients = gradients
        self._world = gradients.world
        self._last_names: dict[int, tuple[str, ...]] = {}  # by pack, of its last update
        self._jobs: list[tuple[int, int, int, Callable[[], Any], Future[Any]]] = []  # the first may be running
        self._step = 0  # number of steps begun, and of norms of updates: jobs come after those of earlier ones
        self._counter = itertools.count()
        self._pending: Counter[int] = Counter()  # updates queued or running, by pack
        self._updating: Counter[str] = Counter()  # and by parameter
        self.failure: BaseException | None = None  # that has ended the thread
        self._raised = False  # whether a caller has got the failure
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self.threads = threads
        self._thread = threading.Thread(target=self._run, name="harmony-update", daemon=True)
        self._thread.start()
        if threads is not None:
            before = torch.get_num_threads()
            self._queue(_FIRST, lambda: set_threads(threads)).result()
            torch.set_num_threads(before)  # of later threads

    # ---- called by the engine's thread

    def begin(self) -> None:
        """Begin a step, or a part of one: its gradients are handled after the updates that are queued."""
        self._step += 1

    def receive(self, transfer: GradientTransfer) -> None:
        """Keep a transfer for a later `update` of the pack that owns its parameters.

        A parameter may be in transfers of several packs that share it, and of micro-batches that pass the packs one by
        one: these are added up as they arrive, so that only the first transfer is kept until the update.
        """
        self._gradients.received.update(transfer.gradients)
        work = self._timed()

        def add() -> None:
            several = self._gradients.add(transfer)
            if several:
                self._gradients.wait_arrived(several)
                with work:
                    for name in several:
                        self._gradients.gradient(name)

        self._queue(_FIRST, add)

    def reduce(self, write: Callable[[], None]) -> None:
        """Queue `write`, which adds up gradients of several processes, before all updates."""
        self._queue(_FIRST, write)

    def measure(self, names: tuple[str, ...]) -> None:
        """Queue the norms of `names`, whose last transfer has been received."""
        self._queue_work(names, lambda: self._gradients.measure(names))

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name` that waits for its update: the tensor itself, in the accumulation dtype."""
        return self._answer(lambda: self._gradients.gradient(name))

    def pop_gradients(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Remove the gradients of `names` that wait here, and return copies."""

        def taken() -> dict[str, Tensor]:
            gradients = self._gradients.copies_of(names)
            self._gradients.drop_unused(names)
            return gradients

        return self._answer(taken)

    def drop_gradients(self, names: tuple[str, ...]) -> None:
        self._answer(lambda: self._gradients.drop_unused(names))

    def add_norms(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Queue the norms of gradients that are used on the device and not transferred."""
        self._queue(_FIRST, lambda: self._gradients.norms.update(read()))

    def norm(self, clipping: Clipping) -> Future[GradientNorm]:
        """Queue the global norm of all measured gradients."""
        number = self._world.number_norm()
        return self._queue_work((), lambda: GradientNorm.of(self._post_norm(number)(), clipping))

    def norm_of_updates(self) -> Future[GradientNorm]:
        """Queue the global norm of the gradients of all queued updates, after these and before later ones."""
        number = self._world.number_norm()
        promised = PendingNorm(self._queue(_LAST, lambda: self._post_norm(number)))
        self._step += 1
        return promised

    def update(self, pack: int, names: tuple[str, ...], hyper: Hyper, norm: Future[GradientNorm] | None) -> None:
        """Queue the update of `names`, the parameters that `pack` owns; with an overflow, their gradients are dropped."""
        with self._changed:
            self._pending[pack] += 1
            self._updating.update(names)
            self._last_names[pack] = names
        self._world.issue(names)
        work, optimizer = self._timed(), self._optimizer
        assert optimizer is not None

        def update() -> None:
            coefficient = None if norm is None else norm.result().coefficient
            overflow = norm is not None and norm.result().overflow
            self._gradients.wait_arrived(names)
            with work:
                if not overflow:
                    for gradients in self._gradients.for_update(names, coefficient, measured=norm is not None):
                        optimizer.step(gradients, hyper)
                        self._store.copy_masters_to_weights(gradients)
                self._gradients.clear_gradients(names)
            self._world.updated(names)
            with self._changed:
                self._updating.subtract(names)
                self._pending -= Counter([pack])

        self._queue(pack, update)

    def is_updating(self, name: str) -> bool:
        """Return whether an update of `name` is pending, so that its `.grad` belongs to that."""
        return self._updating[name] > 0

    def is_pending(self, pack: int) -> bool:
        """Return whether an update of `pack` is queued or running in any process; False after a failure."""
        if self.failure is not None:
            return False
        return self._pending[pack] > 0 or not self._world.has_updated(self._last_names.get(pack, ()))

    def raise_failure(self) -> None:
        """Raise a failure that has not been raised yet."""
        if self.failure is not None and not self._raised:
            with self._changed:
                self._raise()

    def wait(self, pack: int) -> None:
        """Wait until `pack` has been updated; raise the failure of the thread as it was raised there."""
        self._wait_for(lambda: not self._pending[pack])
        if threading.current_thread() is not self._thread:
            self._world.wait_updated(self._last_names.get(pack, ()))

    def wait_all(self) -> None:
        """Wait until nothing is pending; raises as `wait` does."""
        self._wait_for(lambda: not self._pending and not self._jobs)
        if threading.current_thread() is not self._thread:
            self._world.wait_updated()

    def _wait_for(self, done: Callable[[], bool], fails: bool = True) -> None:
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or done())
            if fails:
                self._raise()

    def discard(self) -> None:
        """Drop the gradients of a step that will not be applied. Updates of earlier steps are completed."""
        with self._changed:
            self._wait_for(lambda: not self._pending, fails=False)  # they still use gradients of their steps
            if self.failure is not None:
                return  # raised by the next call: another error may be on its way
            self._queue(_FIRST, self._gradients.clear_gradients)
        self._wait_for(lambda: not self._pending and not self._jobs, fails=False)

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is an engine's or holds the lock of this one, so that it must not wait for it."""
        own = threading.current_thread().name.startswith("harmony-")  # disk threads, for which updates wait
        return own or self._lock._is_owned()  # type: ignore[attr-defined]

    def stop(self) -> None:
        """End the thread once its queue is empty."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self.failure is not None:
            self._raised = True
            raise self.failure

    def _queue(self, priority: int, job: Callable[[], _Result]) -> Future[_Result]:
        result: Future[_Result] = Future()
        with self._changed:
            self._raise()
            heapq.heappush(self._jobs, (self._step, priority, next(self._counter), job, result))
            self._changed.notify_all()
        return result

    def _queue_work(self, names: tuple[str, ...], job: Callable[[], _Result]) -> Future[_Result]:
        """Queue a job that waits for the gradients of `names` and is timed after that."""
        work = self._timed()

        def run() -> _Result:
            self._gradients.wait_arrived(names)
            with work:
                return job()

        return self._queue(_FIRST, run)

    def _answer(self, job: Callable[[], _Result]) -> _Result:
        result = self._queue(_FIRST, job)
        self.wait_all()
        return result.result()

    # ---- on the thread

    @torch.no_grad()
    def _run(self) -> None:
        self._gradients.begin_thread()
        with bypass_hooks():
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        """Run the next job; return False if the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            if not self._jobs:
                return False
            entry = self._jobs[0]
        *_, job, result = entry
        try:
            result.set_result(job())
        except BaseException as failure:  # noqa: BLE001 - raised in the caller's thread
            self._world.give_up(f"its background update failed: {failure!r}")
            with self._changed:
                self.failure = failure
                for *_, promised in self._jobs:
                    promised.set_exception(failure)
                self._jobs.clear()
                self._changed.notify_all()
            self._gradients.stop_waiting()
            return False
        with self._changed:
            self._jobs.remove(entry)
            heapq.heapify(self._jobs)
            self._changed.notify_all()
        return True

    def _post_norm(self, number: int) -> Callable[[], Tensor]:
        """Post this process's part of the norm; return a function that waits for all processes' and returns the norm."""
        norms = [self._gradients.norms[name] for name in sorted(self._gradients.norms, key=self._order.__getitem__)]
        self._gradients.norms.clear()
        return self._world.post_norm(number, norms)
