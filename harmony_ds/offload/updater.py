"""The background thread that brings gradients into weights: waits for their arrival, measures, clips, steps, casts.

    immediate   update(p) is queued behind the swap-out of p; of several that wait, the pack needed first goes first
    deferred    measure(p) behind every swap-out, norm() once, then update(p) in forward order

Whoever needs a pack's weights calls `wait`. An error on the thread surfaces as itself in the next caller.
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

from harmony_ds.offload.cores import set_threads
from harmony_ds.offload.host_gradients import GradientTransfer, HostGradients
from harmony_ds.offload.host_optimizer import HostOptimizer, Hyper
from harmony_ds.offload.host_store import HostStore, ungated

_FIRST = -1  # the priority of what is not an update
_LAST = 2**31
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Clipping:
    """What happens to gradients before they are used.

    Attributes:
        max_norm: clip to this global norm (0: not at all).
        loss_scale: what the losses were multiplied with.
        skip_overflow: apply nothing if any gradient is inf or NaN.
    """

    max_norm: float = 0.0
    loss_scale: float = 1.0
    skip_overflow: bool = False


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """The global norm before clipping, the factor that every gradient takes, and whether any was inf or NaN."""

    total: float
    coefficient: Tensor | None
    overflow: bool

    @staticmethod
    def of(total: Tensor, clipping: Clipping) -> GradientNorm:
        """What `clipping` makes of the norm of all gradients, which may be scaled."""
        if clipping.loss_scale != 1.0:
            total = total / clipping.loss_scale
        coefficient: Tensor | None = None
        if clipping.max_norm > 0:
            coefficient = torch.clamp(clipping.max_norm / (total + 1e-6), max=1.0)
        if clipping.loss_scale != 1.0:
            coefficient = (torch.ones(()) if coefficient is None else coefficient) / clipping.loss_scale
        value = total.item()
        return GradientNorm(value, coefficient, not math.isfinite(value))


class PendingNorm(Future[GradientNorm]):
    """One whose parts of other processes are still to come: whoever asks waits for them."""

    def __init__(self, posted: Future[Callable[[], Tensor]]) -> None:
        super().__init__()
        self._posted = posted
        self._known: GradientNorm | None = None

    def result(self, timeout: float | None = None) -> GradientNorm:
        if self._known is None:
            self._known = GradientNorm.of(self._posted.result(timeout)(), Clipping())
        return self._known

    def done(self) -> bool:
        """Whether this process has told of its part."""
        return self._posted.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._posted.exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[GradientNorm]], object]) -> None:
        """`fn` is called when this process has told of its part."""
        self._posted.add_done_callback(lambda _: fn(self))


class Updater:
    """Owns the thread. Every method returns at once, but `wait`, `wait_all`, the result of `norm`, and what answers."""

    def __init__(
        self,
        store: HostStore,
        optimizer: HostOptimizer,
        gradients: HostGradients,
        timed: Callable[[], AbstractContextManager[object]] = nullcontext,
        threads: int | None = None,
    ) -> None:
        """`timed`: asked when work is queued; what it returns is put around that work on the thread, waiting apart.

        `threads`: that it computes with (None: as many as torch does).
        """
        self._store = store
        self._optimizer = optimizer
        self._timed = timed
        self._order = {name: place for place, name in enumerate(store.parameters)}
        self._gradients = gradients
        self._world = gradients.world
        self._last_names: dict[int, tuple[str, ...]] = {}  # by pack, of its last update
        self._jobs: list[tuple[int, int, int, Callable[[], Any], Future[Any]]] = []  # the first may be running
        self._step = 0  # of updates whose norm is asked for: those of later steps come after it
        self._counter = itertools.count()
        self._pending: Counter[int] = Counter()  # updates queued or running, by pack
        self._updating: Counter[str] = Counter()  # and by parameter
        self._failure: BaseException | None = None
        self._seen = False  # whether the failure has surfaced somewhere
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self.threads = threads
        self._thread = threading.Thread(target=self._run, name="harmony-update", daemon=True)
        self._thread.start()
        if threads is not None:
            before = torch.get_num_threads()
            self._queue(_FIRST, lambda: set_threads(threads)).result()
            torch.set_num_threads(before)  # of threads to come

    # ---- called by the engine's thread

    def receive(self, transfer: GradientTransfer) -> None:
        """Takes a transfer over; what it carries is used by a later `update` of the pack that owns it.

        A parameter that several packs share is transferred by each, and where micro-batches pass the packs one by one, by
        each of those: they are added up as they come, so that only the first transfer is kept until the update.
        """
        several = self._gradients.add(transfer)
        if several:
            self._queue_work(several, lambda: [self._gradients.gradient(name) for name in several])

    def reduce(self, write: Callable[[], None]) -> None:
        """Queues what adds up gradients of several processes, in front of whatever is queued later."""
        self._queue(_FIRST, write)

    def measure(self, names: tuple[str, ...]) -> None:
        """Queues the norms of `names`, whose last transfer has been received."""
        self._queue_work(names, lambda: self._gradients.measure(names))

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name` that waits for its update, in the accumulation dtype; the tensor itself."""
        return self._answer(lambda: self._gradients.gradient(name))

    def pop_gradients(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The gradients of `names` that wait here, which are used elsewhere."""

        def taken() -> dict[str, Tensor]:
            gradients = self._gradients.copies_of(names)
            self._gradients.drop_unused(names)
            return gradients

        return self._answer(taken)

    def drop_gradients(self, names: tuple[str, ...]) -> None:
        """Forgets the gradients of `names`."""
        self._answer(lambda: self._gradients.drop_unused(names))

    def add_norms(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Queues the norms of gradients that are not transferred, because they are used where they are."""
        self._queue(_FIRST, lambda: self._gradients.norms.update(read()))

    def norm(self, clipping: Clipping) -> Future[GradientNorm]:
        """Queues the global norm of everything measured."""
        number = self._world.number_norm()
        return self._queue_work((), lambda: GradientNorm.of(self._post_norm(number)(), clipping))

    def norm_of_updates(self) -> Future[GradientNorm]:
        """Queues, behind all updates and before all that are queued from now on, the global norm of what they used."""
        number = self._world.number_norm()
        promised = PendingNorm(self._queue(_LAST, lambda: self._post_norm(number)))
        self._step += 1
        return promised

    def update(self, pack: int, names: tuple[str, ...], hyper: Hyper, norm: Future[GradientNorm] | None) -> None:
        """Queues the update of `names`, the parameters that `pack` owns."""
        with self._changed:
            self._pending[pack] += 1
            self._updating.update(names)
            self._last_names[pack] = names
        self._world.issue(names)
        work = self._timed()

        def update() -> None:
            coefficient = None if norm is None else norm.result().coefficient
            self._gradients.wait_arrived(names)
            with work:
                gradients = self._gradients.for_update(names, coefficient, measured=norm is not None)
                self._optimizer.step(gradients, hyper)
                self._store.copy_masters_to_weights(gradients)
                self._gradients.clear_gradients(names)
            self._world.updated(names)
            with self._changed:
                self._updating.subtract(names)
                self._pending -= Counter([pack])

        self._queue(pack, update)

    def is_updating(self, name: str) -> bool:
        """Whether an update of `name` is pending: what is on its `.grad` is that update's."""
        return self._updating[name] > 0

    def is_pending(self, pack: int) -> bool:
        """Whether an update of `pack` is queued or running, in any process; a failure of the thread ends that."""
        if self._failure is not None:
            return False
        return self._pending[pack] > 0 or not self._world.has_updated(self._last_names.get(pack, ()))

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if anything did."""
        return self._failure

    def raise_failure(self) -> None:
        """Raises a failure that nobody has seen yet."""
        if self._failure is not None and not self._seen:
            with self._changed:
                self._raise()

    def wait(self, pack: int) -> None:
        """Blocks until `pack` has been updated.

        Raises:
            BaseException: what went wrong on the thread, as it was raised there.
        """
        self._wait_for(lambda: not self._pending[pack])
        if threading.current_thread() is not self._thread:
            self._world.wait_updated(self._last_names.get(pack, ()))

    def wait_all(self) -> None:
        """Blocks until nothing is pending; raises as `wait` does."""
        self._wait_for(lambda: not self._pending and not self._jobs)
        if threading.current_thread() is not self._thread:
            self._world.wait_updated()

    def _wait_for(self, done: Callable[[], bool], fails: bool = True) -> None:
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or done())
            if fails:
                self._raise()

    def discard(self) -> None:
        """Drops the gradients of a step that will not be applied. The updates of earlier steps go on."""
        if self._failure is not None:
            return
        self._wait_for(lambda: not self._pending, fails=False)  # what they still use is not this step's
        self._queue(_FIRST, self._gradients.clear_gradients)
        self._wait_for(lambda: not self._pending and not self._jobs, fails=False)

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is in the middle of this object, so that it must not wait for it."""
        return threading.current_thread() is self._thread or self._lock._is_owned()  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Ends the thread once its queue is empty."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._failure is not None:
            self._seen = True
            raise self._failure

    def _queue(self, priority: int, job: Callable[[], _Result]) -> Future[_Result]:
        result: Future[_Result] = Future()
        with self._changed:
            self._raise()
            heapq.heappush(self._jobs, (self._step, priority, next(self._counter), job, result))
            self._changed.notify_all()
        return result

    def _queue_work(self, names: tuple[str, ...], job: Callable[[], _Result]) -> Future[_Result]:
        """Queues what is timed once the gradients of `names` have arrived."""
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
        with ungated():
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        """Whether there may be more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            if not self._jobs:
                return False
            entry = self._jobs[0]
        *_, job, result = entry
        try:
            result.set_result(job())
        except BaseException as failure:  # noqa: BLE001 - surfaces in the caller's thread
            self._world.give_up(f"its background update failed: {failure!r}")
            with self._changed:
                self._failure = failure
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
        """The norm of all that has been measured, once all processes have told of theirs."""
        norms = [self._gradients.norms[name] for name in sorted(self._gradients.norms, key=self._order.__getitem__)]
        self._gradients.norms.clear()
        return self._world.post_norm(number, norms)
