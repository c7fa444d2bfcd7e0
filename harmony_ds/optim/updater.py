"""The update thread: it waits for gradients, measures and clips them, steps the optimizer and casts weights.

The engine's thread queues jobs; this thread runs them in the order of step and priority:

    engine's thread      update thread
    deposit(transfer)    keep the gradients, which are on their way; add up those of a parameter that has several
    compute_norms(names) compute their norms (only of deferred updates)
    norm(norm_options)   sum up the norms: the factor of all gradients (only of deferred updates, once a step)
    update(pack, ...)    wait for the gradients, scale them, step the optimizer, copy masters to weights
    wait(pack)           (the engine's thread blocks until that is done)

Deferred updates wait for the norm of all gradients: every pack's gradients are deposited and their norms computed, norm()
is queued once, then the updates in forward order. The norm clips the gradients. If it is inf or NaN, they are dropped where
such steps are skipped (`NormOptions.skip_overflow`), and else scaled, as torch's `clip_grad_norm_` does.

Other updates are queued right after the deposit of their gradients; of several in the queue, the pack that is needed first
comes first. Their norm, for reports, follows them (`norm_of_updates`).

From the handler of an UPDATE task to the compiled step there are six frames of the engine's:

    engine's thread    GradientTasks.update -> Updater.update, which queues a job
    update thread      Updater._work -> Updater._update -> HostOptimizer.step -> (DeepSpeed's step) -> GilFreeOp.update

An error on the thread ends it, and is raised as itself in the next call of the engine's thread.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from harmony_ds.offload.host_gradients import GradientTransfer, HostGradients
from harmony_ds.offload.host_store import HostStore, bypass_hooks
from harmony_ds.optim.cores import set_threads
from harmony_ds.optim.host_optimizer import HostOptimizer, Hyper

_FIRST = -1
"""Priority of all jobs but updates, and of the unlayered pack's update. That of any other update is the position of the
first call that needs it."""
_LAST = 2**31
"""Priority of the norm that follows all updates of its step."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class NormOptions:
    """What deferred updates do by the norm of all gradients: scale these, or skip the step.

    Attributes:
        max_norm: clip to this global norm (0: not at all).
        loss_scale: factor of the losses, by which gradients are divided.
        skip_overflow: skip the update if any gradient is inf or NaN.
        refuses_unused: a parameter without a gradient is an error.
    """

    max_norm: float = 0.0
    loss_scale: float = 1.0
    skip_overflow: bool = False
    refuses_unused: bool = False


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """Global norm of a step's gradients.

    Attributes:
        total: the norm before clipping.
        coefficient: factor of every gradient (0-dim); None: they are used as they are.
        overflow: whether the updates are skipped, since a gradient is inf or NaN.
    """

    total: float
    coefficient: Tensor | None
    overflow: bool

    @staticmethod
    def from_total(total: Tensor, norm_options: NormOptions) -> GradientNorm:
        """Return the norm and the factor for `norm_options`; `total`: the norm, with the loss scale still in it."""
        if norm_options.loss_scale != 1.0:
            total = total / norm_options.loss_scale
        coefficient: Tensor | None = None
        if norm_options.max_norm > 0:
            coefficient = torch.clamp(norm_options.max_norm / (total + 1e-6), max=1.0)
        if norm_options.loss_scale != 1.0:
            coefficient = (torch.ones(()) if coefficient is None else coefficient) / norm_options.loss_scale
        value = total.item()
        return GradientNorm(value, coefficient, norm_options.skip_overflow and not math.isfinite(value))


class PendingNorm(Future[GradientNorm]):
    """Promise of a norm for reports, whose `result` waits for the parts of other processes, too."""

    def __init__(self, posted: Future[Callable[[], Tensor]]) -> None:
        super().__init__()
        self._posted = posted
        self._known: GradientNorm | None = None

    def result(self, timeout: float | None = None) -> GradientNorm:
        if self._known is None:
            self._known = GradientNorm.from_total(self._posted.result(timeout)(), NormOptions())
        return self._known

    def done(self) -> bool:
        return self._posted.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._posted.exception(timeout)


