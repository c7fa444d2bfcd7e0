"""What a plan is wanted for, the plan over given packs, and what to say when nothing fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from harmony_ds.config.harmony import HarmonySettings
from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.plan import Packing, Plan, Policy, UnlayeredParameters
from harmony_ds.scheduler.validate import validate


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is wanted for.

    Attributes:
        settings: the ds_config's "harmony" block; its residency says what may be done in this run.
        micro_batches: the size of the group.
        budget_bytes: device memory for the plan (None: unlimited).
        beside_bytes: what was taken off for what is no part of a plan.
        unlayered_bytes: what stays on the device besides packs: unlayered parameters, their gradients, buffers.
        policy: where tasks are placed; stash, kept and resident packs are decided by the search.
        unlayered: the part of `unlayered_bytes` that is swapped.
    """

    settings: HarmonySettings
    micro_batches: int
    budget_bytes: int | None
    unlayered_bytes: int
    policy: Policy
    unlayered: UnlayeredParameters = field(default_factory=UnlayeredParameters)
    beside_bytes: int = 0

    @property
    def budget(self) -> str:
        """The budget in an error."""
        if not self.beside_bytes or self.budget_bytes is None:
            return f"{self.budget_bytes:,}"
        return (
            f"{self.budget_bytes:,} (of {self.budget_bytes + self.beside_bytes:,}, {self.beside_bytes:,} are set aside for "
            "libraries' workspaces, for the allocator, and for tensors that were on the device already)"
        )

    @property
    def is_manual(self) -> bool:
        """Whether packs are given and not searched for."""
        return self.settings.pack_layers is not None


def resident_bytes(packing: Packing, policy: Policy, request: Request) -> int:
    """Everything that stays on the device: the unlayered parameters, and weights and optimizer state of resident packs."""
    return request.unlayered_bytes + sum(packing.packs[index].resident_bytes for index in policy.resident)


def make_plan(packing: Packing, costs: CostTable, request: Request, policy: Policy) -> Plan:
    """The plan over given packs, validated, with its peak."""
    plan = draft_plan(packing, request, policy, 0)
    validate(packing, plan.tasks, Group.of(request.micro_batches), policy)
    peak = plan.resident_bytes + walk_memory(packing.packs, plan.tasks, costs).peak_bytes
    return replace(plan, peak_bytes=peak)


def draft_plan(packing: Packing, request: Request, policy: Policy, peak_bytes: int) -> Plan:
    """The plan over given packs, its peak known from elsewhere, to be compared with others."""
    tasks = compose_step(packing, Group.of(request.micro_batches), policy)
    stays = resident_bytes(packing, policy, request)
    return Plan(packing, policy, tasks, request.micro_batches, stays, peak_bytes, request.unlayered)


def explain(plan: Plan, request: Request) -> str:
    """Why nothing fits, with the smallest plan that was found, and what to do about it."""
    assert request.budget_bytes is not None
    weights = max(pack.weight_bytes for pack in plan.packs)
    gradients = max(pack.gradient_bytes for pack in plan.packs)
    rest = plan.peak_bytes - plan.resident_bytes - min(2, len(plan.packs)) * weights - gradients
    return (
        f"the smallest plan needs {plan.peak_bytes:,} bytes of device memory but the budget is "
        f"{request.budget}: {plan.peak_bytes - request.budget_bytes:,} too many. It holds "
        f"{weights:,} bytes of weights for the largest pack (twice while the next pack is prefetched), {gradients:,} of "
        f"gradients, {plan.resident_bytes:,} that are resident, and about {max(rest, 0):,} of activations of "
        f"{plan.micro_batches} micro-batches. Ways out: (1) raise harmony.device_memory_gib; (2) lower "
        f"train_micro_batch_size_per_gpu; (3) lower harmony.pack_layers (now {request.settings.pack_layers or 'chosen'}); "
        "(4) name smaller layers in harmony.layers"
        + ("; (5) lower harmony.residency." if request.settings.residency else ".")
    )
