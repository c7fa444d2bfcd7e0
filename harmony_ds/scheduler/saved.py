"""A saved plan, checked against the model and the settings it is to run with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import ConfigError, DoesNotFitError
from harmony_ds.scheduler.choose import PlanRequest, among_devices, make_plan
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.resident import tied_closure
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.simulate import simulate

_CONTRADICTS = (
    "harmony.plan contradicts itself, or is another model's: its packs are not those of this model's layer calls, once and "
    "in order in both passes, or one is resident and shares a parameter with another that is not. Plan again."
)


def adopt(
    plan: Plan, graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes, request: PlanRequest
) -> Choice:
    """Return the choice of `plan`: its packs and its policy, with tasks and memory for what is wanted now.

    Raises:
        ConfigError: it was made for another model, other dtypes or another kind of update, or contradicts itself.
        DoesNotFitError: with what was measured now, it does not fit.
    """
    ways = among_devices(request, machine)
    # The last way is that of all devices: a plan that was given is not one of several to choose from.
    request = next((one for one in ways[::-1] if one.policy.reduce_on_host == plan.policy.reduce_on_host), ways[-1])
    wanted = request.policy
    packing = _rebuilt(plan, Packer(graph, costs, element, wanted), graph.calls)
    there, here = _depends_on(plan.packing, plan.policy), _depends_on(packing, wanted)
    for what in there:
        if there[what] != here[what]:
            raise ConfigError(
                f"harmony.plan was made for {what} {there[what]}, and is to run with {here[what]}. Plan again."
            )
    # A plan that was made for one device may be run on several, where no calls are joined.
    several = ("joined_count", "devices", "servers", "swaps_in_shares", "reduce_on_host", "pipeline")
    policy = replace(plan.policy, **{one: getattr(wanted, one) for one in several})
    adopted = make_plan(packing, costs, request, policy)
    if request.budget_bytes is not None and adopted.peak_bytes > request.budget_bytes:
        raise DoesNotFitError(
            f"harmony.plan needs {adopted.peak_bytes:,} bytes of device memory and the budget is "
            f"{request.budget}: {adopted.peak_bytes - request.budget_bytes:,} too many. Raise "
            "harmony.device_memory_gib, or plan again."
        )
    return Choice(adopted, simulate(adopted, costs, machine), "as saved")


def _rebuilt(plan: Plan, packer: Packer, calls: tuple[int, ...]) -> Packing:
    """Return the same packs of this model, which makes these calls."""
    packing, resident = plan.packing, plan.policy.resident
    try:
        backward, forward = _bounds(packing, packing.backward), _bounds(packing, packing.forward)
        rebuilt = packer.packing(backward, forward)
        whole = (plan.calls, backward[-1], forward[-1]) == (calls, len(calls), rebuilt.fused.positions[0])
        stays = tied_closure(rebuilt, resident) == resident
    except (IndexError, KeyError):  # of packs, calls or layers that there are not
        raise ConfigError(_CONTRADICTS) from None
    if not (whole and stays and _packs(packing) == _packs(rebuilt) and {*resident} <= {*rebuilt.backward}):
        raise ConfigError(_CONTRADICTS)
    return rebuilt


def _bounds(packing: Packing, numbers: Sequence[int]) -> tuple[int, ...]:
    return (0, *(packing.packs[index].positions[-1] + 1 for index in numbers))


def _packs(packing: Packing) -> tuple[object, ...]:
    return packing.forward, packing.backward, [(pack.positions, pack.parameters) for pack in packing.covering]


def _depends_on(packing: Packing, policy: Policy) -> dict[str, str]:
    """Return what must be the same when a plan is made and when it is run."""
    return {
        "gradient clipping or loss scaling:": str(policy.deferred_update).lower(),
        "harmony.grouping:": str(policy.grouping).lower(),
        "weights whose bytes are": f"{sum(pack.weight_bytes for pack in packing.covering):,}",
        "gradients whose bytes are": f"{sum(pack.gradient_bytes for pack in packing.covering):,}",
    }
