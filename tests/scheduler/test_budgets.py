"""More memory is never slower: a larger budget holds every plan of a smaller one, though it is searched in another way."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.search.models import HALF, random_model
from harmony_ds import DoesNotFitError
from harmony_ds.scheduler.search import search

_SLOWER = 1.01


def test_more_memory_is_never_slower_by_more_than_a_hundredth() -> None:
    model = random_model(3, 7)
    budget, times = float(model.request.budget_bytes or 0) / 2, []
    while len(times) < 7:
        budget *= 1.25
        wanted = replace(model.request, budget_bytes=int(budget))
        try:
            choice = search(model.graph, model.costs, model.machine, HALF, wanted)[0]
        except DoesNotFitError:
            assert not times, "what fits, fits into more"
            continue
        assert all(choice.prediction.step_ms <= _SLOWER * known for known in times), (budget, times, choice)
        times.append(choice.prediction.step_ms)
    assert times[-1] < 0.9 * times[0]
