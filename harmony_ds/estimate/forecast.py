"""Forecast of a plan: time, tokens per second, memory on both sides, its bottleneck, and changes that would help.

Arithmetic over a survey: nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.estimate.survey import Survey, update_cost
from harmony_ds.offload.disk_weights import HOST_BYTES
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.host_room import cast_bytes, waiting_of
from harmony_ds.scheduler.joining import Advice, JoinedCosts, advise
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import uniform_bounds
from harmony_ds.scheduler.plan import ALL_PACKS, Plan
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.simulate import Prediction, simulate
from harmony_ds.scheduler.swaps import zero3_offload_bytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """One optimizer step, as planned.

    Attributes:
        survey: of the model and the machine.
        choice: the plan, its prediction and its reason.
        host_budget_bytes: host memory that may be used (None: not known).
    """

    survey: Survey
    choice: Choice
    host_budget_bytes: int | None

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def prediction(self) -> Prediction:
        return self.choice.prediction

    @property
    def items_per_step(self) -> int:
        """Tokens or samples, of all devices."""
        return (
            self.survey.subject.items
            * self.plan.micro_batches
            * self.plan.policy.joined_count
            * self.plan.policy.devices
        )

    @property
    def items_per_s(self) -> float:
        return self.items_per_step / self.prediction.step_ms * 1e3

    @property
    def host_bytes(self) -> Mapping[str, int]:
        """Host memory while the plan runs, by kind, for all devices (weights and state are there once)."""
        waiting, devices = waiting_of(self.plan, self.survey.costs), self.plan.policy.devices
        waits = {"gradients": devices * waiting.gradient_bytes, "stash": devices * waiting.stash_bytes}
        return {**_state_bytes(self.survey), **waits}

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())

    @property
    def host_missing_bytes(self) -> int:
        """Host memory that lacks; 0 where everything fits."""
        budget = self.host_budget_bytes
        return 0 if budget is None else max(0, self.host_total_bytes - budget)

    @property
    def disk_bytes(self) -> int:
        """Weights, masters and optimizer state on a disk."""
        update, parameters = update_cost(self.survey.config), self.survey.graph.parameters
        trained = sum(spec.numel for spec in parameters if spec.trainable)
        return update.disk_bytes * trained + sum(slab_bytes(p.numel, update.disk_weight_bytes) for p in parameters)

    @property
    def zero3_offload_bytes(self) -> int:
        """Bytes that ZeRO-3 with parameter and optimizer offload would move on one device."""
        survey, count = self.survey, self.plan.micro_batches * self.plan.policy.joined_count
        return zero3_offload_bytes(survey.graph, survey.element.weight, count)

    @property
    def busy_share(self) -> Mapping[str, float]:
        """By stream: the part of the step in which it works."""
        return {name: ms / self.prediction.step_ms for name, ms in self.prediction.busy_ms.items()}


def forecast(survey: Survey, host_budget_bytes: int | None = None) -> Forecast:
    """Return the forecast of the fastest plan that the host has room for, or the fastest of all if it has none for any.

    Raises:
        DoesNotFitError: nothing fits the device.
    """
    request = survey.request
    if host_budget_bytes is not None:
        left = max(0, host_budget_bytes - sum(_state_bytes(survey).values()))
        request = replace(request, host_bytes=left // request.policy.devices)
    choice = search(survey.graph, survey.costs, survey.profile.machine, survey.element, request)[0]
    return Forecast(survey, choice, host_budget_bytes)


def _state_bytes(survey: Survey) -> dict[str, int]:
    """Return the bytes that every plan needs."""
    weight, parameters = survey.element.weight, survey.graph.parameters
    update = update_cost(survey.config)
    weights = sum(slab_bytes(spec.numel, weight) for spec in parameters)
    elements = sum(spec.numel for spec in parameters if spec.trainable)
    devices = survey.request.policy.devices
    pieces = [-(-spec.numel // devices) for spec in parameters if spec.trainable]
    casts = cast_bytes(pieces, survey.element.gradient, survey.config.master_dtype.itemsize)
    return {
        "weights": min(weights, HOST_BYTES) if update.disk_weight_bytes else weights,
        "masters": update.master_bytes * elements if update.copy_bytes else 0,
        "optimizer": 0 if update.disk_bytes else update.state_bytes * update.states * elements,
        "casts": devices * casts,
    }


def smallest_peak_bytes(survey: Survey) -> int:
    """Return the least device memory that a plan needs: every call a pack, no prefetch, the stash on the host."""
    request = survey.request
    early = request.policy.prefetch and request.is_manual and not survey.profile.machine.copies_overlap
    packer = Packer(survey.graph, survey.costs, survey.element, request.policy)
    packing = packer.packing(uniform_bounds(len(survey.graph.calls), request.settings.pack_layers or 1))
    policy = replace(request.policy, prefetch=early, stash_on_host=_stash_away(request))
    return make_plan(packing, survey.costs, request, policy).peak_bytes


def _stash_away(request: PlanRequest) -> int:
    """Return of how many packs the stash may wait on the host."""
    return 0 if request.settings.stash == "device" else ALL_PACKS


def joining(now: Forecast) -> Advice | None:
    """Return joined layer calls that would be much faster than `now`, where the ds_config keeps single ones."""
    survey = now.survey
    if survey.request.settings.micro_batch != "config" or not survey.may_join:
        return None
    joined = JoinedCosts(survey.graph, survey.costs, survey.profile.machine, survey.element)
    return advise(now.choice, survey.profile.tables[-1][0], survey.request, joined)


def changes(now: Forecast) -> dict[str, float]:
    """Return the items per second that changes would make, one thing at a time, best first.

    Each is a lower bound: other rates and longer steps are simulated with this plan's packs, more memory with a plan that a
    quick search finds.
    """
    found = [*_other_rates(now), *_longer_step(now), *_more_memory(now)]
    return dict(sorted(found, key=lambda change: -change[1]))


def _other_rates(now: Forecast) -> Iterator[tuple[str, float]]:
    costs, machine = now.survey.costs, now.survey.profile.machine
    link = _twice(machine, "swap_in_bytes_per_ms", "swap_out_bytes_per_ms", "link_bytes_per_ms")
    host = _twice(machine, "host_bytes_per_ms", "update_elements_per_ms", "norm_elements_per_ms")
    host = replace(host, update_bytes_per_element=machine.update_bytes_per_element / 2)  # updates are faster with it
    for what, changed_costs, changed_machine in (
        ("a link twice as fast", costs, link),
        ("host memory twice as fast", costs, host),
        ("a device that computes twice as fast", _faster(costs), machine),
    ):
        prediction = simulate(now.plan, changed_costs, changed_machine)
        yield what, now.items_per_step / prediction.step_ms * 1e3


def _longer_step(now: Forecast) -> Iterator[tuple[str, float]]:
    """Yield twice the micro-batches, with less memory in use where the plan's is too much."""
    survey, policy = now.survey, now.plan.policy
    request = replace(survey.request, micro_batches=2 * survey.request.micro_batches)
    frugal = replace(policy, stash_on_host=_stash_away(request), kept=(), graphs=())
    for used in (policy, frugal, replace(frugal, prefetch=False)):
        plan = make_plan(now.plan.packing, survey.costs, request, used)
        if request.budget_bytes is None or plan.peak_bytes <= request.budget_bytes:
            step_ms = simulate(plan, survey.costs, survey.profile.machine).step_ms
            rate = max(now.items_per_s, 2 * now.items_per_step / step_ms * 1e3)
            yield f"twice the micro-batches ({request.micro_batches * policy.joined_count})", rate
            return


def _more_memory(now: Forecast) -> Iterator[tuple[str, float]]:
    request = now.survey.request
    if request.budget_bytes is not None:
        wish = replace(request, budget_bytes=2 * request.budget_bytes, thorough=False)
        quick = forecast(replace(now.survey, request=wish), now.host_budget_bytes)
        yield "twice the device memory", max(now.items_per_s, quick.items_per_s)


def _twice(machine: Machine, *rates: str) -> Machine:
    return replace(machine, **{rate: 2 * getattr(machine, rate) for rate in rates})


def _faster(costs: CostTable) -> CostTable:
    times = ("forward_ms", "backward_ms", "fused_ms", "propagate_ms")
    calls = tuple(replace(call, **{name: getattr(call, name) / 2 for name in times}) for call in costs.costs)
    return replace(costs, costs=calls, head_ms=costs.head_ms / 2, tail_ms=costs.tail_ms / 2)
