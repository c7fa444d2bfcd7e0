"""Random models on a described machine, small enough that every plan can be tried."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from harmony_ds.config import HarmonySettings
from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.profiling.hardware import UpdateCost, hardware_of
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.plan import ALL_PACKS, Policy
from harmony_ds.scheduler.profile import Machine

HALF = ElementBytes(weight=2, gradient=4)
_ADAM = UpdateCost(states=2, gradient_bytes=4, copy_bytes=2)
_GPUS = ("rtx4090", "rtx4090/pcie3", "h100")
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_WITH_GRAPHS = 4
"""Of so many micro-batches at most, graphs may be kept: of more, there are too many ways."""


@dataclass(frozen=True)
class Model:
    """A model and a machine to plan for."""

    seed: int
    graph: LayerGraph
    costs: CostTable
    machine: Machine
    request: PlanRequest


def random_model(seed: int, layers: int, micro_batches: int | None = None) -> Model:
    """Return the same model whenever it is asked for; of a few micro-batches unless their number is given.

    Layers differ up to twenty times in parameters, in arithmetic per parameter and in activations; the budget lies
    between what the smallest plan needs and what the model would need if all of it stayed.
    """
    draw = Random(seed)
    numels = [int(5e6 * 20 ** draw.random()) for _ in range(layers)]
    specs = tuple(
        ParameterSpec(f"p{i}", (n,), True, state_bytes=12 * n, update_bytes=4 * n) for i, n in enumerate(numels)
    )
    names = tuple(LayerSpec(i, f"l{i}", (f"p{i}",)) for i in range(layers))
    graph = LayerGraph(names, specs, tuple(range(layers)), ())
    drawn = draw.choice(_MICRO_BATCHES)
    micro_batches = micro_batches or drawn
    pace = 0.05 / micro_batches * 10 ** draw.uniform(-0.8, 1.2)  # from bound by copies to bound by arithmetic
    costs = CostTable(graph.calls, tuple(_call(draw, n, pace) for n in numels), tail_bytes=2**20)
    machine = hardware_of(draw.choice(_GPUS)).machine(_ADAM)
    policy = Policy(deferred_update=draw.random() < 0.5)
    settings = HarmonySettings(keep_graphs=micro_batches <= _WITH_GRAPHS)
    request = PlanRequest(settings, micro_batches, None, resident_bytes=0, policy=policy)
    packer = Packer(graph, costs, HALF)
    small, all_of_it = packer.packing(tuple(range(layers + 1))), packer.packing((0, layers))
    least = make_plan(small, costs, request, replace(policy, prefetch=False, stash_on_host=ALL_PACKS)).peak_bytes
    most = make_plan(all_of_it, costs, request, replace(policy, resident=(0,))).peak_bytes
    budget = least + int((most - least) * draw.uniform(0.02, 1.0) ** 2)
    return Model(seed, graph, costs, machine, replace(request, budget_bytes=budget))


def _call(draw: Random, numel: int, pace: float) -> CallCost:
    forward_ms = pace * numel / 1e6 * 20 ** draw.uniform(-0.5, 0.5)
    crossing = int(2**20 * 20 ** draw.random())
    graph = int(crossing * draw.uniform(2, 12))
    return CallCost(
        waiting=WaitingBytes(alive_bytes=crossing),
        stash=StashBytes(new_bytes=crossing),
        forward=ForwardBytes(peak_bytes=crossing * 2, graph_bytes=graph, kept_graph_bytes=graph),
        backward=BackwardBytes(input_gradient_bytes=crossing, peak_bytes=graph + crossing),
        needs_backward=True,
        forward_ms=forward_ms,
        backward_ms=forward_ms * 3,
        fused_ms=forward_ms * 3,
        propagate_ms=forward_ms * 2,
    )
