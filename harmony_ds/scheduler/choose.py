"""The request for a plan, the plan over given packs, and the error when nothing fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harmony_ds.config.harmony import HarmonySettings
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.grid import amount, counted, gib_number
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.profile import Machine

_MOVING = 4
"""With fewer micro-batches the device holds the crossing tensors of all at once even where they go to the host: of one that
runs, one that has left and one that comes back.
"""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        settings: the ds_config's "harmony" block; its residency says what may be done in this run.
        micro_batches: the size of the group.
        budget_bytes: device memory for the plan (None: unlimited).
        beside_bytes: what was taken off for what is no part of a plan.
        exchange_bytes: what is to be taken off if several devices reduce gradients on the device.
        resident_bytes: what stays on the device besides packs: buffers.
        host_bytes: host memory for what waits there, of one device (None: unlimited). Where no plan can do with that, it is
            no bound: the host says itself what it lacks.
        policy: where tasks are placed; stash, kept and resident packs are decided by the search.
        thorough: whether neighbours of the best plans are tried, too; without, the search is quick.
        most_listed: the most micro-batches of which a plan lists all tasks. A plan of more lists those of a few that stand
            for all: it cannot be run. None: it lists all.
    """

    settings: HarmonySettings
    micro_batches: int
    budget_bytes: int | None
    resident_bytes: int
    policy: Policy
    beside_bytes: int = 0
    exchange_bytes: int = 0
    host_bytes: int | None = None
    thorough: bool = True
    most_listed: int | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether the plan lists the tasks of a few micro-batches that stand for all."""
        is_steady = self.policy.grouping and self.policy.pipeline == 1
        return self.most_listed is not None and self.micro_batches > self.most_listed and is_steady

    @property
    def budget(self) -> str:
        """The budget in an error."""
        if not self.beside_bytes or self.budget_bytes is None:
            return f"{self.budget_bytes:,} bytes"
        return (
            f"{self.budget_bytes:,} bytes (of {self.budget_bytes + self.beside_bytes:,}, {self.beside_bytes:,} are set "
            "aside for libraries' workspaces, for the allocator, and for tensors that were on the device already)"
        )

    @property
    def is_manual(self) -> bool:
        """Whether packs are given and not searched for."""
        return self.settings.pack_layers is not None


def may_move_crossing(request: PlanRequest) -> bool:
    """Return whether what waits between packs may go to the host, and the device may hold less by that."""
    policy, stash_may_go = request.policy, request.settings.stash != "device"
    least = 1 if policy.slices_from_host else _MOVING
    return stash_may_go and policy.grouping and policy.pipeline == 1 and request.micro_batches >= least


def among_devices(request: PlanRequest, machine: Machine) -> tuple[PlanRequest, ...]:
    """How several devices may work together: as harmony.parallel, .weights and .reduce say, or else as may be fastest.

    Where what the devices send each other takes another way than the link, and a faster one, each swaps in a share of a
    pack, and gradients are reduced on the devices. Else the host may be faster, or not: that depends on its memory. (The
    CPU device has no link: its memory is the host's.)
    """
    if not (machine.copies_overlap or request.is_manual):
        # A swap-in issued early would take memory and save nothing.
        request = replace(request, policy=replace(request.policy, prefetch=False))
    ways: tuple[PlanRequest, ...] = (request,)
    if request.policy.pipeline > 1 and request.settings.parallel == "auto":
        ways = (replace(request, policy=replace(request.policy, pipeline=1)), request)
    if request.policy.alone:
        return ways
    settings, overlaps = request.settings, machine.copies_overlap
    beside = overlaps and not machine.peers_share_link
    faster_in = beside and machine.peer_bytes_per_ms > machine.swap_in_bytes_per_ms
    in_shares = request.policy.devices > 1 and (
        settings.weights == "share" or (settings.weights == "auto" and faster_in)
    )
    on_host: tuple[bool, ...]
    if settings.reduce != "auto" or request.policy.servers > 1:  # which do not share memory
        on_host = (settings.reduce == "host",)
    elif beside and machine.peer_bytes_per_ms > machine.swap_out_bytes_per_ms:
        on_host = (False,)
    else:
        on_host = (False, True) if overlaps else (True,)
    return tuple(
        _reducing(way, replace(way.policy, swaps_in_shares=in_shares, reduce_on_host=one))
        for way in ways
        for one in on_host
    )


def _reducing(request: PlanRequest, policy: Policy) -> PlanRequest:
    """Return the request for `policy`, without the device memory that reducing gradients so takes."""
    taken, budget = request.exchange_bytes if policy.reduces_on_device else 0, request.budget_bytes
    return replace(
        request,
        policy=policy,
        budget_bytes=None if budget is None else max(0, budget - taken),
        beside_bytes=request.beside_bytes + (taken if budget is None else min(taken, budget)),
        exchange_bytes=0,
    )


def resident_bytes(packing: Packing, policy: Policy, request: PlanRequest) -> int:
    """Everything that stays on the device from step to step, with weights and optimizer state of resident packs."""
    return request.resident_bytes + sum(packing.packs[index].resident_bytes for index in policy.resident)


def make_plan(packing: Packing, costs: CostTable, request: PlanRequest, policy: Policy) -> Plan:
    """Return the plan over given packs, with its peak."""
    micro_batches, stays = request.micro_batches, resident_bytes(packing, policy, request)
    tasks = compose_step(packing, Group.with_fresh(micro_batches), policy)
    walked = walk_memory(packing.packs, tasks, costs, slices_from_host=policy.slices_from_host)
    peaks = tuple(stays + peak for peak in walked.device_peaks)
    return Plan(packing, policy, tasks, micro_batches, stays, max(peaks), costs.calls, walked.activation_bytes, peaks)


def explain(plan: Plan, request: PlanRequest, graph: LayerGraph, costs: CostTable) -> str:
    """Why nothing fits, with the smallest plan that was found, and what to do about it."""
    assert request.budget_bytes is not None
    packs = plan.packing.covering
    weights = max(pack.weight_bytes for pack in packs)
    gradients = max(pack.gradient_bytes for pack in packs)
    stays = plan.resident_bytes + sum(pack.weight_bytes + pack.gradient_bytes for pack in plan.packing.unlayered_packs)
    most, operation = _largest_operation(graph, costs)
    rest = max(most, plan.peak_bytes - stays - min(2, len(packs)) * weights - gradients)
    pack_layers = request.settings.pack_layers or 1
    other_layers = "name smaller layers in harmony.layers"
    if plan.policy.slices_from_host and plan.policy.backward_rows:  # every layer is small: code between layers is left
        other_layers = (
            "name a module in harmony.layers whose own code joins what layers inside it return, such as "
            '"*.embeddings": it is one layer then, and cut'
        )
    ways = (
        f"raise harmony.device_memory_gib to {gib_number(plan.peak_bytes + request.beside_bytes)} (GiB) or more",
        way_to_smaller_micro_batches(costs.rows),
        f"lower harmony.pack_layers (now {pack_layers})" if pack_layers > 1 else "",
        other_layers,
        "lower harmony.residency" if plan.policy.resident else "",
    )
    return (
        f"the smallest plan needs {plan.peak_bytes:,} bytes ({amount(plan.peak_bytes)}) of device memory, and the budget "
        f"is {request.budget}: {plan.peak_bytes - request.budget_bytes:,} too many. It holds "
        f"{weights:,} bytes of weights for the largest pack (twice while the next pack is prefetched), {gradients:,} of "
        f"gradients, {stays:,} that are resident, and about {rest:,} of activations of "
        f"{counted(plan.micro_batches, 'micro-batch')}. With one micro-batch, {operation} takes most: {most:,} bytes. "
        "Ways out: " + "; ".join(f"({number}) {way}" for number, way in enumerate(filter(None, ways), 1)) + "."
    )


def way_to_smaller_micro_batches(rows: int) -> str:
    """Return what to do about a micro-batch of so many rows (0: not known) that is too large."""
    return "shorten the rows (a micro-batch has one already)" if rows == 1 else "lower train_micro_batch_size_per_gpu"


def _largest_operation(graph: LayerGraph, costs: CostTable) -> tuple[int, str]:
    """Return the device bytes beside weights of what takes most while one micro-batch goes through it, and its name."""
    operations = [(costs.tail_bytes, "the loss")]
    for layer, cost in zip(costs.calls, costs.costs, strict=True):
        name = graph.layers[layer].name
        operations.append((cost.forward.peak_bytes, f"the forward pass of layer {name}"))
        operations.append((cost.backward.peak_bytes, f"the backward pass of layer {name}"))
        operations.append((cost.backward.code_peak_bytes, f"the backward pass of the code after layer {name}"))
    return max(operations)
