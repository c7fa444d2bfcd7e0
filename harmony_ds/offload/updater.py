"""The background thread that brings gradients into weights: waits for their arrival, measures, clips, steps, casts.

    immediate   update(p) is queued behind the swap-out of p; of several that wait, the pack needed first goes first
    deferred    measure(delivery) for every delivery, norm() once, then update(p) in forward order

Whoever needs a pack's weights calls `wait`. An error on the thread surfaces as itself in the next caller.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.offload.host_gradients import Delivery, HostGradients
from harmony_ds.offload.host_optimizer import HostOptimizer, Hyper
from harmony_ds.offload.host_store import HostStore, ungated
from harmony_ds.parallel import Alone

_ALONE = Alone()
_FIRST = -1  # the priority of what is not an update
_LAST = 2**31


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


_NO_NORM = GradientNorm(0.0, None, False)


def _norm_of(total: Tensor, coefficient: Tensor | None = None) -> GradientNorm:
    return GradientNorm(total.item(), coefficient, not bool(torch.isfinite(total)))


class NormOfAll(Future[GradientNorm]):
    """One that is promised while other processes' parts of it are still to come: whoever asks waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.rest: Callable[[], GradientNorm] | None = None

    def result(self, timeout: float | None = None) -> GradientNorm:
        found = super().result(timeout)
        return found if self.rest is None else self.rest()


