"""A saved plan, checked against the model and the settings it is to run with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from harmony_ds.config.harmony import PlanSwitches
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import ConfigError, DoesNotFitError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.choose import PlanRequest, among_devices, make_plan
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.plan import Pack, Packing, Plan, Policy
from harmony_ds.scheduler.resident import closed
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.simulate import simulate

_AMONG_DEVICES = ("devices", "servers", "shared", "reduce_on_host")
"""Of a policy: a plan that was made for one device may be run on several."""
_CONTRADICTS = (
    "harmony.plan contradicts itself: its packs do not cover the calls of both passes once and in order, or one is "
    "resident and shares a parameter with another that is not. Plan again."
)


def adopt(
    plan: Plan, graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes, request: PlanRequest
) -> Choice:
    """The choice of `plan`: its packs and its policy, with tasks and memory for what is wanted now.

    Raises:
        ConfigError: it was made for another model, other dtypes or another kind of update, or contradicts itself.
        DoesNotFitError: with what was measured now, it does not fit.
    """
    ways = among_devices(request, machine)
    request = next((one for one in ways if one.policy.reduce_on_host == plan.policy.reduce_on_host), ways[0])
    packing = _rebuilt(plan, Packer(graph, costs, element, request.policy), len(graph.calls))
    _check_policy(plan.policy, request.policy)
    wanted = request.policy
    adopted = make_plan(
        packing, costs, request, replace(plan.policy, **{one: getattr(wanted, one) for one in _AMONG_DEVICES})
    )
    if request.budget_bytes is not None and adopted.peak_bytes > request.budget_bytes:
        raise DoesNotFitError(
            f"harmony.plan needs {adopted.peak_bytes:,} bytes of device memory and the budget is "
            f"{request.budget}: {adopted.peak_bytes - request.budget_bytes:,} too many. Raise "
            "harmony.device_memory_gib, or plan again."
        )
    return Choice(adopted, simulate(adopted, costs, machine), "as saved")


def _rebuilt(plan: Plan, packer: Packer, calls: int) -> Packing:
    """The same packs of this model, which makes so many calls."""
    packing, resident = plan.packing, plan.policy.resident
    try:
        backward, forward = _bounds(packing, packing.backward), _bounds(packing, packing.forward)
        fused_at = packing.fused.positions[0]
    except IndexError:
        raise ConfigError(_CONTRADICTS) from None
    if backward[-1] != calls:
        raise ConfigError(f"harmony.plan was made for a model of {backward[-1]} layer calls; this one makes {calls}.")
    rebuilt = packer.packing(backward, forward)
    same = (packing.forward, packing.backward) == (rebuilt.forward, rebuilt.backward)
    stays = set(resident).issubset(rebuilt.backward) and closed(rebuilt, resident) == resident
    if not (same and stays and forward[-1] == fused_at and len(packing.covering) == len(rebuilt.covering)):
        raise ConfigError(_CONTRADICTS)
    for pack, now in zip(packing.covering, rebuilt.covering, strict=True):
        if _compared(pack, pack.index in resident) != _compared(now, pack.index in resident):
            raise ConfigError(
                f"harmony.plan does not match this model or its dtypes: pack {pack.index} holds {pack.weight_bytes:,} "
                f"bytes of weights and {pack.gradient_bytes:,} of gradients there, {now.weight_bytes:,} and "
                f"{now.gradient_bytes:,} here. Plan again."
            )
    return rebuilt


def _check_policy(saved: Policy, wanted: Policy) -> None:
    if saved.deferred_update != wanted.deferred_update:
        raise ConfigError(
            "harmony.plan was made "
            + ("with" if saved.deferred_update else "without")
            + " gradient clipping or loss scaling, and is to run "
            + ("with" if wanted.deferred_update else "without")
            + ". Plan again."
        )
    for key in (one.name for one in fields(PlanSwitches) if one.name not in ("prefetch", "gradient_slabs")):
        there, here = getattr(saved, key), getattr(wanted, key)
        if there != here:
            raise ConfigError(
                f"harmony.plan was made with harmony.{key} {str(there).lower()}, and is to run with "
                f"{str(here).lower()}. Plan again."
            )


def _compared(pack: Pack, resident: bool) -> Pack:
    """What must be as it was: not what depends on the number of devices, nor what a pack would take on a device where it
    does not stay.
    """
    pack = replace(pack, update_elements=0, gradient_pieces=(), sent_bytes=(), gathered_bytes=0)
    return pack if resident else replace(pack, resident_bytes=0, update_bytes=0)


def _bounds(packing: Packing, numbers: Sequence[int]) -> tuple[int, ...]:
    return (0, *(packing.packs[index].positions[-1] + 1 for index in numbers))
