"""How far is the plan that the search finds from the best one there is?

    python -m benchmarks.search.run                       # 300 random models, three quarters of an hour
    python -m benchmarks.search.run --models 20           # writes nothing
    python -m benchmarks.search.run --deep 4              # how long a search takes for 400 layers and 128 micro-batches

Every random model is planned by the search, and by trying all plans (`exhaustive`), with the simulator as judge of both.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from statistics import fmean, median, quantiles
from time import perf_counter, process_time
from typing import Any

from benchmarks.common import write_results
from benchmarks.search.exhaustive import Exhaustive
from benchmarks.search.models import HALF, Model, random_model
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.search import search

_MODELS, _LAYERS = 300, (3, 4, 5, 5, 6, 6)


@dataclass(frozen=True)
class Comparison:
    """One model, planned both ways."""

    seed: int
    layers: int
    micro_batches: int
    found_ms: float
    best_ms: float
    search_s: float
    exhaustive_s: float
    plans: int
    simulated: int
    found: str
    best: str

    @property
    def gap(self) -> float:
        """How much slower the plan found is, as a share of the best one's time."""
        return self.found_ms / self.best_ms - 1.0


def compare(seed: int) -> Comparison:
    """Return the model of that number."""
    model = random_model(seed, _LAYERS[seed % len(_LAYERS)])
    begin = perf_counter()
    choice = search(model.graph, model.costs, model.machine, HALF, model.request)[0]
    found_s = perf_counter() - begin
    every = Exhaustive(model)
    best_ms, best = every.best(choice.prediction.step_ms)
    packing, policy = best or (choice.plan.packing, choice.plan.policy)
    return Comparison(
        seed=seed,
        layers=len(model.graph.calls),
        micro_batches=model.request.micro_batches,
        found_ms=choice.prediction.step_ms,
        best_ms=best_ms,
        search_s=found_s,
        exhaustive_s=perf_counter() - begin - found_s,
        plans=every.plans,
        simulated=every.simulated,
        found=_told(choice.plan.packing, choice.plan.policy),
        best=_told(packing, policy),
    )


def _told(packing: Packing, policy: Policy) -> str:
    """Return the decisions of a plan."""
    cuts = " ".join(f"{pack.positions[0]}-{pack.positions[-1]}" for pack in packing.packs)
    stays = f"kept {policy.kept}, resident {policy.resident}, {policy.stash_on_host} stashed on the host"
    stays += f", graphs {policy.graphs}" if policy.graphs else ""
    return f"packs {cuts}; {stays}{', prefetch' if policy.prefetch else ''}"


def summary(found: list[Comparison]) -> dict[str, Any]:
    """Gaps in per cent, times in seconds."""
    gaps = sorted(100 * one.gap for one in found)
    return {
        "models": len(found),
        "plans": sum(one.plans for one in found),
        "gap_median": median(gaps),
        "gap_mean": fmean(gaps),
        "gap_90th": quantiles(gaps, n=10)[-1],
        "gap_worst": gaps[-1],
        "search_s_median": median(one.search_s for one in found),
        "search_s": sum(one.search_s for one in found),
        "exhaustive_s": sum(one.exhaustive_s for one in found),
    }


def _plan_deep(model: Model) -> None:
    begin = process_time()
    choice = search(model.graph, model.costs, model.machine, HALF, model.request)[0]
    took_s, step_ms = process_time() - begin, choice.prediction.step_ms
    print(f"model {model.seed}: {took_s:.1f} s of one core, {len(choice.plan.packs)} packs, {step_ms:.0f} ms a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=_MODELS)
    parser.add_argument("--deep", type=int, default=0, metavar="N", help="plan N models of 400 layers instead")
    given = parser.parse_args()
    if given.deep:
        for seed in range(given.deep):
            _plan_deep(random_model(seed, 400, micro_batches=128))
        return
    found = [compare(seed) for seed in range(given.models)]
    for one in sorted(found, key=lambda one: -one.gap)[:8]:
        print(
            f"{100 * one.gap:6.2f} %  {one.layers} layers, model {one.seed}\n   found {one.found}\n   best  {one.best}"
        )
    total = summary(found)
    print(json.dumps(total, indent=1))
    if given.models == _MODELS:
        write_results("search", {"summary": total, "models": [asdict(one) for one in found]})


if __name__ == "__main__":
    main()
