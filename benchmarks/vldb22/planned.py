"""The paper's models and server as the engine's own planner (`harmony_ds.scheduler`) sees them, and what it plans for them.

A layer call takes U_F samples forward and U_B backward, from one to all of the step's. A set is as many samples as the
larger of the two; its calls are cut into slices of the smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product

from benchmarks.vldb22.cost_model.jobs import HARMONY_VLDB22, step_ms
from benchmarks.vldb22.cost_model.profile import LayerProfile, PackCosts, PassCosts
from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup, split_samples
from harmony_ds.config import HarmonySettings
from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.errors import DoesNotFitError
from harmony_ds.scheduler.candidates import CandidateKind, Cut, Cuts
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.flow import Flow, FlowEvent, FlowKind
from harmony_ds.scheduler.neighbours import Point, neighbours_by_cuts
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.profile import UPDATE_BYTES_PER_ELEMENT, Machine
from harmony_ds.scheduler.search import Choice, search

FP32 = ElementBytes(4, 4)
_TASK_MS, _SWAP_MS = 0.1, 0.02
"""The engine's values for issuing a task and for the latency of a copy (`harmony_ds/profiling/hardware.json`)."""
_DEVICE_BYTES_PER_MS = 484e6 * 0.85
_HOST_BYTES_PER_MS = 4 * 2400e3 * 8 * 0.75
"""Four channels of DDR4-2400: assumed; the shares are the catalogue's."""
_UNITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
_NEAR = 1.15
"""Sizes whose layers compute longer than the fastest's by more are not planned with."""
_MOST_SIZES = 5
_ROOM = 1.5
"""The engine counts prefetched weights and whole stashes, for which the original's capacity formula has no room."""
_PROPOSALS = 10
_MORE = 5
"""So many numbers of packs are tried, from the fewest that fit on."""
_STARTS, _EVALUATIONS = 24, 1600
"""So many schedules are improved, with so many neighbours of all of them."""


@dataclass(frozen=True, slots=True)
class Units:
    """Samples of a layer call, forward and backward."""

    forward: int
    backward: int

    @property
    def joined_count(self) -> int:
        return max(self.forward, self.backward)


