"""Forecast of a plan: time, tokens per second, memory on both sides, its bottleneck, and changes that would help.

Arithmetic over a survey: nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.errors import DoesNotFitError
from harmony_ds.estimate.survey import Survey, update_cost
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.host_room import waiting_of
from harmony_ds.scheduler.joining import Advice, JoinedCosts, advise
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import uniform_bounds
from harmony_ds.scheduler.plan import ALL_PACKS, Plan
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.simulate import Prediction, simulate
from harmony_ds.scheduler.swaps import lower_bound_bytes, zero3_offload_bytes


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
            self.survey.subject.items * self.plan.micro_batches * self.plan.policy.together * self.plan.policy.devices
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
    def lower_bound_bytes(self) -> int:
        """Weights and gradients that a step with these packs must move, for each device."""
        return lower_bound_bytes(self.plan)

    @property
    def zero3_offload_bytes(self) -> int:
        """Bytes that ZeRO-3 with parameter and optimizer offload would move on one device."""
        survey, count = self.survey, self.plan.micro_batches * self.plan.policy.together
        return zero3_offload_bytes(survey.graph, survey.element.weight, count)

    @property
    def busy_share(self) -> Mapping[str, float]:
        """By stream: the part of the step in which it works."""
        return {name: ms / self.prediction.step_ms for name, ms in self.prediction.busy_ms.items()}

    @property
    def bottleneck(self) -> str:
        """The stream that works most."""
        return max(self.busy_share, key=lambda name: self.busy_share[name])


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
    elements = sum(spec.numel for spec in parameters if spec.trainable)
    return {
        "weights": sum(slab_bytes(spec.numel, weight) for spec in parameters),
        "masters": update.master_bytes * elements if update.copy_bytes else 0,
        "optimizer": 0 if update.on_disk else update.state_bytes * update.states * elements,
    }


def smallest_peak_bytes(survey: Survey) -> int:
    """Return the least device memory that a plan needs: every call a pack, no prefetch, the stash on the host."""
    request = survey.request
    early = request.policy.prefetch and request.is_manual and not survey.profile.machine.copies_overlap
    away = 0 if request.settings.stash == "device" else ALL_PACKS
    packer = Packer(survey.graph, survey.costs, survey.element, request.policy)
    packing = packer.packing(uniform_bounds(len(survey.graph.calls), request.settings.pack_layers or 1))
    policy = replace(request.policy, prefetch=early, stash_on_host=away)
    return make_plan(packing, survey.costs, request, policy).peak_bytes


def joining(now: Forecast) -> Advice | None:
    """Return joined layer calls that would be much faster than `now`, where the ds_config keeps single ones."""
    survey = now.survey
    if survey.request.settings.micro_batch != "config" or not survey.may_join:
        return None
    joined = JoinedCosts(survey.graph, survey.costs, survey.profile.machine, survey.element)
    return advise(now.choice, survey.profile.tables[-1][0], survey.request, joined)


def changes(now: Forecast) -> dict[str, float]:
    """Return the items per second that changes would make, one thing at a time, best first.

    Each is a lower bound: other rates are simulated with this plan, more memory and longer steps with one that a quick
    search finds.
    """
    found = [*_other_rates(now), *_other_requests(now)]
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


def _other_requests(now: Forecast) -> Iterator[tuple[str, float]]:
    survey = now.survey
    request = replace(survey.request, thorough=False)
    together = 2 * request.micro_batches * request.policy.together
    wishes: dict[str, dict[str, Any]] = {
        f"twice the micro-batches ({together})": {"micro_batches": 2 * request.micro_batches}
    }
    if request.budget_bytes is not None:
        wishes["twice the device memory"] = {"budget_bytes": 2 * request.budget_bytes}
    for what, wish in wishes.items():
        with suppress(DoesNotFitError):  # more micro-batches need more memory
            quick = forecast(replace(survey, request=replace(request, **wish)), now.host_budget_bytes)
            yield what, max(now.items_per_s, quick.items_per_s)


def _twice(machine: Machine, *rates: str) -> Machine:
    return replace(machine, **{rate: 2 * getattr(machine, rate) for rate in rates})


def _faster(costs: CostTable) -> CostTable:
    times = ("forward_ms", "backward_ms", "fused_ms", "propagate_ms")
    calls = tuple(replace(call, **{name: getattr(call, name) / 2 for name in times}) for call in costs.costs)
    return replace(costs, costs=calls, head_ms=costs.head_ms / 2, tail_ms=costs.tail_ms / 2)
