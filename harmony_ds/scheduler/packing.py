"""Make packs of the call order, cut at given bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from harmony_ds.decomposer.graph import LayerGraph, ParameterSpec, piece_of, share_of, slab_bytes
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Pack, Packing, Policy


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of a weight on the device, and of a gradient on the link."""

    weight: int
    gradient: int


_ALONE = Policy()


class _GradientBytes(NamedTuple):
    """The bytes of a pack's gradients: all of them; the piece of each device, and what it sends; see `Pack`."""

    whole_bytes: int
    pieces: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] = ()


class Packer:
    """Maker of the packs of one model, with their bytes and times."""

    def __init__(self, graph: LayerGraph, costs: CostTable, element: ElementBytes, policy: Policy = _ALONE) -> None:
        """`policy`: how many devices there are, each of which updates a piece of every parameter, and how they reduce."""
        self._devices = devices = policy.devices
        self._policy = policy
        self._graph = graph
        self._costs = costs.costs
        self._element = element
        self._specs = {spec.name: spec for spec in graph.parameters}
        self._pieces = {spec.name: _pieces(spec.numel, devices) for spec in graph.parameters}
        self._unlayered = frozenset(graph.unlayered)
        self._known: dict[tuple[tuple[int, ...], tuple[str, ...]], Pack] = {}

    @property
    def pipeline(self) -> int:
        """How many devices one process drives."""
        return self._policy.pipeline

    def packing(self, backward: tuple[int, ...], forward: tuple[int, ...] | None = None) -> Packing:
        """Return the packs between the bounds `backward` of the backward pass, and between `forward` of the forward pass.

        Args:
            backward: from 0 to the number of calls.
            forward: from 0 to where the fused pack begins (None: the bounds of the backward pass).
        """
        packs = self.packs(backward)
        if forward is None or self._policy.pipeline > 1:  # whose packs lie on one device in both passes
            forward = backward[:-1]
        known = {pack.positions: pack.index for pack in packs}
        everything, order = list(packs), []
        for first, last in pairwise(forward):
            positions = tuple(range(first, last))
            if positions not in known:
                known[positions] = len(everything)
                everything.append(self._pack(len(everything), positions, None))
            order.append(known[positions])
        graph, without_calls = self._graph, []
        for names, on_device in ((graph.unlayered, True), (graph.uncalled, False)):
            without_calls.append(len(everything) if names else None)
            if names:
                everything.append(self._without_calls(len(everything), names, on_device))
        return Packing(tuple(everything), tuple(order), tuple(range(len(packs))), *without_calls)

    def packs(self, bounds: tuple[int, ...]) -> tuple[Pack, ...]:
        """Return the packs between `bounds`, each owning the parameters that no earlier one owns.

        A pack without a backward pass owns something only if it has a trained parameter that no pack with one has: the
        program's own backward passes may reach that.
        """
        owned = set(self._unlayered)
        packs: list[Pack] = []
        for first, last in pairwise(bounds):
            packs.append(self._pack(len(packs), tuple(range(first, last)), owned))
            owned.update(packs[-1].owned)
        for index, pack in enumerate(packs):
            if not pack.needs_backward and not owned.issuperset(self._trained_in(pack)):
                packs[index] = self._pack(index, pack.positions, owned, owns_without_backward=True)
                owned.update(packs[index].owned)
        return tuple(packs)

    def _trained_in(self, pack: Pack) -> list[str]:
        return [name for name in pack.parameters if self._specs[name].trainable]

    def _pack(
        self,
        index: int,
        positions: tuple[int, ...],
        taken: Collection[str] | None,
        owns_without_backward: bool = False,
    ) -> Pack:
        graph = self._graph
        layers = tuple(dict.fromkeys(graph.calls[p] for p in positions))
        names = dict.fromkeys(n for layer in layers for n in graph.layers[layer].parameters)
        parameters = tuple(n for n in names if n not in self._unlayered)
        needs_backward = any(self._costs[p].needs_backward for p in positions)
        # A pack that only the forward pass has owns nothing: its layers are updated with the packs of the other pass.
        owned: tuple[str, ...] = ()
        if taken is not None and (needs_backward or owns_without_backward):
            owned = tuple(n for n in parameters if n not in taken)
        known = self._known.get((positions, owned))
        if known is not None:
            return replace(known, index=index, device=index % self._policy.pipeline)
        trained = [self._specs[n] for n in parameters if self._specs[n].trainable and needs_backward]
        weight_bytes, gradients = self._weight_bytes(parameters), self._gradients(trained)
        pack = self._known[positions, owned] = Pack(
            index=index,
            device=index % self._policy.pipeline,
            positions=positions,
            layers=layers,
            parameters=parameters,
            owned=owned,
            weight_bytes=weight_bytes,
            gathered_bytes=self._gathered_bytes(weight_bytes),
            gradient_bytes=gradients.whole_bytes,
            gradient_pieces=gradients.pieces,
            sent_bytes=gradients.sent_bytes,
            needs_backward=needs_backward,
            update_elements=self._update_elements(owned),
            resident_bytes=self._resident_bytes(owned if owned or needs_backward else parameters, bool(owned)),
            update_bytes=self._update_bytes(owned),
            forward_ms=sum(self._costs[p].forward_ms for p in positions),
            backward_ms=sum(self._costs[p].backward_ms for p in positions),
        )
        return pack

    def _without_calls(self, index: int, names: tuple[str, ...], on_device: bool) -> Pack:
        """Return the pack of parameters that no call covers; of parameters that are never on the device, nothing moves."""
        specs = [self._specs[name] for name in names]
        trained = [spec for spec in specs if spec.trainable] if on_device else []
        weight_bytes, gradients = self._weight_bytes(names if on_device else ()), self._gradients(trained)
        return Pack(
            index=index,
            positions=(),
            layers=(),
            parameters=names if on_device else (),
            owned=names,
            weight_bytes=weight_bytes,
            gathered_bytes=self._gathered_bytes(weight_bytes),
            gradient_bytes=gradients.whole_bytes,
            gradient_pieces=gradients.pieces,
            sent_bytes=gradients.sent_bytes,
            needs_backward=on_device,
            update_elements=self._update_elements(spec.name for spec in trained),
        )

    def _weight_bytes(self, names: Iterable[str]) -> int:
        return sum(self._specs[name].weight_bytes(self._element.weight) for name in names)

    def _gathered_bytes(self, weight_bytes: int) -> int:
        """Return what a device sends to the others of weights of which each swaps in its share."""
        share = share_of(weight_bytes // self._element.weight, self._devices) * self._element.weight
        return (self._devices - 1) * share

    def _update_elements(self, names: Iterable[str]) -> int:
        pieces = [self._pieces[name] for name in names if self._specs[name].trainable]
        return max((sum(of_rank) for of_rank in zip(*pieces, strict=True)), default=0)

    def _gradients(self, trained: Sequence[ParameterSpec]) -> _GradientBytes:
        policy, element_bytes = self._policy, self._element.gradient
        whole_bytes = sum(slab_bytes(spec.numel, element_bytes) for spec in trained)
        if policy.alone or not trained:
            return _GradientBytes(whole_bytes)
        by_rank = [*zip(*(self._pieces[spec.name] for spec in trained), strict=True)]
        pieces = tuple(sum(slab_bytes(n, element_bytes) for n in own) for own in by_rank)
        if policy.reduce_on_host:
            return _GradientBytes(whole_bytes, pieces)
        total, others = sum(spec.numel for spec in trained), policy.servers - 1
        sent_bytes = tuple((total - sum(own) + others * sum(own)) * element_bytes for own in by_rank)
        return _GradientBytes(whole_bytes, pieces, sent_bytes)

    def _resident_bytes(self, names: tuple[str, ...], trained: bool) -> int:
        state_bytes = sum(self._specs[name].state_bytes for name in names) if trained else 0
        return self._weight_bytes(names) + state_bytes

    def _update_bytes(self, owned: tuple[str, ...]) -> int:
        specs = [self._specs[name] for name in owned if self._specs[name].trainable]
        # Gradients in less than fp32 are cast for all of a pack's parameters before the first is stepped.
        cast = 0 if self._element.gradient == 4 else sum(4 * spec.numel for spec in specs)
        return cast + max((spec.update_bytes for spec in specs), default=0)


def _pieces(numel: int, devices: int) -> list[int]:
    """Return how many elements of a parameter each device updates."""
    pieces = (piece_of(numel, rank, devices) for rank in range(devices))
    return [piece.stop - piece.start for piece in pieces]
