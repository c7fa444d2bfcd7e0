"""More memory is never slower: a larger budget holds every plan of a smaller one, though it is searched in another way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.search.models import HALF, Model, random_model
from harmony_ds import DoesNotFitError
from harmony_ds.decomposer import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.profiler.costs import CallCost, CostTable
from harmony_ds.profiler.hardware import UpdateCost, hardware_of
from harmony_ds.scheduler.search import search

_SLOWER = 1.01
_FLOPS_PER_MS = 150e9


def llama(layers: int, deferred: bool) -> Model:
    """A Llama of 13B parameters on an RTX 4090, with so many of its 40 layers; 8 micro-batches of 2048 tokens."""
    width, inner, vocabulary, tokens = 5120, 13824, 32_000, 2048
    block, edge = 4 * width**2 + 3 * width * inner, vocabulary * width
    numels = [edge, *[block] * layers, width, edge]
    specs = tuple(
        ParameterSpec(f"p{i}", (n,), True, state_bytes=12 * n, update_bytes=4 * n) for i, n in enumerate(numels)
    )
    graph = LayerGraph(
        tuple(LayerSpec(i, f"l{i}", (f"p{i}",)) for i in range(len(numels))), specs, tuple(range(len(numels))), ()
    )
    tensor = 2 * tokens * width
    lookup = CallCost(
        alive_bytes=tensor,
        stash_bytes=tensor,
        shared_bytes=tensor,
        forward_bytes=6 * tensor,
        graph_bytes=tensor,
        backward_bytes=4 * tensor,
        needs_backward=True,
        forward_ms=0.1,
        backward_ms=0.3,
        fused_ms=0.3,
        propagate_ms=0.2,
    )

    def product(numel: int, graph_bytes: int) -> CallCost:
        ms = 2 * numel * tokens / _FLOPS_PER_MS
        return replace(
            lookup,
            graph_bytes=graph_bytes,
            backward_bytes=graph_bytes + 4 * tensor,
            forward_ms=ms,
            backward_ms=3 * ms,
            fused_ms=3 * ms,
            propagate_ms=2 * ms,
        )

    blocks, head = [product(block, 34 * tensor)] * layers, product(edge, 4 * tensor)
    costs = CostTable(graph.calls, (lookup, *blocks, lookup, head), tail_bytes=8 * tokens * vocabulary)
    machine = hardware_of("rtx4090").machine(UpdateCost(states=2, gradient_bytes=4, copy_bytes=2))
    wanted = random_model(0, 3).request
    policy = replace(wanted.policy, deferred_update=deferred)
    return Model(0, graph, costs, machine, replace(wanted, micro_batches=8, budget_bytes=3 * 10**9, policy=policy))


@pytest.mark.parametrize(
    "model",
    [llama(3, deferred=True), llama(3, deferred=False), random_model(3, 7)],
    ids=["13B, deferred", "13B, immediate", "layers that differ"],
)
def test_more_memory_is_never_slower_by_more_than_a_hundredth(model: Model) -> None:
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
