"""Synthetic graphs, costs and packs: numbers small enough to add up by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from harmony_ds.decomposer import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.scheduler.costs import CallCost, CostTable, StashBytes
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import Bounds, uniform_bounds
from harmony_ds.scheduler.plan import Pack, Packing, Task
from harmony_ds.scheduler.profile import Machine

GPU = Machine(
    name="a GPU of numbers that add up",
    copies_overlap=True,
    swap_in_bytes_per_ms=1_000.0,
    swap_out_bytes_per_ms=1_000.0,
    link_bytes_per_ms=1_600.0,
    update_elements_per_ms=200.0,
    norm_elements_per_ms=2_000.0,
    host_bytes_per_ms=10_000.0,
    device_update_elements_per_ms=10_000.0,
    swap_ms=0.01,
)
CPU = replace(GPU, name="a CPU", copies_overlap=False, device_update_elements_per_ms=200.0)

FP32 = ElementBytes(weight=4, gradient=4)
COST = CallCost(
    stash=StashBytes(new_bytes=256),
    needs_backward=True,
    forward_ms=1.0,
    backward_ms=3.0,
    fused_ms=2.5,
    propagate_ms=1.5,
)


def graph_of(numels: Iterable[int], calls: tuple[int, ...] | None = None) -> LayerGraph:
    """A layer "l<i>" with one parameter "p<i>" for each number of elements."""
    counts = list(numels)
    return LayerGraph(
        tuple(LayerSpec(i, f"l{i}", (f"p{i}",)) for i in range(len(counts))),
        tuple(ParameterSpec(f"p{i}", (count,), True) for i, count in enumerate(counts)),
        tuple(range(len(counts))) if calls is None else calls,
        (),
    )


def costs_of(
    calls: tuple[int, ...], cost: CallCost | None = None, tail_bytes: int = 0, held_bytes: int = 0
) -> CostTable:
    """The same cost at every call."""
    every = CallCost(needs_backward=True) if cost is None else cost
    return CostTable(calls, (every,) * len(calls), tail_bytes, held_bytes)


def reused(packs: tuple[Pack, ...]) -> Packing:
    """The same packs in both passes."""
    numbers = tuple(pack.index for pack in packs)
    return Packing(packs, numbers[:-1], numbers)


def packs_of(*needs_backward: bool, weight_bytes: int = 100, gradient_bytes: int = 10) -> tuple[Pack, ...]:
    """A pack of one call with one parameter for each flag; without a backward pass it is frozen."""
    packs: list[Pack] = []
    for i, needs in enumerate(needs_backward):
        name = f"p{i}"
        owned = (name,) if needs else ()
        packs.append(Pack(i, (i,), (i,), (name,), owned, weight_bytes, gradient_bytes if needs else 0, needs))
    return tuple(packs)


def with_unlayered(packing: Packing, weight_bytes: int = 100, gradient_bytes: int = 100) -> Packing:
    """The same packs, and parameters that no layer call covers."""
    number = len(packing.packs)
    pack = Pack(number, (), (), ("scale",), ("scale",), weight_bytes, gradient_bytes, True, update_elements=25)
    return replace(packing, packs=(*packing.packs, pack), unlayered=number)


def pack_uniformly(graph: LayerGraph, costs: CostTable, element: ElementBytes, pack_layers: int) -> tuple[Pack, ...]:
    return Packer(graph, costs, element).packs(uniform_bounds(len(graph.calls), pack_layers))


def is_cut(bounds: Bounds | None, count: int) -> bool:
    return (
        bounds is not None
        and bounds[0] == 0
        and bounds[-1] == count
        and all(first < last for first, last in pairwise(bounds))
    )


def text(tasks: Iterable[Task]) -> str:
    return " ".join(map(str, tasks))


def parse(tasks: str) -> tuple[Task, ...]:
    return tuple(map(Task.parse, tasks.split()))