class Updater:
    """Owns the thread. Every method returns at once, but `wait`, `wait_all` and the result of `norm`."""

    def __init__(
        self,
        store: HostStore,
        optimizer: HostOptimizer,
        gradients: HostGradients,
        timed: Callable[[], AbstractContextManager[object]] = nullcontext,
        world: Alone = _ALONE,
    ) -> None:
        """`timed`: asked when work is queued; what it returns is put around that work on the thread, waiting apart."""
        self._store = store
        self._optimizer = optimizer
        self._gradients = gradients
        self._order = {name: place for place, name in enumerate(store.parameters)}
        self._held: dict[str, list[Delivery]] = {}  # by parameter: deliveries that carry a gradient for it
        self._norms: dict[str, Tensor] = {}
        self._results: list[Future[GradientNorm]] = []  # promised, not all of them there yet
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._pending: dict[int, int] = {}  # pack -> updates queued or running
        self._updating: Counter[str] = Counter()  # and their parameters
        self._failure: BaseException | None = None
        self._seen = False  # whether the failure has surfaced somewhere
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self._timed = timed
        self._world = world
        self._last_names: dict[int, tuple[str, ...]] = {}  # by pack, of its last update
        self._thread = threading.Thread(target=self._run, name="harmony-update", daemon=True)
        self._thread.start()

    # ---- called by the engine's thread

    def receive(self, delivery: Delivery) -> None:
        """Takes a delivery over; what it carries is used by a later `update` of the pack that owns it.

        A parameter that several packs share is delivered by each, and where micro-batches pass the packs one by one, by
        each of those: they are added up as they come, so that only the first delivery is kept until the update.
        """
        if not delivery.gradients:  # no micro-batch came through that pack
            self._gradients.release(delivery)
            return
        shared = tuple(name for name in delivery.gradients if name in self._held)
        for name in delivery.gradients:
            self._held.setdefault(name, []).append(delivery)
        if shared:
            work = self._timed()
            self._put(_FIRST, lambda: self._gather(shared, work))

    def measure(self, names: tuple[str, ...]) -> None:
        """Queues the norms of `names`, whose last delivery has been received."""
        work = self._timed()
        self._put(_FIRST, lambda: self._measure(names, work))

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name` that waits for its update, in the accumulation dtype; the tensor itself."""
        found: Future[Tensor | None] = Future()
        self._put(_FIRST, lambda: found.set_result(self._sum(name)))
        self.wait_all()
        return found.result()

    def take(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The gradients of `names` that wait here, which are used elsewhere."""
        found: Future[dict[str, Tensor]] = Future()
        self._put(_FIRST, lambda: found.set_result(self._take(names)))
        self.wait_all()
        return found.result()

    def drop(self, names: tuple[str, ...]) -> None:
        """Forgets the gradients of `names`."""
        self._put(_FIRST, lambda: self._forget(names))
        self.wait_all()

    def add_norms(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Queues the norms of gradients that are not delivered, because they are used where they are."""
        self._put(_FIRST, lambda: self._norms.update(read()))

    def norm(self, clipping: Clipping) -> Future[GradientNorm]:
        """Queues the global norm of everything measured."""
        result: Future[GradientNorm] = Future()
        work = self._timed()
        number = self._world.number_norm()
        self._put(_FIRST, lambda: self._timed_norm(clipping, result, work, number), result)
        return result

    def norm_of_updates(self) -> Future[GradientNorm]:
        """Queues, behind all updates, the global norm of what they used."""
        result = NormOfAll()
        number = self._world.number_norm()
        self._put(_LAST, lambda: self._promise_norm(result, number), result)
        return result

    def update(self, pack: int, names: tuple[str, ...], hyper: Hyper, norm: Future[GradientNorm] | None) -> None:
        """Queues the update of `names`, the parameters that `pack` owns."""
        with self._changed:
            self._pending[pack] = self._pending.get(pack, 0) + 1
            self._updating.update(names)
            self._last_names[pack] = names
        self._world.issue(names)
        work = self._timed()
        self._put(pack, lambda: self._update(pack, names, hyper, norm, work))

    def is_updating(self, name: str) -> bool:
        """Whether an update of `name` is pending: what is on its `.grad` is that update's."""
        return self._updating[name] > 0

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if anything did."""
        return self._failure

    def surface(self) -> None:
        """Raises a failure that nobody has seen yet."""
        if self._failure is not None and not self._seen:
            with self._changed:
                self._raise()

    def wait(self, pack: int) -> None:
        """Blocks until `pack` has been updated.

        Raises:
            BaseException: what went wrong on the thread, as it was raised there.
        """
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._pending.get(pack))
            self._raise()
        self._world.wait_updated(self._last_names.get(pack, ()))

    def wait_all(self) -> None:
        """Blocks until nothing is pending; raises as `wait` does."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or (not self._pending and not self._jobs))
            self._raise()
        self._world.wait_updated()

    def discard(self) -> None:
        """Drops the gradients of a step that will not be applied. The updates of earlier steps go on."""
        if self._failure is not None:
            return
        with self._changed:  # what they still use is not this step's
            self._changed.wait_for(lambda: self._failure is not None or not self._pending)
        self._put(_FIRST, self._discard)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or (not self._jobs and not self._pending))

    @property
    def entered(self) -> bool:
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

    def _put(self, priority: int, job: Callable[[], None], result: Future[GradientNorm] | None = None) -> None:
        with self._changed:
            if self._failure is not None and result is not None:
                result.set_exception(self._failure)
            self._raise()
            if result is not None:
                self._results = [known for known in self._results if not known.done()] + [result]
            heapq.heappush(self._jobs, (priority, next(self._counter), job))
            self._changed.notify_all()

    # ---- on the thread

    @torch.no_grad()
    def _run(self) -> None:
        with ungated():
            self._work()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs or self._failure is not None:
                    return
                job = self._jobs[0]
            try:
                job[2]()
            except BaseException as failure:  # noqa: BLE001 - surfaces in the caller's thread
                self._world.give_up(f"its background update failed: {failure!r}")
                with self._changed:
                    self._failure = failure
                    self._jobs.clear()
                    for result in self._results:
                        if not result.done():
                            result.set_exception(failure)
                    self._changed.notify_all()
                return
            with self._changed:
                self._jobs.remove(job)
                heapq.heapify(self._jobs)
                self._changed.notify_all()

    def _sum(self, name: str) -> Tensor | None:
        """The gradient of `name`: what its deliveries carry, added up in their order of arrival, in the first one."""
        deliveries = self._held.get(name)
        if not deliveries:
            return None
        first = deliveries[0]
        first.arrived.synchronize()
        total = first.gradients[name]
        while len(deliveries) > 1:
            later = deliveries.pop(1)
            later.arrived.synchronize()
            total.add_(later.gradients[name])
            self._drop(name, later)
        return total

    def _take(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        taken = {name: total.clone() for name in names if (total := self._sum(name)) is not None}
        self._forget(names)
        return taken

    def _forget(self, names: tuple[str, ...]) -> None:
        self._let_go(names)
        for name in names:
            self._norms.pop(name, None)

    def _drop(self, name: str, delivery: Delivery) -> None:
        del delivery.gradients[name]
        if not delivery.gradients:
            self._gradients.release(delivery)

    def _gather(self, names: tuple[str, ...], work: AbstractContextManager[object]) -> None:
        self._arrive(names)
        with work:
            for name in names:
                self._sum(name)

    def _arrive(self, names: tuple[str, ...]) -> None:
        for name in names:
            for delivery in self._held.get(name, ()):
                delivery.arrived.synchronize()

    def _measure(self, names: tuple[str, ...], work: AbstractContextManager[object]) -> None:
        self._arrive(names)
        with work:
            for name in names:
                total = self._sum(name)
                if total is not None and self._optimizer.trains(name):
                    self._norms[name] = self._world.measured(total)

    def _timed_norm(
        self, clipping: Clipping, result: Future[GradientNorm], work: AbstractContextManager[object], number: int
    ) -> None:
        with work:
            self._finish_norm(clipping, result, number)

    def _total(self, number: int) -> Callable[[], Tensor]:
        """The norm of all that has been measured, in all processes."""
        norms = [self._norms[name] for name in sorted(self._norms, key=self._order.__getitem__)]
        self._norms.clear()
        return self._world.post_norm(number, norms)

    def _promise_norm(self, result: NormOfAll, number: int) -> None:
        try:
            total = self._total(number)
            result.rest = functools.cache(lambda: _norm_of(total()))
            result.set_result(_NO_NORM)
        except BaseException as failure:
            result.set_exception(failure)
            raise

    def _finish_norm(self, clipping: Clipping, result: Future[GradientNorm], number: int) -> None:
        try:
            total = self._total(number)()
            if clipping.loss_scale != 1.0:
                total = total / clipping.loss_scale
            coefficient: Tensor | None = None
            if clipping.max_norm > 0:
                coefficient = torch.clamp(clipping.max_norm / (total + 1e-6), max=1.0)
            if clipping.loss_scale != 1.0:
                coefficient = (torch.ones(()) if coefficient is None else coefficient) / clipping.loss_scale
            result.set_result(_norm_of(total, coefficient))
        except BaseException as failure:
            result.set_exception(failure)
            raise

    def _update(
        self,
        pack: int,
        names: tuple[str, ...],
        hyper: Hyper,
        norm: Future[GradientNorm] | None,
        work: AbstractContextManager[object],
    ) -> None:
        coefficient = norm.result().coefficient if norm is not None else None
        self._arrive(names)
        with work:
            self._apply(names, hyper, coefficient, measured=norm is not None)
        self._world.updated(names)
        with self._changed:
            self._updating.subtract(names)
            self._pending[pack] -= 1
            if not self._pending[pack]:
                del self._pending[pack]

    def _apply(self, names: tuple[str, ...], hyper: Hyper, coefficient: Tensor | None, measured: bool) -> None:
        gradients: dict[str, Tensor] = {}
        for name in names:
            total = self._sum(name)
            if total is not None and self._optimizer.trains(name):
                gradient = total.to(self._store.masters[name].dtype)
                if not measured:  # nothing to clip: measured for whoever asks
                    self._norms[name] = self._world.measured(gradient)
                gradients[name] = gradient if coefficient is None else gradient.mul_(coefficient)
        self._optimizer.step(gradients, hyper)
        self._store.follow_masters(gradients)
        self._let_go(names)

    def _let_go(self, names: tuple[str, ...]) -> None:
        for name in names:
            for delivery in self._held.pop(name, []):
                self._drop(name, delivery)

    def _discard(self) -> None:
        self._norms.clear()
        self._let_go(tuple(self._held))
