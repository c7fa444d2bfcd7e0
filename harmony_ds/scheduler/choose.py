"""Chooses a plan: as many layers in a pack as fit, the stash on the device if it fits.

Fewer, larger packs swap less (the last one is swapped in once instead of twice); a stash on the device swaps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import ElementBytes, pack_uniformly
from harmony_ds.scheduler.plan import ALL_PACKS, Packing, Plan, Policy
from harmony_ds.scheduler.resident import resident_packs
from harmony_ds.scheduler.validate import validate


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is wanted for.

    Attributes:
        micro_batches: the size of the group.
        budget_bytes: device memory (None: unlimited).
        resident_bytes: what stays on the device besides packs.
        pack_layers: calls in a pack (None: as many as fit).
        stash: "auto", "device" or "host".
        policy: where tasks are placed; its `stash_on_host` is decided here.
        residency: how many of the last packs are resident (None: as the scheduler sees fit, which is none yet).
    """

    micro_batches: int
    budget_bytes: int | None
    resident_bytes: int
    pack_layers: int | None
    stash: str
    policy: Policy
    residency: int | None = None


def choose_plan(graph: LayerGraph, costs: CostTable, element: ElementBytes, request: Request) -> Plan:
    """The plan with the stash on the device if possible, and the largest packs that fit then.

    Raises:
        DoesNotFitError: nothing fits; says what the smallest plan needs and what would help.
    """
    places = {"auto": (False, True), "device": (False,), "host": (True,)}[request.stash]
    sizes = [request.pack_layers] if request.pack_layers else range(len(graph.calls), 0, -1)
    smallest: Plan | None = None
    for on_host in places:
        for pack_layers in sizes:
            packing = Packing.reused(pack_uniformly(graph, costs, element, pack_layers))
            plan = make_plan(packing, costs, request, on_host)
            if request.budget_bytes is None or plan.peak_bytes <= request.budget_bytes:
                return plan
            if smallest is None or plan.peak_bytes < smallest.peak_bytes:
                smallest = plan
    assert smallest is not None
    raise DoesNotFitError(_explain(smallest, request))


def make_plan(packing: Packing, costs: CostTable, request: Request, stash_on_host: bool) -> Plan:
    """The plan over given packs, validated, with its peak."""
    resident = resident_packs(packing, request.residency)
    policy = replace(request.policy, stash_on_host=ALL_PACKS if stash_on_host else 0, resident=resident)
    group = Group(tuple(range(request.micro_batches)))
    tasks = compose_step(packing, group, policy)
    validate(packing, tasks, group, policy.resident)
    resident_bytes = request.resident_bytes + sum(packing.packs[index].resident_bytes for index in resident)
    peak = resident_bytes + walk_memory(packing.packs, tasks, costs).peak_bytes
    return Plan(packing, policy, tasks, request.micro_batches, resident_bytes, peak)


def _explain(plan: Plan, request: Request) -> str:
    assert request.budget_bytes is not None
    weights = max(pack.weight_bytes for pack in plan.packs)
    gradients = max(pack.gradient_bytes for pack in plan.packs)
    rest = plan.peak_bytes - plan.resident_bytes - min(2, len(plan.packs)) * weights - gradients
    return (
        f"the smallest plan needs {plan.peak_bytes:,} bytes of device memory but the budget is "
        f"{request.budget_bytes:,}: {plan.peak_bytes - request.budget_bytes:,} too many. It holds "
        f"{weights:,} bytes of weights for the largest pack (twice while the next pack is prefetched), {gradients:,} of "
        f"gradients, {plan.resident_bytes:,} that are resident, and about {max(rest, 0):,} of activations of "
        f"{plan.micro_batches} micro-batches. Ways out: (1) raise harmony.device_memory_gib; (2) lower "
        f"train_micro_batch_size_per_gpu; (3) lower harmony.pack_layers (now {request.pack_layers or 'chosen'}); "
        "(4) name smaller layers in harmony.layers" + ("; (5) lower harmony.residency." if request.residency else ".")
    )
