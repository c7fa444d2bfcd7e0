"""The best plan of all: every cut of both passes, every set of kept and of resident packs, every share of the stash, and
every number of graphs.

Judged by the simulator. Left out is only what a lower bound of its time, or of its memory, rules out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.models import HALF, Model
from benchmarks.search.peak_bounds import PeakBounds
from benchmarks.search.policies import Policies
from benchmarks.search.time_bounds import TimeBounds
from harmony_ds.scheduler.choose import draft_plan
from harmony_ds.scheduler.outlook import Outlook
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Pack, Packing, Policy
from harmony_ds.scheduler.simulate import simulate

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
        self._peaks = PeakBounds(model.costs, model.request)
        self._outlook = Outlook(model.costs, model.machine, model.request)
        self._budget = model.request.budget_bytes or 0
        self.plans = 0
        self.simulated = 0

    def best(self, known_ms: float) -> tuple[float, tuple[Packing, Policy] | None]:
        """Return the shortest step of any plan, and its plan; `known_ms` and None if none is shorter."""
        best_ms, best = known_ms, None
        packer = Packer(self._model.graph, self._model.costs, HALF)
        for backward in _cuts(len(self._model.graph.calls)):
            for forward in _cuts(backward[-2]):
                packing = packer.packing(backward, forward)
                policies = self._policies(packing, best_ms)
                graphs = self._graphs(packing)
                most = graphs.max(axis=0)[:, None] * (policies.kept | policies.resident)
                bounds = self._bounds.tighter(packing, replace(policies, graphs=most))
                for place in np.argsort(bounds):
                    if bounds[place] >= best_ms:
                        break
                    with_graphs = self._with_graphs(packing, policies.only(np.array([place])), graphs)
                    ms, policy = self._best_of(packing, with_graphs, best_ms)
                    if policy is not None:
                        best_ms, best = ms, (packing, policy)
        return best_ms, best

    def _best_of(self, packing: Packing, policies: Policies, best_ms: float) -> tuple[float, Policy | None]:
        """Return the fastest of them, if it is faster than that."""
        best = None
        bounds = self._bounds.tighter(packing, policies)
        for place in np.argsort(bounds):
            if bounds[place] >= best_ms:
                break
            policy = policies[int(place)]
            if max(self._outlook.stages(self._outlook.short(packing, policy))) > self._budget:
                continue
            self.simulated += 1
            plan = draft_plan(packing, self._model.costs, self._model.request, policy)
            ms = simulate(plan, self._model.costs, self._model.machine).step_ms
            if ms < best_ms:
                best_ms, best = ms, policy
        return best_ms, best

    def _graphs(self, packing: Packing) -> NDArray[np.int_]:
        """Rows of how many graphs each pack may keep."""
        most = self._model.request.micro_batches if self._model.request.settings.keep_graphs else 0
        able = {*packing.forward}.intersection(packing.backward[:-1])
        return np.array([*product(*(range(most + 1) if i in able else (0,) for i in packing.backward))])

    def _with_graphs(self, packing: Packing, policy: Policies, rows: NDArray[np.int_]) -> Policies:
        """Return the one policy, with each number of graphs that may fit."""
        stays = (policy.kept | policy.resident)[:, 0]
        costs = self._model.costs.costs
        nbytes = np.array([sum(costs[p].kept_bytes for p in packing.packs[i].positions) for i in packing.backward])
        fit = rows @ nbytes <= max(0.0, self._peaks.spare(packing, policy, self._budget)[0])
        rows = rows[fit & ~rows[:, ~stays].any(axis=1)]
        self.plans += len(rows) - 1
        return replace(policy.only(np.zeros(len(rows), int)), graphs=rows.T)

    def _policies(self, packing: Packing, best_ms: float) -> Policies:
        """All that may fit and may be faster."""
        rows = self._states(packing, best_ms)
        which, away, early = (
            grid.ravel()
            for grid in np.meshgrid(
                np.arange(len(rows)), np.arange(len(packing.forward) + 1), (True, False), indexing="ij"
            )
        )
        states = rows[which].T
        policies = Policies(self._model.request.policy, states == _RESIDENT, states == _KEPT, away, early)
        return policies.only(self._peaks.at_least(packing, policies) <= self._budget)

    def _states(self, packing: Packing, best_ms: float) -> NDArray[np.int_]:
        """Rows of what becomes of each pack, without those that cannot fit or cannot be faster."""
        packs, machine = packing.packs, self._model.machine
        fused, forward = packing.backward[-1], {*packing.forward}
        choices = [
            (_SWAPPED, _RESIDENT) if i == fused else (_SWAPPED, _KEPT, _RESIDENT) if i in forward else (_SWAPPED,)
            for i in packing.backward
        ]
        rows = np.array(list(product(*choices)))
        self.plans += 2 * len(rows) * (len(packing.forward) + 1)
        only_forward = sum(machine.swap_in_ms(packs[i].weight_bytes) for i in forward.difference(packing.backward))
        moved = np.tile([only_forward, 0.0, 0.0], (len(rows), 1))
        held, computed = np.zeros(len(rows)), np.full(len(rows), self._compute_ms(packing))
        for i in packing.backward:
            states = rows[:, i]
            moved += self._moved_ms(packs[i], twice=i in forward)[states]
            held += self._held(packs[i])[states]
            computed += self._on_device(packs[i])[states]
        return rows[(moved.max(axis=1) < best_ms) & (held <= self._budget) & (computed < best_ms)]

    def _moved_ms(self, pack: Pack, twice: bool) -> NDArray[np.float64]:
        """By state: ms that swap-in, swap-out and the host's updates take for it; `twice`: it comes in both passes."""
        machine = self._model.machine
        once = machine.swap_in_ms(pack.weight_bytes)
        rest = machine.swap_out_ms(pack.gradient_bytes), machine.host_update_ms(pack.update_elements)
        return np.array([[once * (2 if twice else 1), *rest], [once, *rest], [0.0, 0.0, 0.0]])

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
