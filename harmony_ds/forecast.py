"""What a plan means to the one who waits for it: time, tokens per second, memory on both sides, what limits it and what
would help. Pure arithmetic over a profile: nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import LayerGraph, slab_bytes
from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.bounds import lower_bound_bytes, zero3_offload_bytes
from harmony_ds.scheduler.choose import Request
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.simulate import COMPUTE, HOST, SWAP_IN, SWAP_OUT, UPDATE, Prediction, with_faster

_MASTER_BYTES = 4
_STATE_BYTES = 4
STREAM_NAMES = {
    COMPUTE: "compute",
    SWAP_IN: "swap in",
    SWAP_OUT: "swap out",
    UPDATE: "host update",
    HOST: "the engine's own work",
}


@dataclass(frozen=True, slots=True)
class Situation:
    """A model on a machine, and what is wanted of them.

    Attributes:
        states: fp32 numbers per trainable parameter that the optimizer keeps.
        gradient_slabs: packs whose gradients are on the host at a time, where updates are not deferred.
        host_budget_bytes: host memory (None: not known).
        items: what a micro-batch holds, tokens or samples.
    """

    graph: LayerGraph
    costs: CostTable
    machine: Machine
    element: ElementBytes
    request: Request
    states: int
    gradient_slabs: int
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
        items_per_step: tokens or samples.
        host_bytes: by kind.
        lower_bound_bytes: weights and gradients that a step must move.
        zero3_offload_bytes: what ZeRO-3 with parameter and optimizer offload would move.
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
        """Host memory that lacks; 0 where it fits."""
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
    """The fastest plan, and what it means.

    Raises:
        DoesNotFitError: nothing fits the device.
    """
    graph, element, request = situation.graph, situation.element, situation.request
    choice = search(graph, situation.costs, situation.machine, element, request)[0]
    return Forecast(
        choice=choice,
        items_per_step=situation.items * request.micro_batches,
        device_budget_bytes=request.budget_bytes,
        host_bytes=host_bytes(situation, choice),
        host_budget_bytes=situation.host_budget_bytes,
        lower_bound_bytes=lower_bound_bytes(choice.plan, graph, element.weight, element.gradient),
        zero3_offload_bytes=zero3_offload_bytes(graph, element.weight, request.micro_batches),
    )


def host_bytes(situation: Situation, choice: Choice) -> dict[str, int]:
    """What lies in host memory while the plan runs, by kind (see docs/memory.md)."""
    element, plan = situation.element, choice.plan
    trainable = [spec for spec in situation.graph.parameters if spec.trainable]
    mixed = element.weight != _MASTER_BYTES
    elements = sum(spec.numel for spec in trainable)
    sent = [plan.packs[index].gradient_bytes for index in plan.packing.backward]
    slabs = sum(sent) if plan.policy.deferred_update else min(sum(sent), situation.gradient_slabs * max(sent))
    return {
        "weights": sum(slab_bytes(spec.numel, element.weight) for spec in situation.graph.parameters),
        "masters": _MASTER_BYTES * elements if mixed else 0,
        "optimizer": _STATE_BYTES * situation.states * elements,
        "gradients": slabs + plan.resident_set.gradient_bytes,
        "stash": choice.prediction.swaps.stash_out,
    }


def changes(situation: Situation) -> tuple[Change, ...]:
    """What would be faster: one thing changed at a time, planned and simulated anew, best first."""
    found = []
    for what, changed in _changed(situation):
        try:
            found.append(Change(what, forecast(changed).items_per_s))
        except DoesNotFitError:
            continue  # more micro-batches may need more memory than there is
    return tuple(sorted(found, key=lambda change: -change.items_per_s))


def _changed(situation: Situation) -> Iterator[tuple[str, Situation]]:
    request, machine = situation.request, situation.machine
    if request.budget_bytes is not None:
        more = replace(request, budget_bytes=2 * request.budget_bytes)
        yield "twice the device memory", replace(situation, request=more)
    faster = with_faster(with_faster(machine, SWAP_IN, 2.0), SWAP_OUT, 2.0)
    yield "a link twice as fast", replace(situation, machine=faster)
    host = replace(with_faster(machine, UPDATE, 2.0), host_bytes_per_ms=2 * machine.host_bytes_per_ms)
    yield "a host twice as fast", replace(situation, machine=host)
    yield "a device twice as fast", replace(situation, costs=_faster_compute(situation.costs))
    twice = replace(request, micro_batches=2 * request.micro_batches)
    yield f"{twice.micro_batches} micro-batches a step", replace(situation, request=twice)


def _faster_compute(costs: CostTable) -> CostTable:
    calls = tuple(
        replace(c, forward_ms=c.forward_ms / 2, backward_ms=c.backward_ms / 2, fused_ms=c.fused_ms / 2)
        for c in costs.costs
    )
    return replace(costs, costs=calls, head_ms=costs.head_ms / 2, tail_ms=costs.tail_ms / 2)


def least_budget_bytes(situation: Situation) -> int:
    """The smallest device memory, to a hundredth, for which there is a plan."""

    def fits(budget: int) -> bool:
        try:
            search(
                situation.graph,
                situation.costs,
                situation.machine,
                situation.element,
                replace(situation.request, budget_bytes=budget),
            )
        except DoesNotFitError:
            return False
        return True

    return _least(fits, situation.request.budget_bytes or 1)


def _least(fits: Callable[[int], bool], below: int) -> int:
    above = 2 * below
    while not fits(above):
        below, above = above, 2 * above
    while above - below > above // 100:
        middle = (below + above) // 2
        below, above = (below, middle) if fits(middle) else (middle, above)
    return above
