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
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.estimator import CandidateEstimator
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Packing, Policy
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
        self._estimator = CandidateEstimator(model.costs, model.request)
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
                policies = self._policies(packing)
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
            if max(self._estimator.stage_peaks(self._estimator.sample(packing, policy))) > self._budget:
                continue
            self.simulated += 1
            plan = make_plan(packing, self._model.costs, self._model.request, policy)
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
        nbytes = np.array(
            [sum(costs[p].forward.kept_graph_bytes for p in packing.packs[i].positions) for i in packing.backward]
        )
        fit = rows @ nbytes <= max(0.0, self._peaks.spare(packing, policy, self._budget)[0])
        rows = rows[fit & ~rows[:, ~stays].any(axis=1)]
        self.plans += len(rows) - 1
        return replace(policy.only(np.zeros(len(rows), int)), graphs=rows.T)

    def _policies(self, packing: Packing) -> Policies:
        """All that may fit."""
        fused, forward = packing.backward[-1], {*packing.forward}
        states = [
            (_SWAPPED, _RESIDENT) if i == fused else (_SWAPPED, _KEPT, _RESIDENT) if i in forward else (_SWAPPED,)
            for i in packing.backward
        ]
        away, early = range(len(packing.forward) + 1), (True, False)
        rows = np.array([(*state, *rest) for *state, rest in product(*states, product(away, early))])
        self.plans += len(rows)
        state, (away_of, early_of) = rows.T[:-2], rows.T[-2:]
        policies = Policies(
            self._model.request.policy, state == _RESIDENT, state == _KEPT, away_of, early_of.astype(bool), 0 * state
        )
        return policies.only(self._peaks.at_least(packing, policies) <= self._budget)


def _cuts(count: int) -> Iterator[Bounds]:
    """Every way to cut so many calls."""
    if not count:
        yield (0,)
        return
    for parts in range(count):
        for inner in combinations(range(1, count), parts):
            yield (0, *inner, count)
