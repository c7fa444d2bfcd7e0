"""The best plan of all: every cut of both passes, every set of kept and of resident packs, every share of the stash.

Judged by the simulator. Left out is only what a lower bound of its time, or of its memory, rules out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.models import HALF, Model
from harmony_ds.scheduler.choose import draft_plan
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.peaks import Peaks
from harmony_ds.scheduler.plan import Pack, Packing, Policy
from harmony_ds.scheduler.simulate import simulate
from harmony_ds.scheduler.time_bounds import TimeBounds

_SWAPPED, _KEPT, _RESIDENT = range(3)


class Exhaustive:
    """The search through all plans of one model.

    Attributes:
        plans: how many there are.
        simulated: how many of them no bound has ruled out.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._bounds = TimeBounds(model.costs, model.machine, model.request)
        self._peaks = Peaks(model.costs, model.request)
        self._budget = model.request.budget_bytes or 0
        self.plans = 0
        self.simulated = 0

    def best(self, known_ms: float) -> tuple[float, tuple[Packing, Policy] | None]:
        """The shortest step of any plan, and its plan; `known_ms` and None if none is shorter."""
        best_ms, best = known_ms, None
        packer = Packer(self._model.graph, self._model.costs, HALF)
        for backward in _cuts(len(self._model.graph.calls)):
            for forward in _cuts(backward[-2]):
                packing = packer.packing(backward, forward)
                staying = [i for i in packing.backward if i in packing.forward or i == packing.backward[-1]]
                for states in self._states(packing, staying, best_ms):
                    for policy in self._policies(packing, staying, states):
                        ms = self._time(packing, policy, best_ms)
                        if ms < best_ms:
                            best_ms, best = ms, (packing, policy)
        return best_ms, best

    def _time(self, packing: Packing, policy: Policy, best_ms: float) -> float:
        """Of a step; infinite where it is not shorter than `best_ms`, or does not fit."""
        if self._bounds.tighter(packing, policy) >= best_ms:
            return float("inf")
        if self._peaks.at_least(packing, policy) > self._budget or self._peaks.of(packing, policy) > self._budget:
            return float("inf")
        self.simulated += 1
        plan = draft_plan(packing, self._model.costs, self._model.request, policy)
        return simulate(plan, self._model.costs, self._model.machine).step_ms

    def _policies(self, packing: Packing, staying: list[int], states: NDArray[np.int_]) -> Iterator[Policy]:
        kept, resident = (
            tuple(index for index, state in zip(staying, states, strict=True) if state == wanted)
            for wanted in (_KEPT, _RESIDENT)
        )
        policy = replace(self._model.request.policy, kept=kept, resident=resident)
        for away in range(len(packing.forward) + 1):
            for prefetch in (True, False):
                yield replace(policy, stash_on_host=away, prefetch=prefetch)

    def _states(self, packing: Packing, staying: list[int], best_ms: float) -> NDArray[np.int_]:
        """Rows of what becomes of each pack in `staying`, without those that cannot fit or cannot be faster."""
        packs, machine = packing.packs, self._model.machine
        fused = packing.backward[-1]
        choices = [(_SWAPPED, _RESIDENT) if i == fused else (_SWAPPED, _KEPT, _RESIDENT) for i in staying]
        rows = np.array(np.meshgrid(*choices, indexing="ij")).reshape(len(staying), -1).T
        self.plans += 2 * len(rows) * (len(packing.forward) + 1)
        others = [packs[i] for i in (*packing.forward, *packing.backward) if i not in staying]
        moved = sum(np.array([[machine.swap_in_ms(p.weight_bytes), *self._out_ms(p)]]) for p in others)
        moved = moved + sum(self._moved_ms(packs[i], i == fused)[rows[:, n]] for n, i in enumerate(staying))
        held = sum(self._held(packs[i])[rows[:, n]] for n, i in enumerate(staying))
        computed = self._compute_ms(packing) + sum(self._on_device(packs[i])[rows[:, n]] for n, i in enumerate(staying))
        possible = (moved.max(axis=1) < best_ms) & (held <= self._budget) & (computed < best_ms)
        return rows[possible]

    def _out_ms(self, pack: Pack) -> tuple[float, float]:
        """Gradients out, and the update."""
        machine = self._model.machine
        if not pack.owned:
            return 0.0, 0.0
        return machine.swap_out_ms(pack.gradient_bytes), machine.host_update_ms(pack.update_elements)

    def _moved_ms(self, pack: Pack, fused: bool) -> NDArray[np.float64]:
        """By state: ms that swap-in, swap-out and the host's updates take for it."""
        once, rest = self._model.machine.swap_in_ms(pack.weight_bytes), self._out_ms(pack)
        return np.array([[once * (1 if fused else 2), *rest], [once, *rest], [0.0, 0.0, 0.0]])

    def _held(self, pack: Pack) -> NDArray[np.float64]:
        """By state: bytes that it holds while the fused pack runs."""
        return np.array([0.0, pack.weight_bytes, pack.resident_bytes])

    def _on_device(self, pack: Pack) -> NDArray[np.float64]:
        """By state: ms of its update on the device."""
        return np.array([0.0, 0.0, pack.update_elements / self._model.machine.device_update_elements_per_ms])

    def _compute_ms(self, packing: Packing) -> float:
        calls, end = self._model.costs.costs, packing.fused.positions[0]
        ms = sum(c.forward_ms + c.backward_ms for c in calls[:end]) + sum(c.fused_ms for c in calls[end:])
        return self._model.request.micro_batches * ms


def _cuts(count: int) -> Iterator[Bounds]:
    """Every way to cut so many calls."""
    if not count:
        yield (0,)
        return
    for parts in range(count):
        for inner in combinations(range(1, count), parts):
            yield (0, *inner, count)
