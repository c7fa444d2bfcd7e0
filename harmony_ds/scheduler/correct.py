"""What executed steps teach: costs and rates with which the simulator would have said what was measured.

Compared are the times that streams worked, predicted and measured, for each kind of task and pack; what waiting made of
them is the plan's. Since tasks that share a link, memory or cores slow each other down, a rate is not found in one go:
the plan is simulated again with what was found, a few times.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.plan import Plan, TaskKind
from harmony_ds.scheduler.simulate import simulate
from harmony_ds.scheduler.spans import COMPUTE, SWAP_IN, SWAP_OUT, UPDATE, Span

_ROUNDS = 4
_MOST = 20.0
"""No time is taken to be more than so many times longer or shorter than it was."""
_Key = tuple[str, TaskKind, int]  # stream, kind, pack
_Times = Mapping[_Key, float]


def correct(
    plan: Plan, costs: CostTable, machine: Machine, steps: Sequence[Sequence[Span]]
) -> tuple[CostTable, Machine]:
    """`costs` and `machine` as the executed `steps` of `plan` show them to be."""
    measured = _typical([_busy(spans) for spans in steps])
    for _ in range(_ROUNDS):
        predicted = _busy(simulate(plan, costs, machine).spans)
        ratios = {
            key: min(_MOST, max(1 / _MOST, measured[key] / ms)) for key, ms in predicted.items() if measured.get(key)
        }
        costs = _with_times(plan, costs, ratios)
        machine = _with_rates(machine, predicted, ratios)
    return costs, machine


def _busy(spans: Iterable[Span]) -> dict[_Key, float]:
    busy: defaultdict[_Key, float] = defaultdict(float)
    for span in spans:
        busy[span.stream, span.tasks[0].kind, span.tasks[0].pack] += span.end_ms - span.begin_ms
    return {key: ms for key, ms in busy.items() if ms > 0}


def _typical(steps: Sequence[_Times]) -> dict[_Key, float]:
    keys = {key for step in steps for key in step}
    return {key: statistics.median(step.get(key, 0.0) for step in steps) for key in keys}


def _with_times(plan: Plan, costs: CostTable, ratios: _Times) -> CostTable:
    """A call that the plan runs in one way only is taken to be as much off in the others."""
    calls, fused = list(costs.costs), plan.packing.fused
    first = last = 1.0
    for position in range(len(calls)):
        forward = _of_call(plan, ratios, TaskKind.FORWARD, plan.packing.forward, position)
        forward = forward or _of_call(plan, ratios, TaskKind.FORWARD_FOR_GRAPH, plan.packing.forward, position)
        backward = _of_call(plan, ratios, TaskKind.BACKWARD, plan.packing.backward, position)
        at_once = ratios.get((COMPUTE, TaskKind.FUSED, fused.index)) if position in fused.positions else None
        through = _of_call(plan, ratios, TaskKind.BACKWARD_FROM_GRAPH, plan.packing.backward, position)
        call = calls[position]
        if backward is None and through is not None and call.backward_ms:  # forward and through the graph
            backward = (call.saved_ms * (forward or through) + call.propagate_ms * through) / call.backward_ms
        known = [ratio for ratio in (at_once, backward, forward) if ratio is not None]
        if not known:
            continue
        other = known[0]
        calls[position] = replace(
            call,
            forward_ms=call.forward_ms * (forward or other),
            backward_ms=call.backward_ms * (backward or other),
            fused_ms=call.fused_ms * (at_once or other),
            propagate_ms=call.propagate_ms * (through or backward or other),
        )
        first, last = (forward or other) if position == 0 else first, other
    return replace(costs, costs=tuple(calls), head_ms=costs.head_ms * first, tail_ms=costs.tail_ms * last)


def _of_call(plan: Plan, ratios: _Times, kind: TaskKind, packs: Sequence[int], position: int) -> float | None:
    return next(
        (
            ratios[COMPUTE, kind, index]
            for index in packs
            if position in plan.packs[index].positions and (COMPUTE, kind, index) in ratios
        ),
        None,
    )


def _with_rates(machine: Machine, predicted: _Times, ratios: _Times) -> Machine:
    def slower(streams: Sequence[str], *kinds: TaskKind) -> float:
        """How much longer all of these took."""
        keys = [key for key in ratios if key[0] in streams and (not kinds or key[1] in kinds)]
        total = sum(predicted[key] for key in keys)
        return sum(predicted[key] * ratios[key] for key in keys) / total if total else 1.0

    def rate(known: float, longer: float, most: float) -> float:
        """What is faster than host memory would be slowed down by that in the simulation, and never found."""
        return min(known / longer, max(known, most))

    memory = machine.host_bytes_per_ms
    swap_in = rate(machine.swap_in_bytes_per_ms, slower([SWAP_IN]), memory)
    swap_out = rate(machine.swap_out_bytes_per_ms, slower([SWAP_OUT]), memory)
    before = machine.swap_in_bytes_per_ms + machine.swap_out_bytes_per_ms
    updates = memory / machine.update_bytes_per_element
    on_device = slower([COMPUTE], TaskKind.UPDATE_ON_DEVICE)
    return replace(
        machine,
        swap_ms=machine.swap_ms * slower([SWAP_IN, SWAP_OUT]),
        swap_in_bytes_per_ms=swap_in,
        swap_out_bytes_per_ms=swap_out,
        link_bytes_per_ms=machine.link_bytes_per_ms * (swap_in + swap_out) / before,
        update_elements_per_ms=rate(machine.update_elements_per_ms, slower([UPDATE], TaskKind.UPDATE), updates),
        norm_elements_per_ms=machine.norm_elements_per_ms / slower([UPDATE], TaskKind.SWAP_OUT),
        device_update_elements_per_ms=machine.device_update_elements_per_ms / on_device,
    )
