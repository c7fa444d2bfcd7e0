"""Forecast how a surveyed model trains: step time, tokens per second, memory of device and host, and what would help.

Everything is arithmetic over a `Survey` (survey.py), with the planner and the simulator that also serve training: no model
runs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from harmony_ds.config import Config
from harmony_ds.errors import DoesNotFitError
from harmony_ds.estimate.survey import MOST_LISTED, Survey, frugal_policy, update_cost
from harmony_ds.offload.disk_weights import HOST_BYTES
from harmony_ds.scheduler.allocator_fit import SearchWith, beside_uploads, is_replayed, leaving, search_fitting
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.estimator import CandidateEstimator, SampledPlan
from harmony_ds.scheduler.host_room import cast_bytes, waiting_of
from harmony_ds.scheduler.joining import Advice, JoinedCosts, advise
from harmony_ds.scheduler.neighbours import Point
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.simulate import Prediction, simulate
from harmony_ds.scheduler.swaps import zero3_offload_bytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """Prediction of one optimizer step under the plan that was chosen.

    Attributes:
        survey: the model and the machine that the plan is for.
        choice: the plan, its simulated times, and why it was chosen.
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
        """Tokens or samples that all devices train on in one optimizer step."""
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
        """Host bytes while the plan runs, by kind; weights and optimizer state once, the rest for each process."""
        waiting, devices = waiting_of(self.plan, self.survey.costs), self.plan.policy.devices
        stash_bytes = waiting.stash_bytes + waiting.crossing_bytes
        waits = {"gradients": devices * waiting.gradient_bytes, "stash": devices * stash_bytes}
        return {**_state_bytes(self.survey), **waits}

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())

    @property
    def host_missing_bytes(self) -> int:
        """Host bytes that are needed beyond the budget; 0 where everything fits."""
        budget = self.host_budget_bytes
        return 0 if budget is None else max(0, self.host_total_bytes - budget)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the weights, masters and optimizer state that the ds_config keeps on a disk."""
        update, parameters = update_cost(self.survey.config), self.survey.graph.parameters
        trained = sum(spec.numel for spec in parameters if spec.trainable)
        weights = (
            sum(spec.weight_bytes(update.disk_weight_bytes) for spec in parameters) if update.disk_weight_bytes else 0
        )
        return update.disk_bytes * trained + weights

    @property
    def zero3_offload_bytes(self) -> int:
        """Bytes that ZeRO-3 with parameter and optimizer offload would move on one device."""
        survey, count = self.survey, self.plan.micro_batches * self.plan.policy.joined_count
        return zero3_offload_bytes(survey.graph, survey.element.weight, count)

    @property
    def busy_share(self) -> Mapping[str, float]:
        """The share of the step's time in which each stream works, by the stream's name."""
        return {name: ms / self.prediction.step_ms for name, ms in self.prediction.busy_ms.items()}


_CHOICES = 10
"""Plans among which the fastest is found, or that which the allocator can serve."""


def forecast(survey: Survey, host_budget_bytes: int | None = None) -> Forecast:
    """Return the forecast of the fastest plan that host memory holds; if it holds none, of the fastest plan of all.

    Raises:
        DoesNotFitError: no plan fits the device.
    """
    request = _request_with_host(survey, host_budget_bytes)
    among = _CHOICES if request.thorough else 1

    def search_with(less: PlanRequest, top: int = 1) -> tuple[Choice, ...]:
        return search(survey.graph, survey.costs, survey.profile.machine, survey.element, less, top, among)

    if survey.fragment_bytes:
        with suppress(DoesNotFitError):
            if not is_replayed(request, survey.costs):
                return Forecast(survey, search_with(request)[0], host_budget_bytes)
            return _beside_fragments(survey, request, partial(search_with, top=_CHOICES), host_budget_bytes)
        # As the engine does then: the plan takes all of the budget.
        request = leaving(request, -survey.fragment_bytes)
        survey = replace(survey, request=leaving(survey.request, -survey.fragment_bytes), fragment_bytes=0)
    return Forecast(survey, search_with(request)[0], host_budget_bytes)


def forecast_under(known: Sequence[Forecast], config: Config) -> Forecast:
    """Return the forecast under a ds_config with other gradients, stash, optimizer state, or micro-batches in a step.

    Where `config` changes nothing of what a search asked for but the bytes of gradients, its plan stays, if host and device
    have room for it; else a quick search finds one.

    Args:
        known: forecasts for the same model, host and device; the first one's ds_config is the one that is changed.
        config: as `Survey.under` takes it.

    Raises:
        DoesNotFitError: no plan fits the device.
    """
    now = known[0]
    survey = now.survey.under(config)
    for one in known:
        kept = _with_plan_of(one, survey)
        if kept is not None:
            request, machine = _request_with_host(survey, now.host_budget_bytes), survey.profile.machine
            (choice,) = search(survey.graph, survey.costs, machine, survey.element, request, fastest=(kept,))
            return Forecast(survey, choice, now.host_budget_bytes)
    return forecast(survey, now.host_budget_bytes)


def _with_plan_of(now: Forecast, survey: Survey) -> Choice | None:
    """Return the plan of `now` for the same request; None: that of `survey` is another one, or the plan does not fit."""
    if replace(survey.request, thorough=now.survey.request.thorough) != now.survey.request:
        return None
    request, policy = replace(survey.request, most_listed=MOST_LISTED), now.plan.policy
    cuts = Point.from_policy(now.plan.packing, policy)
    packing = Packer(survey.graph, survey.costs, survey.element, policy).packing(cuts.backward, cuts.forward)
    planned = _planned_within_budget(survey, request, packing, policy)
    if planned is None:
        return None
    prediction = simulate(planned.plan, survey.costs, survey.profile.machine, planned.counts)
    return Choice(planned.plan, prediction, now.choice.reason, counts=planned.counts)


def _planned_within_budget(
    survey: Survey, request: PlanRequest, packing: Packing, policy: Policy
) -> SampledPlan | None:
    """Return the plan over given packs; None: it takes more device memory than there is."""
    planned = CandidateEstimator(survey.costs, request).plan(packing, policy)
    if request.budget_bytes is not None and planned.plan.peak_bytes > request.budget_bytes:
        return None
    return planned


def _request_with_host(survey: Survey, host_budget_bytes: int | None) -> PlanRequest:
    """Return the request for a plan, of which many micro-batches are not listed, with the host memory that waiting has."""
    request = replace(survey.request, most_listed=MOST_LISTED)
    if host_budget_bytes is None:
        return request
    left = max(0, host_budget_bytes - sum(_state_bytes(survey).values()))
    return replace(request, host_bytes=left // request.policy.devices)


def _beside_fragments(
    survey: Survey, request: PlanRequest, search_with: SearchWith, host_budget_bytes: int | None
) -> Forecast:
    """Return the forecast of the fastest plan beside what is left to the allocator, which is as much as the plan needs."""
    whole = beside_uploads(leaving(request, -survey.fragment_bytes), survey.costs)
    fitting = search_fitting(search_with, whole, survey.costs, survey.fragment_bytes)
    more_bytes = fitting.fragment_bytes - survey.fragment_bytes
    survey = replace(survey, request=leaving(survey.request, more_bytes), fragment_bytes=fitting.fragment_bytes)
    return Forecast(survey, fitting.choices[0], host_budget_bytes)


def _state_bytes(survey: Survey) -> dict[str, int]:
    """Return the host bytes that every plan needs, by kind: weights, masters, optimizer state and the buffers of casts."""
    weight, parameters = survey.element.weight, survey.graph.parameters
    update = update_cost(survey.config)
    weights = sum(spec.weight_bytes(weight) for spec in parameters)
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


def joining(now: Forecast) -> Advice | None:
    """Return the advice to let layer calls take the rows of several micro-batches; None: that would not be much faster.

    Where the ds_config already lets the search join calls, there is no advice either.
    """
    survey = now.survey
    if survey.request.settings.micro_batch != "config" or not survey.may_join:
        return None
    joined = JoinedCosts(survey.graph, survey.costs, survey.profile.machine, survey.element)
    request = replace(survey.request, most_listed=MOST_LISTED)
    return advise(now.choice, survey.profile.tables[-1][0], request, joined)


def changes(now: Forecast) -> dict[str, float]:
    """Return the items per second after each of several changes of the machine or the step, best first.

    Each rate is a lower bound: faster hardware and longer steps are simulated with the packs of the plan that `now` has,
    more device memory with a plan that a quick search finds.
    """
    found = [*_with_faster_hardware(now), *_with_longer_step(now), *_with_more_memory(now)]
    return dict(sorted(found, key=lambda change: -change[1]))


def _with_faster_hardware(now: Forecast) -> Iterator[tuple[str, float]]:
    """Yield the items per second with a faster link, faster host memory and a faster device."""
    costs, machine = now.survey.costs, now.survey.profile.machine
    yield "a link twice as fast", _items_per_s(now, costs, _with_link_twice_as_fast(machine))
    yield "host memory twice as fast", _items_per_s(now, costs, _with_host_twice_as_fast(machine))
    yield "a device that computes twice as fast", _items_per_s(now, _computed_twice_as_fast(costs), machine)


def _items_per_s(now: Forecast, costs: CostTable, machine: Machine) -> float:
    """Return the items per second of the plan that `now` has, at other costs or rates."""
    return now.items_per_step / simulate(now.plan, costs, machine, now.choice.counts).step_ms * 1e3


def _with_link_twice_as_fast(machine: Machine) -> Machine:
    return replace(
        machine,
        swap_in_bytes_per_ms=2 * machine.swap_in_bytes_per_ms,
        swap_out_bytes_per_ms=2 * machine.swap_out_bytes_per_ms,
        link_bytes_per_ms=2 * machine.link_bytes_per_ms,
    )


def _with_host_twice_as_fast(machine: Machine) -> Machine:
    return replace(
        machine,
        host_bytes_per_ms=2 * machine.host_bytes_per_ms,
        update_elements_per_ms=2 * machine.update_elements_per_ms,
        update_bytes_per_element=machine.update_bytes_per_element / 2,  # updates are faster with it
        norm_elements_per_ms=2 * machine.norm_elements_per_ms,
    )


def _computed_twice_as_fast(costs: CostTable) -> CostTable:
    calls = tuple(
        replace(
            call,
            forward_ms=call.forward_ms / 2,
            backward_ms=call.backward_ms / 2,
            fused_ms=call.fused_ms / 2,
            propagate_ms=call.propagate_ms / 2,
        )
        for call in costs.costs
    )
    return replace(costs, costs=calls, head_ms=costs.head_ms / 2, tail_ms=costs.tail_ms / 2)


def _with_longer_step(now: Forecast) -> Iterator[tuple[str, float]]:
    """Yield the items per second with twice the micro-batches in a step.

    Where the plan's policy then takes too much device memory, it is simulated with more frugal ones.
    """
    survey, policy, machine = now.survey, now.plan.policy, now.survey.profile.machine
    request = replace(survey.request, micro_batches=2 * survey.request.micro_batches, most_listed=MOST_LISTED)
    frugal = frugal_policy(policy, request)
    for used in (policy, frugal, replace(frugal, prefetch=False)):
        planned = _planned_within_budget(survey, request, now.plan.packing, used)
        if planned is not None:
            step_ms = simulate(planned.plan, survey.costs, machine, planned.counts).step_ms
            rate = max(now.items_per_s, 2 * now.items_per_step / step_ms * 1e3)
            yield f"twice the micro-batches ({request.micro_batches * policy.joined_count})", rate
            return


def _with_more_memory(now: Forecast) -> Iterator[tuple[str, float]]:
    """Yield the items per second with twice the device memory, where it is bounded, of equal packs of several sizes.

    Each size is searched in no time; uneven packs, which are not tried, may be faster.
    """
    request = now.survey.request
    if request.budget_bytes is None:
        return
    calls, packs = len(now.plan.calls), len(now.plan.packing.backward)
    given = request.settings.pack_layers
    rates = [now.items_per_s]
    # Larger packs are what more memory is for, and smaller ones leave more of it to what stays.
    sizes = {-(-calls // parts) for parts in range(1, packs + 2)}
    sizes = {size for size in sizes if -(-calls // size) >= request.policy.pipeline}  # a pack for each device
    for size in [given] if given else sorted(sizes):
        settings = replace(request.settings, pack_layers=size)
        wish = replace(request, settings=settings, budget_bytes=2 * request.budget_bytes, thorough=False)
        with suppress(DoesNotFitError):
            rates.append(forecast(replace(now.survey, request=wish), now.host_budget_bytes).items_per_s)
    yield "twice the device memory", max(rates)