@dataclass(order=True, slots=True)
class _UpdateJob:
    """Work for the update thread; jobs are run in the order of their first three fields.

    Attributes:
        round: jobs of a smaller number run first, whatever their priority, see `Updater.begin`.
        number: of all jobs, in the order of queueing.
        run: does the work.
        result: promise of what `run` returns.
    """

    round: int
    priority: int
    number: int
    run: Callable[[], Any] = field(compare=False)
    result: Future[Any] = field(compare=False, default_factory=Future)


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
        """Start the thread. Without an optimizer it has nothing to do.

        Args:
            timed: called when a job is queued; returns the context that the job's work, without its waiting, is done in.
            threads: number of compute threads of the update thread (None: torch's).
        """
        self._store = store
        self._optimizer = optimizer
        self._timed = timed
        self._order = {name: place for place, name in enumerate(store.parameters)}
        self._gradients = gradients
        self._world = gradients.world
        self._last_names: dict[int, tuple[str, ...]] = {}  # needed_at -> parameters of its last update
        self._jobs: list[_UpdateJob] = []  # a heap; the first may be running
        self._round = 0  # all jobs of a round run before those of the next; a step has one or more, see `begin`
        self._job_numbers = itertools.count()
        self._pending: Counter[int] = Counter()  # needed_at -> updates that are queued or running
        self._updating: Counter[str] = Counter()  # parameter -> the same
        self.failure: BaseException | None = None  # the error that has ended the thread
        self._raised = False  # whether `failure` has been raised in the engine's thread
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self.threads = threads
        self._thread = threading.Thread(target=self._work, name="harmony-update", daemon=True)
        self._thread.start()
        if threads is not None:
            before = torch.get_num_threads()
            self._queue(_FIRST, partial(set_threads, threads)).result()
            torch.set_num_threads(before)  # of threads that are started later

    # ---- called by the engine's thread

    def begin(self) -> None:
        """Begin a round, for a step or a part of one: its jobs are run after the updates that are queued."""
        self._round += 1

    def deposit(self, transfer: GradientTransfer) -> None:
        """Keep a transfer until a later `update` of the pack that owns its parameters.

        Packs that share a parameter each send a gradient of it, and so does each part of a step. These are added up as they
        arrive, so that only the first transfer is kept until the update.
        """
        self._gradients.received.update(transfer.gradients)
        self._queue(_FIRST, partial(self._add, transfer, self._timed()))

    def queue_sum(self, write: Callable[[], None]) -> None:
        """Queue `write`, which adds up the gradients of several processes, before all updates of the step."""
        self._queue(_FIRST, write)

    def compute_norms(self, names: tuple[str, ...]) -> None:
        """Queue the norms of `names`, whose last transfer has been deposited."""
        self._queue(_FIRST, partial(self._compute_norms, names, self._timed()))

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name` that waits for its update: the tensor itself, in the accumulation dtype."""
        return self._ask(partial(self._gradients.gradient, name))

    def pop_gradients(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Remove the gradients of `names` that wait for their update, and return copies."""
        return self._ask(partial(self._gradients.pop, names))

    def discard_gradients(self, names: tuple[str, ...]) -> None:
        """Remove the gradients of `names` that wait for their update."""
        self._ask(partial(self._gradients.discard, names))

    def add_norms(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Queue the reading, by `read`, of norms of gradients that stay on the device."""
        self._queue(_FIRST, partial(self._read_norms, read))

    def norm(self, norm_options: NormOptions) -> Future[GradientNorm]:
        """Queue the global norm of all gradients whose norms have been computed."""
        return self._queue(
            _FIRST, partial(self._compute_global_norm, self._world.next_norm_number(), norm_options, self._timed())
        )

    def norm_of_updates(self) -> Future[GradientNorm]:
        """Queue the global norm of the gradients of all queued updates: after these, and before those of later steps."""
        promised = PendingNorm(self._queue(_LAST, partial(self._post_norm, self._world.next_norm_number())))
        self._round += 1
        return promised

    def update(self, needed_at: int, names: tuple[str, ...], hyper: Hyper, norm: Future[GradientNorm] | None) -> None:
        """Queue the update of `names`, parameters that one pack owns.

        Args:
            needed_at: the first layer call that needs them (`Pack.needed_at`), by which they are queued and waited for.
            hyper: hyper-parameters of this step.
            norm: of all gradients, if updates wait for it; if it says overflow, the gradients are dropped instead.
        """
        assert self._optimizer is not None
        run = partial(self._update, needed_at, names, hyper, norm, self._timed(), self._optimizer)
        with self._changed:
            self._raise_failure()
            self._pending[needed_at] += 1
            self._updating.update(names)
            self._last_names[needed_at] = names
            self._world.count_issued(names)
            heapq.heappush(self._jobs, _UpdateJob(self._round, needed_at, next(self._job_numbers), run))
            self._changed.notify_all()

    def is_updating(self, name: str) -> bool:
        """Return whether an update of `name` is pending, so that its `.grad` belongs to that."""
        return self._updating[name] > 0

    def raise_failure(self) -> None:
        """Raise a failure that has not been raised yet."""
        if self.failure is not None and not self._raised:
            with self._changed:
                self._raise_failure()

    def wait(self, needed_at: int) -> None:
        """Wait until what is needed there is updated; raise the failure of the thread as it was raised there."""
        self._wait_for(lambda: not self._pending[needed_at])
        if threading.current_thread() is not self._thread:
            self._world.wait_updated(self._last_names.get(needed_at, ()))

    def wait_all(self) -> None:
        """Wait until nothing is pending; raises as `wait` does."""
        self._wait_for(lambda: not self._pending and not self._jobs)
        if threading.current_thread() is not self._thread:
            self._world.wait_updated()

    def _wait_for(self, done: Callable[[], bool], fails: bool = True) -> None:
        """Wait until `done`, or until the thread has failed; `fails`: then raise its failure."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or done())
            if fails:
                self._raise_failure()

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
        """Whether the calling thread is an engine's own, or holds this lock, so that it must not wait for updates."""
        own = threading.current_thread().name.startswith("harmony-")  # also threads of disks, for which updates wait
        return own or self._lock._is_owned()  # type: ignore[attr-defined]

    def stop(self) -> None:
        """End the thread once its queue is empty."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            self._raised = True
            raise self.failure

    def _queue(self, priority: int, run: Callable[[], _Result]) -> Future[_Result]:
        with self._changed:
            self._raise_failure()
            job = _UpdateJob(self._round, priority, next(self._job_numbers), run)
            heapq.heappush(self._jobs, job)
            self._changed.notify_all()
        return job.result

    def _ask(self, run: Callable[[], _Result]) -> _Result:
        """Return the result of a job, once nothing is pending."""
        result = self._queue(_FIRST, run)
        self.wait_all()
        return result.result()

    # ---- on the update thread

    @torch.no_grad()
    def _work(self) -> None:
        self._gradients.begin_thread()
        with bypass_hooks():
            while (job := self._next_job()) is not None:
                try:
                    result = job.run()
                except BaseException as failure:  # noqa: BLE001 - raised in the engine's thread
                    self._fail(failure)
                    return
                job.result.set_result(result)
                with self._changed:
                    self._jobs.remove(job)
                    heapq.heapify(self._jobs)
                    self._changed.notify_all()
                del job, result  # their tensors are not to be kept while the next job is waited for

    def _next_job(self) -> _UpdateJob | None:
        """Wait for a job, and return it; it stays in the queue while it runs. None: the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            return self._jobs[0] if self._jobs else None

    def _fail(self, failure: BaseException) -> None:
        """Keep `failure` for the engine's thread, and let all promises fail by it."""
        self._world.give_up(f"its background update failed: {failure!r}")
        with self._changed:
            self.failure = failure
            for job in self._jobs:
                job.result.set_exception(failure)
            self._jobs.clear()
            self._changed.notify_all()
        self._gradients.stop_waiting()

    def _update(
        self,
        needed_at: int,
        names: tuple[str, ...],
        hyper: Hyper,
        norm: Future[GradientNorm] | None,
        timed: AbstractContextManager[object],
        optimizer: HostOptimizer,
    ) -> None:
        coefficient = None if norm is None else norm.result().coefficient
        overflow = norm is not None and norm.result().overflow
        self._gradients.wait_arrived(names)
        with timed:
            if not overflow:
                for gradients in self._gradients.for_update(names, coefficient, norms_known=norm is not None):
                    optimizer.step(gradients, hyper)
                    self._store.copy_masters_to_weights(gradients)
            self._gradients.clear_gradients(names)
        self._world.post_updated(names)
        with self._changed:
            self._updating.subtract(names)
            self._pending -= Counter([needed_at])

    def _add(self, transfer: GradientTransfer, timed: AbstractContextManager[object]) -> None:
        several = self._gradients.add(transfer)
        if several:
            self._gradients.wait_arrived(several)
            with timed:
                for name in several:
                    self._gradients.gradient(name)  # adds them up

    def _compute_norms(self, names: tuple[str, ...], timed: AbstractContextManager[object]) -> None:
        self._gradients.wait_arrived(names)
        with timed:
            self._gradients.compute_norms(names)

    def _read_norms(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._gradients.norms.update(read())

    def _compute_global_norm(
        self, number: int, norm_options: NormOptions, timed: AbstractContextManager[object]
    ) -> GradientNorm:
        with timed:
            return GradientNorm.from_total(self._post_norm(number)(), norm_options)

    def _post_norm(self, number: int) -> Callable[[], Tensor]:
        """Post this process's part of the norm; return a function that waits for all processes' and returns the norm."""
        norms = [self._gradients.norms[name] for name in sorted(self._gradients.norms, key=self._order.__getitem__)]
        self._gradients.norms.clear()
        return self._world.post_norm(number, norms)
