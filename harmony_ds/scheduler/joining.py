"""Predicts whether joining the layer calls of several micro-batches would pay, from costs of single ones.

A call takes at least what is independent of its rows: issuing its kernels, and moving the layer's weights and gradients
through device memory once. The rest of its time grows with the rows. Where calls are bound by issuing them, the work of
the device is hidden; it is then taken to be that of the parameters, at the rate of the fastest call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import LayerGraph, ParameterSpec
from harmony_ds.errors import DoesNotFitError
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CallCost, CostTable, scale_bytes
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.spans import HOST

_WORTH = 0.9
"""The most that a joined step may take, of the step that runs, for joining to be advised."""
_FEWER = 4
"""Each set that is tried has so many times fewer micro-batches than the one before."""
_BOUND_BY_ISSUING = 0.9


@dataclass(frozen=True, slots=True)
class Advice:
    """Joined calls that are predicted to beat the plan that runs.

    Attributes:
        rows: of one joined call.
        step_ms, now_ms: predicted of a step with them, and of the plan that runs.
    """

    rows: int
    step_ms: float
    now_ms: float

    def __str__(self) -> str:
        return (
            f"layer calls of {self.rows} rows, several micro-batches joined, are predicted (not measured) to take "
            f"{self.step_ms:,.1f} ms a step instead of {self.now_ms:,.1f} ({self.step_ms / self.now_ms - 1:+.0%}). To try "
            f'them, add to the ds_config: "harmony": {{"micro_batch": {self.rows}}}. Results are then equal to rounding, '
            "not to the bit."
        )


class JoinedCosts:
    """Predictor of the costs of several micro-batches as one, from those of a single one."""

    def __init__(self, graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes) -> None:
        self.graph = graph
        self.machine = machine
        self.element = element
        self._single = costs
        rate = machine.host_bytes_per_ms
        if machine.copies_overlap:
            rate = machine.device_update_elements_per_ms * machine.update_bytes_per_element
        specs = {spec.name: spec for spec in graph.parameters}
        layers = [[specs[name] for name in graph.layers[layer].parameters] for layer in graph.calls]
        self._weights_ms = [sum(s.weight_bytes(element.weight) for s in own) / rate for own in layers]
        # A gradient is written and read as it arrives, its sum is read and written.
        both = 2 * (element.weight + element.gradient)
        self._gradients_ms = [both * sum(s.numel for s in own if s.trainable) / rate for own in layers]
        # One gradient at a time waits to be added to its sum.
        self._waiting_bytes = [
            max((element.weight * spec.numel for spec in own if spec.trainable), default=0) for own in layers
        ]
        self._work_ms = self._parameter_work_ms(layers)

    def _parameter_work_ms(self, layers: list[list[ParameterSpec]]) -> list[float]:
        """Return what multiplying by each call's parameters takes; infinite where issuing does not hide it."""
        costs = self._single.costs
        if self._single.issue_share < _BOUND_BY_ISSUING:
            return [float("inf")] * len(costs)
        work = [_products(cost, own, self.element) for cost, own in zip(costs, layers, strict=True)]
        rate = max((n / cost.forward_ms for n, cost in zip(work, costs, strict=True) if cost.forward_ms), default=0.0)
        return [n / rate if rate else float("inf") for n in work]

    def joined_table(self, joined_count: int) -> CostTable:
        """Return the costs of `joined_count` micro-batches as one."""
        single = self._single
        calls = tuple(self._call(position, cost, joined_count) for position, cost in enumerate(single.costs))
        flow = replace(single.flow, nbytes=tuple(joined_count * nbytes for nbytes in single.flow.nbytes))
        crossing = tuple(replace(value, nbytes=joined_count * value.nbytes) for value in single.crossing)
        grow = ("tail_bytes", "held_bytes", "held_and_stashed_bytes", "head_ms", "tail_ms")
        grown = {name: joined_count * getattr(single, name) for name in grow}
        issue_share = single.issue_share / joined_count
        return replace(single, costs=calls, issue_share=issue_share, flow=flow, crossing=crossing, **grown)

    def _call(self, position: int, cost: CallCost, joined_count: int) -> CallCost:
        weights, gradients = self._weights_ms[position], self._gradients_ms[position]
        work, issue_share = self._work_ms[position], self._single.issue_share

        def joined(ms: float, fixed_ms: float, passes: int) -> float:
            grows = min(max(ms - fixed_ms, 0.0), passes * work)
            return max(issue_share * ms, min(fixed_ms, ms) + joined_count * grows)

        back = 2 * weights + gradients
        backward = cost.backward
        # Gradients of parameters do not grow with the rows.
        waiting = min(self._waiting_bytes[position], backward.peak_bytes)
        return replace(
            cost,
            waiting=scale_bytes(cost.waiting, joined_count),
            stash=scale_bytes(cost.stash, joined_count),
            forward=scale_bytes(cost.forward, joined_count),
            backward=replace(
                backward,
                peak_bytes=waiting + joined_count * (backward.peak_bytes - waiting),
                code_peak_bytes=joined_count * backward.code_peak_bytes,
                input_gradient_bytes=joined_count * backward.input_gradient_bytes,
                crossing_gradient_bytes=joined_count * backward.crossing_gradient_bytes,
                crossing_fused_bytes=joined_count * backward.crossing_fused_bytes,
            ),
            forward_ms=joined(cost.forward_ms, weights, 1),
            backward_ms=joined(cost.backward_ms, back, 3),
            fused_ms=joined(cost.fused_ms, back, 3),
            propagate_ms=joined(cost.propagate_ms, weights + gradients, 2),
        )


