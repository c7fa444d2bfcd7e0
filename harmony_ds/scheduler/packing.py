"""Cuts the call order into packs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from harmony_ds.decomposer.graph import LayerGraph, slab_bytes
from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.plan import Pack


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of a weight on the device, and of a gradient on the link."""

    weight: int
    gradient: int


def pack_uniformly(graph: LayerGraph, costs: CostTable, element: ElementBytes, pack_layers: int) -> tuple[Pack, ...]:
    """Packs of `pack_layers` calls each, counted from the last one, so that only the first may be smaller.

    The last pack is swapped in once instead of twice: it is the one that should be full.
    """
    count = len(graph.calls)
    bounds = sorted({0, *range(count, 0, -pack_layers)})
    packs: list[Pack] = []
    seen: set[str] = set(graph.resident)
    specs = {spec.name: spec for spec in graph.parameters}
    for first, last in pairwise(bounds):
        positions = tuple(range(first, last))
        layers = tuple(dict.fromkeys(graph.calls[p] for p in positions))
        names = dict.fromkeys(n for layer in layers for n in graph.layers[layer].parameters)
        parameters = tuple(n for n in names if n not in graph.resident)
        needs_backward = any(costs.costs[p].needs_backward for p in positions)
        owned = tuple(n for n in parameters if n not in seen) if needs_backward else ()
        seen.update(owned)
        packs.append(
            Pack(
                index=len(packs),
                positions=positions,
                layers=layers,
                parameters=parameters,
                owned=owned,
                weight_bytes=sum(slab_bytes(specs[n].numel, element.weight) for n in parameters),
                gradient_bytes=sum(
                    slab_bytes(specs[n].numel, element.gradient)
                    for n in parameters
                    if specs[n].trainable and needs_backward
                ),
                needs_backward=needs_backward,
            )
        )
    return tuple(packs)