def graph_of(profile: LayerProfile) -> LayerGraph:
    """Return its layers, each with one parameter, without the last, which holds the loss and no weights."""
    numels = [layer.weight_bytes // FP32.weight for layer in profile.layers[:-1]]
    parameters = tuple(ParameterSpec(f"p{i}", (n,), True, state_bytes=8 * n) for i, n in enumerate(numels))
    layers = tuple(LayerSpec(i, f"l{i}", (f"p{i}",)) for i in range(len(numels)))
    return LayerGraph(layers, parameters, tuple(range(len(numels))), ())


def table_of(profile: LayerProfile, units: Units) -> CostTable:
    """Return the costs of a set; a graph is counted as all that recomputing and propagating back takes."""
    joined_count, layers = units.joined_count, profile.layers
    forward_ms, backward_ms = (
        _times_ms(passes, joined_count, unit)
        for passes, unit in ((profile.forward, units.forward), (profile.backward, units.backward))
    )
    forward_peaks, backward_peaks = profile.forward.at(units.forward)[1], profile.backward.at(units.backward)[1]
    inputs = [layer.input_bytes for layer in layers]
    calls, last = [], len(layers) - 1
    for place, layer in enumerate(layers[:-1]):
        state, taken, given = layer.weight_bytes + layer.buffer_bytes, joined_count * inputs[place], inputs[place + 1]
        running = max(0, backward_peaks[place] - state - layer.weight_bytes - units.backward * inputs[place])
        slice_bytes = forward_peaks[place] - state - units.forward * inputs[place]
        calls.append(
            CallCost(
                waiting=WaitingBytes(alive_bytes=taken),
                stash=StashBytes(new_bytes=taken),
                forward=ForwardBytes(
                    peak_bytes=max(joined_count * given, slice_bytes + (joined_count - units.forward) * given),
                    graph_bytes=running,
                    kept_graph_bytes=running,
                ),
                backward=BackwardBytes(
                    input_gradient_bytes=taken if place else 0,
                    code_peak_bytes=joined_count * given,
                    peak_bytes=running,
                    summed_bytes=layer.weight_bytes,
                ),
                needs_backward=True,
                forward_ms=forward_ms[place],
                backward_ms=backward_ms[place],
                fused_ms=backward_ms[place],
                propagate_ms=max(0.0, backward_ms[place] - forward_ms[place]),
            )
        )
    events = tuple(FlowEvent(FlowKind.CALL, p, (p - 1,) if p else (), (p,)) for p in range(last))
    flow = Flow(tuple(joined_count * nbytes for nbytes in inputs[1:]), (True,) * last, events)
    order = tuple(range(last))
    return CostTable(order, tuple(calls), backward_peaks[last], tail_ms=backward_ms[last], scalar_bytes=4, flow=flow)


def _times_ms(passes: PassCosts, samples: int, unit: int) -> list[float]:
    """Return each layer's time for so many samples, a unit at a time."""
    full, rest = divmod(samples, unit)
    times = [full * ms for ms in passes.at(unit)[0]]
    return [a + b for a, b in zip(times, passes.at(rest)[0], strict=True)] if rest else times


def machine_of(profile: LayerProfile, devices: int, replicas: int = 1) -> Machine:
    """Return the paper's server, by its scheduler's constants, as one of `replicas` sees it.

    All devices share the host's link; replicas share it in equal parts at all times, as the
    original's model has it. Its one rate for both directions becomes the rate of host memory, on which all swaps
    draw; updates, which have a rate of their own there, draw on nothing. The host updates as fast as one of the original's
    processes for each device, but no faster than its memory.
    """
    swap = HARMONY_VLDB22.swap / replicas
    elements = sum(layer.weight_bytes for layer in profile.layers) / FP32.weight
    alone = elements / sum(layer.update_ms for layer in profile.layers)
    updates = min(devices * alone, _HOST_BYTES_PER_MS / UPDATE_BYTES_PER_ELEMENT)
    return Machine(
        name="GTX 1080 Ti on PCIe 3, by the original's constants",
        copies_overlap=True,
        swap_in_bytes_per_ms=swap,
        swap_out_bytes_per_ms=swap,
        link_bytes_per_ms=2 * swap,
        update_elements_per_ms=updates,
        norm_elements_per_ms=updates,
        host_bytes_per_ms=2 * swap,
        device_update_elements_per_ms=_DEVICE_BYTES_PER_MS / UPDATE_BYTES_PER_ELEMENT,
        swap_ms=_SWAP_MS,
        task_ms=_TASK_MS,
        update_bytes_per_element=1e-9,
        peer_bytes_per_ms=HARMONY_VLDB22.peer,
    )


def plan(profile: LayerProfile, units: Units, samples: int, devices: int, budget_bytes: int) -> Choice:
    """Return the plan that `"harmony": {"devices": N}` would run, with all of the engine's uses of memory."""
    settings = HarmonySettings(residency="auto" if devices == 1 else "kept")
    return _search(profile, units, samples, _request(profile, settings, devices, budget_bytes), 1)[0]


@dataclass(frozen=True, slots=True)
class Question:
    """A schedule that is wanted in the original's cost model.

    Attributes:
        largest: samples that were profiled, forward and backward.
        cap_bytes: the memory of a pack, by the original's formula.
    """

    profile: LayerProfile
    setup: Setup
    largest: tuple[int, int]
    cap_bytes: int

    @property
    def samples(self) -> int:
        return self.setup.share

    @property
    def devices(self) -> int:
        """Devices that one process drives."""
        return self.setup.devices if self.setup.mode is Mode.PIPELINE else 1

    @property
    def request(self) -> PlanRequest:
        """The original's model knows neither resident packs nor kept graphs, and its stash is on the host."""
        settings = HarmonySettings(stash="host", residency="off", keep_graphs=False)
        return _request(self.profile, settings, self.devices, int(_ROOM * self.cap_bytes))


def searched(question: Question) -> Iterator[Schedule]:
    """Yield the fastest schedules by the engine's own search and simulator, as far as they fit."""
    costs = PackCosts(question.profile)
    for units in _promising(question, costs):
        with suppress(DoesNotFitError):
            found = _search(
                question.profile, units, question.samples, question.request, _PROPOSALS, question.setup.replicas
            )
            for choice in found:
                schedule = schedule_of(choice.plan.packing, units)
                if capacity_bytes(costs, schedule) <= question.cap_bytes:
                    yield schedule


def cut(question: Question) -> Iterator[Schedule]:
    """Yield a schedule for each way to cut that the engine's search begins with, as far as it fits."""
    costs, graph = PackCosts(question.profile), graph_of(question.profile)
    for units in _promising(question, costs):
        table = table_of(question.profile, units)
        cuts = Cuts(table, Packer(graph, table, FP32, question.request.policy), question.request)
        near = (way for first in cuts.first() for way in (first, *cuts.near(first)))
        multiples = (1, 2, 3, 4) if question.devices == 1 else (1,)
        ways = {replace(one, multiple=multiple) for one in near for multiple in multiples if not one.forward}
        for kind in CandidateKind:
            ways |= _fewest(question, costs, units, cuts, kind)
        yield from _filled(question, costs, units)
        for way in ways:
            bounds = cuts.bounds(way)
            if bounds is not None:
                schedule = schedule_of_bounds(*bounds, units)
                if capacity_bytes(costs, schedule) <= question.cap_bytes:
                    yield schedule


def _filled(question: Question, costs: PackCosts, units: Units) -> Iterator[Schedule]:
    """Yield schedules whose packs are as full as fits, beginning with the last or with the first."""
    for from_last in (True, False):
        backward = _full_packs(question, costs, True, units.backward, costs.count, from_last)
        if backward[-2] == costs.count - 1:  # the loss is no call of the engine's
            continue
        if question.devices > 1:
            schedule = Schedule(units.forward, backward[:-1], units.backward, backward)
            if capacity_bytes(costs, schedule) <= question.cap_bytes:
                yield schedule
            continue
        for forward_from_last in (True, False):
            forward: tuple[int, ...] = (0,)
            if backward[-2]:
                forward = _full_packs(question, costs, False, units.forward, backward[-2], forward_from_last)
            yield Schedule(units.forward, forward, units.backward, backward)


def _full_packs(
    question: Question, costs: PackCosts, backward: bool, size: int, count: int, from_last: bool
) -> tuple[int, ...]:
    """Return bounds of the first `count` layers, every one of which fits."""
    inner: list[int] = []
    first, last = 0, count
    for layer in range(count - 1, 0, -1) if from_last else range(1, count):
        pack = (layer - 1, last) if from_last else (first, layer + 1)
        if costs.memory_bytes(backward, size, *pack) > question.cap_bytes:
            inner.append(layer)
            first = last = layer
    return (0, *sorted(inner), count)


def _fewest(question: Question, costs: PackCosts, units: Units, cuts: Cuts, kind: CandidateKind) -> set[Cut]:
    """Return the cuts into the fewest packs that fit and a few more, those of the forward pass for themselves."""
    found: set[Cut] = set()
    for parts in range(1, costs.count):
        bounds = cuts.bounds(Cut(kind, parts))
        if bounds is None:
            continue
        backward = schedule_of_bounds(*bounds, units).backward
        packs = [costs.memory_bytes(True, units.backward, *pack) for pack in pairwise(backward)]
        if max(packs) > question.cap_bytes:
            continue
        found.add(Cut(kind, parts))
        if question.devices == 1 and kind is not CandidateKind.EQUAL:
            found |= _fewest_forward(question, costs, units, cuts, Cut(kind, parts))
        if len({one.parts for one in found}) >= _MORE:
            break
    return found


def _fewest_forward(question: Question, costs: PackCosts, units: Units, cuts: Cuts, cut: Cut) -> set[Cut]:
    found: set[Cut] = set()
    for parts in range(1, cut.parts + 1):
        way = replace(cut, forward=parts)
        bounds = cuts.bounds(way)
        if bounds is None:
            break
        if capacity_bytes(costs, schedule_of_bounds(*bounds, units)) <= question.cap_bytes:
            found.add(way)
        if len(found) >= _MORE:
            break
    return found


def timed(question: Question, schedules: Iterable[Schedule]) -> dict[Schedule, float]:
    """Return the ms of schedules in the original's model, without those that cannot be among the fastest."""
    costs = PackCosts(question.profile)
    at_least = {one: _least_ms(question, costs, one) for one in schedules}
    times: dict[Schedule, float] = {}
    best = float("inf")
    for one in sorted(at_least, key=lambda one: (at_least[one], str(one), one.backward, one.forward)):
        if at_least[one] > best:
            break
        times[one] = step_ms(question.setup, one, costs, HARMONY_VLDB22, overlap=True)
        best = min(best, times[one])
    return times


def _least_ms(question: Question, costs: PackCosts, schedule: Schedule) -> float:
    """Return what the device that computes most takes at least for that, and for freeing the memory of its tasks."""
    samples, forward, backward = question.samples, schedule.forward_micro_batch, schedule.backward_micro_batch
    total = HARMONY_VLDB22.free_ms * (len(schedule.forward) + len(schedule.backward) - 2)
    for size in split_samples(samples, forward):
        total += costs.forward_ms(size, 0, schedule.forward[-1])
    for size in split_samples(samples, backward):
        total += costs.backward_ms(size, 0, costs.count)
    return total / question.devices


def improved(question: Question, schedules: Mapping[Schedule, float]) -> Iterator[tuple[Schedule, float]]:
    """Yield better and better schedules by the neighbours that the engine's search tries, judged by the original's model.

    Args:
        schedules: to begin with, and their ms.
    """
    costs = PackCosts(question.profile)
    tried = dict(schedules)
    unlike: dict[str, Schedule] = {}  # the fastest of every sizes and numbers of packs
    for schedule in sorted(schedules, key=schedules.__getitem__):
        unlike.setdefault(str(schedule), schedule)
    budget = _EVALUATIONS
    for start in [*unlike.values()][:_STARTS]:
        best, going = start, True
        while going and budget > 0:
            going = False
            for schedule in _around(best, question.devices):
                if schedule in tried or capacity_bytes(costs, schedule) > question.cap_bytes:
                    continue
                budget -= 1
                if _least_ms(question, costs, schedule) > tried[best]:
                    tried[schedule] = float("inf")
                else:
                    tried[schedule] = step_ms(question.setup, schedule, costs, HARMONY_VLDB22, overlap=True)
                if tried[schedule] < tried[best]:
                    best, going = schedule, True
                    break
                if budget <= 0:
                    break
        yield best, tried[best]


def _around(schedule: Schedule, devices: int) -> Iterator[Schedule]:
    """Yield a schedule with other cuts, one change away."""
    backward = (
        *schedule.backward[:-1],
        schedule.backward[-1] - 1,
    )  # without the loss, which is no call of the engine's
    point = Point(backward, schedule.forward, 0, frozenset(), frozenset(), prefetch=True)
    for near in neighbours_by_cuts(point, devices):
        bounds = (*near.backward[:-1], schedule.backward[-1])
        yield replace(schedule, forward=near.forward, backward=bounds)


def _promising(question: Question, costs: PackCosts) -> list[Units]:
    """Return the sizes with which single layers fit, those that compute fastest first."""
    profile, samples, devices = question.profile, question.samples, question.devices
    found: list[tuple[float, Units]] = []
    most = min(max(1, samples // devices), question.largest[0])  # in a pipeline every device has a set to work on
    singles = tuple(range(costs.count + 1))
    for forward, backward in product(_UNITS, _UNITS):
        if not backward <= forward <= min(4 * backward, most) or backward > question.largest[1]:
            continue
        units = Units(forward, backward)
        if capacity_bytes(costs, Schedule(forward, singles[:-1], backward, singles)) <= question.cap_bytes:
            # The last pack, as much of the model as fits, has no forward pass of its own.
            fused = min(1.0, question.cap_bytes / costs.memory_bytes(True, backward, 0, costs.count))
            ms = sum(_times_ms(profile.backward, samples, backward))
            ms += (1 - fused) * sum(_times_ms(profile.forward, samples, forward))
            # In a pipeline devices wait for the first set; with two packs for each of them, about so long.
            found.append((ms * (1 + (devices - 1) * units.joined_count / (2 * samples)), units))
    found.sort(key=lambda one: one[0])
    return [units for ms, units in found if ms <= _NEAR * found[0][0]][:_MOST_SIZES]


def _request(profile: LayerProfile, settings: HarmonySettings, devices: int, budget_bytes: int) -> PlanRequest:
    buffers = sum(layer.buffer_bytes for layer in profile.layers)
    policy = Policy(deferred_update=False, gradient_slabs=3 * devices, pipeline=devices)
    return PlanRequest(settings, 1, budget_bytes + buffers, buffers, policy)


def _search(
    profile: LayerProfile, units: Units, samples: int, request: PlanRequest, top: int, replicas: int = 1
) -> tuple[Choice, ...]:
    request = replace(request, micro_batches=-(-samples // units.joined_count), thorough=top == 1)
    machine = machine_of(profile, request.policy.pipeline, replicas)
    return search(graph_of(profile), table_of(profile, units), machine, FP32, request, top)


def schedule_of(packing: Packing, units: Units) -> Schedule:
    """Return cuts as the original writes them; its last pack takes the loss, too."""
    begins = [pack.positions[0] for pack in packing.packs if pack.positions]
    backward = (*(begins[index] for index in packing.backward), packing.fused.positions[-1] + 1)
    forward = (*(begins[index] for index in packing.forward), backward[-2])
    return schedule_of_bounds(backward, forward, units)


def schedule_of_bounds(backward: Bounds, forward: Bounds, units: Units) -> Schedule:
    """Return bounds of calls as the original writes them, which counts the loss as a layer."""
    return Schedule(units.forward, forward, units.backward, (*backward[:-1], backward[-1] + 1))


def capacity_bytes(costs: PackCosts, schedule: Schedule) -> int:
    """Return the memory of the largest pack, by the original's formula."""
    forward, backward = schedule.forward_micro_batch, schedule.backward_micro_batch
    packs = [costs.memory_bytes(False, forward, *pack) for pack in pairwise(schedule.forward)]
    return int(max(packs + [costs.memory_bytes(True, backward, *pack) for pack in pairwise(schedule.backward)]))