def _products(cost: CallCost, parameters: list[ParameterSpec], element: ElementBytes) -> float:
    """Return the products of a call: each parameter times the places of its input, as wide as its largest matrix."""
    largest = max((spec for spec in parameters if len(spec.shape) > 1), key=lambda spec: spec.numel, default=None)
    if largest is None:
        return 0.0
    places = cost.stash.new_bytes / (element.weight * min(largest.shape[:2]))
    return places * sum(spec.numel for spec in parameters)


def advise(now: Choice, rows: int, request: PlanRequest, joined: JoinedCosts) -> Advice | None:
    """Return joined calls that would save a tenth of the step or more; None: there are none.

    Args:
        now: the plan that runs.
        rows: of its micro-batches.
        request: that it was made for.
        joined: costs that are predicted of joined calls.
    """
    now_ms, group = now.prediction.step_ms, request.micro_batches
    single_ms = group * _compute_ms(joined.joined_table(1))
    found: list[Advice] = []
    joined_count = group
    while joined_count > 1:
        costs, sets = joined.joined_table(joined_count), -(-group // joined_count)
        # The swaps stay: no step is shorter by more than computing and issuing are.
        saved_ms = single_ms - sets * _compute_ms(costs) + now.prediction.busy_ms.get(HOST, 0.0) * (1 - sets / group)
        if now_ms - saved_ms <= _WORTH * now_ms:
            for asked in _quick_requests(now, replace(request, micro_batches=sets), joined_count, joined.machine):
                with suppress(DoesNotFitError):
                    (best,) = search(joined.graph, costs, joined.machine, joined.element, asked)
                    found.append(Advice(joined_count * rows, best.prediction.step_ms, now_ms))
        joined_count //= _FEWER
    best_of = min(found, key=lambda one: one.step_ms, default=None)
    return best_of if best_of is not None and best_of.step_ms <= _WORTH * now_ms else None


def _quick_requests(now: Choice, request: PlanRequest, joined_count: int, machine: Machine) -> Iterator[PlanRequest]:
    """Yield requests for equal packs, as large as those that run and smaller: each is searched in no time."""
    prefetch = request.policy.prefetch and machine.copies_overlap
    policy = replace(request.policy, joined_count=joined_count, prefetch=prefetch)
    most = -(-len(now.plan.calls) // len(now.plan.packing.backward))
    given = request.settings.pack_layers
    for size in [given] if given else sorted({most, -(-most // 2), -(-most // 4)}):
        if -(-len(now.plan.calls) // size) < policy.pipeline:  # fewer packs than devices
            continue
        yield replace(request, settings=replace(request.settings, pack_layers=size), policy=policy, thorough=False)


def _compute_ms(costs: CostTable) -> float:
    return sum(cost.forward_ms + cost.backward_ms for cost in costs.costs)
