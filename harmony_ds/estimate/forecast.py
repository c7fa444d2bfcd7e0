"""Forecast of a plan: time, tokens per second, memory on both sides, its bottleneck, and changes that would help.

Arithmetic over a survey: nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.errors import DoesNotFitError
from harmony_ds.estimate.survey import Survey
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.hardware import UpdateCost
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.host_room import waiting_of
from harmony_ds.scheduler.joining import Advice, JoinedCosts, advise
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import uniform_bounds
from harmony_ds.scheduler.plan import ALL_PACKS, Plan
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.simulate import Prediction, simulate
from harmony_ds.scheduler.spans import COMPUTE, HOST, PEER, SWAP_IN, SWAP_OUT, UPDATE
from harmony_ds.scheduler.swaps import lower_bound_bytes, zero3_offload_bytes

STREAM_NAMES = {
    COMPUTE: "compute",
    SWAP_IN: "swapping in",
    SWAP_OUT: "swapping out",
    UPDATE: "the host's update",
    HOST: "the engine's own work",
    PEER: "exchange between devices",
}


def name_of(stream: str) -> str:
    """Return a stream's name for people, with its device's number where that is not the first."""
    kind, _, device = stream.partition(" ")
    return STREAM_NAMES[kind] + (f" (device {device})" if device else "")


@dataclass(frozen=True, slots=True)
class Situation:
    """Survey, with the measures that a step is judged by.

    Attributes:
        update: state that the optimizer keeps and moves for each trainable parameter.
        host_budget_bytes: host memory (None: not known).
        items: tokens or samples of a micro-batch.
    """

    survey: Survey
    update: UpdateCost
    host_budget_bytes: int | None
    items: int


@dataclass(frozen=True, slots=True)
class Change:
    """Something that would be different, and the items per second that come of it."""

    what: str
    items_per_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """One optimizer step, as planned.

    Attributes:
        choice: the plan, its prediction and its reason.
        items_per_step: tokens or samples, of all devices.
        device_budget_bytes, host_budget_bytes: None where not known.
        host_bytes: by kind, for all devices.
        lower_bound_bytes: weights and gradients that a step with these packs must move, for each device.
        zero3_offload_bytes: what ZeRO-3 with parameter and optimizer offload would move on one device.
    """

    choice: Choice
    items_per_step: int
    device_budget_bytes: int | None
    host_bytes: Mapping[str, int]
    host_budget_bytes: int | None
    lower_bound_bytes: int
    zero3_offload_bytes: int

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def prediction(self) -> Prediction:
        return self.choice.prediction

    @property
    def items_per_s(self) -> float:
        return self.items_per_step / self.prediction.step_ms * 1e3

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())

    @property
    def host_missing_bytes(self) -> int:
        """Host memory that lacks; 0 where everything fits."""
        if self.host_budget_bytes is None:
            return 0
        return max(0, self.host_total_bytes - self.host_budget_bytes)

    @property
    def busy_share(self) -> Mapping[str, float]:
        """By stream: the part of the step in which it works."""
        return {name: ms / self.prediction.step_ms for name, ms in self.prediction.busy_ms.items()}

    @property
    def bottleneck(self) -> str:
        """The stream that works most."""
        return max(self.busy_share, key=lambda name: self.busy_share[name])


def forecast(situation: Situation) -> Forecast:
    """Return the forecast of the fastest plan.

    Raises:
        DoesNotFitError: nothing fits the device.
    """
    survey = situation.survey
    choice = _searched(situation)
    weight = survey.element.weight
    micro_batches = choice.plan.micro_batches * choice.plan.policy.together
    return Forecast(
        choice=choice,
        items_per_step=situation.items * micro_batches * choice.plan.policy.devices,
        device_budget_bytes=survey.request.budget_bytes,
        host_bytes=host_bytes(situation, choice),
        host_budget_bytes=situation.host_budget_bytes,
        lower_bound_bytes=lower_bound_bytes(choice.plan),
        zero3_offload_bytes=zero3_offload_bytes(survey.graph, weight, micro_batches),
    )


def _searched(situation: Situation) -> Choice:
    """Return the fastest plan that the host has room for, or the fastest of all if it has none for any."""
    survey, request, room = situation.survey, situation.survey.request, situation.host_budget_bytes
    if room is not None:
        left = max(0, room - sum(_state_bytes(situation).values()))
        request = replace(request, host_bytes=left // request.policy.devices)
    return search(survey.graph, survey.costs, survey.profile.machine, survey.element, request)[0]


def host_bytes(situation: Situation, choice: Choice) -> dict[str, int]:
    """Return bytes of host memory while the plan runs, by kind, for all devices (weights and state are there once)."""
    plan = choice.plan
    waiting = waiting_of(plan, situation.survey.costs)
    return {
        **_state_bytes(situation),
        "gradients": plan.policy.devices * waiting.gradient_bytes,
        "stash": plan.policy.devices * waiting.stash_bytes,
    }


def _state_bytes(situation: Situation) -> dict[str, int]:
    """Return the bytes that every plan needs."""
    weight, parameters = situation.survey.element.weight, situation.survey.graph.parameters
    update = situation.update
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


def joining(survey: Survey, now: Choice) -> Advice | None:
    """Return joined layer calls that would be much faster than `now`, where the ds_config keeps single ones."""
    if survey.request.settings.micro_batch != "config" or not survey.may_join:
        return None
    joined = JoinedCosts(survey.graph, survey.costs, survey.profile.machine, survey.element)
    return advise(now, survey.profile.tables[-1][0], survey.request, joined)


def changes(situation: Situation, now: Forecast) -> tuple[Change, ...]:
    """Return changes that would be faster, one thing at a time, best first.

    Each is a lower bound: other rates are simulated with this plan, more memory and longer steps with it or one that a
    quick search finds.
    """
    found = [*_other_rates(situation, now), *_other_requests(situation, now)]
    return tuple(sorted(found, key=lambda change: -change.items_per_s))


def _other_rates(situation: Situation, now: Forecast) -> Iterator[Change]:
    costs, machine = situation.survey.costs, situation.survey.profile.machine
    link = _twice(machine, "swap_in_bytes_per_ms", "swap_out_bytes_per_ms", "link_bytes_per_ms")
    host = _twice(machine, "host_bytes_per_ms", "update_elements_per_ms", "norm_elements_per_ms")
    host = replace(host, update_bytes_per_element=machine.update_bytes_per_element / 2)  # updates are faster with it
    for what, changed_costs, changed_machine in (
        ("a link twice as fast", costs, link),
        ("host memory twice as fast", costs, host),
        ("a device that computes twice as fast", _faster(costs), machine),
    ):
        prediction = simulate(now.plan, changed_costs, changed_machine)
        yield Change(what, now.items_per_step / prediction.step_ms * 1e3)


def _other_requests(situation: Situation, now: Forecast) -> Iterator[Change]:
    survey, request = situation.survey, replace(situation.survey.request, thorough=False)
    if request.budget_bytes is not None:
        more = replace(survey, request=replace(request, budget_bytes=2 * request.budget_bytes))
        quick = forecast(replace(situation, survey=more))
        yield Change("twice the device memory", max(now.items_per_s, quick.items_per_s))
    twice = replace(request, micro_batches=2 * request.micro_batches)
    what = f"twice the micro-batches ({twice.micro_batches * twice.policy.together})"
    plan = make_plan(now.plan.packing, survey.costs, twice, now.plan.policy)
    if request.budget_bytes is None or plan.peak_bytes <= request.budget_bytes:
        prediction = simulate(plan, survey.costs, survey.profile.machine)
        yield Change(what, 2 * now.items_per_step / prediction.step_ms * 1e3)
        return
    try:
        yield Change(what, forecast(replace(situation, survey=replace(survey, request=twice))).items_per_s)
    except DoesNotFitError:
        return  # more micro-batches need more memory


def _twice(machine: Machine, *rates: str) -> Machine:
    return replace(machine, **{rate: 2 * getattr(machine, rate) for rate in rates})


def _faster(costs: CostTable) -> CostTable:
    times = ("forward_ms", "backward_ms", "fused_ms", "propagate_ms")
    calls = tuple(replace(call, **{name: getattr(call, name) / 2 for name in times}) for call in costs.costs)
    return replace(costs, costs=calls, head_ms=costs.head_ms / 2, tail_ms=costs.tail_ms / 2)
