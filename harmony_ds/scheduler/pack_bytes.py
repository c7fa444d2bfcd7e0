"""Bytes that one micro-batch adds on the device while it runs through a pack, in each of the three ways; see `CallCost`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

from harmony_ds.decomposer.graph import ALIGNMENT_BYTES
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Pack


def with_stash_on_host(firsts: Collection[int], costs: CostTable) -> CostTable:
    """Each pack stashes for itself what its calls take; what lingers is no part of an earlier stash, but on top of it.

    Args:
        firsts: calls with which packs begin (those may be left out that stash nothing again there).
    """
    calls = (
        replace(
            call,
            alive_bytes=call.alive_bytes + call.alive_and_stashed_bytes,
            alive_after_forward_bytes=call.alive_after_forward_bytes + call.alive_and_stashed_bytes,
            stash_bytes=call.stash_bytes
            + call.stash_again_bytes
            + (call.stash_again_at_cut_bytes if position in firsts else 0),
        )
        for position, call in enumerate(costs.costs)
    )
    return replace(costs, costs=tuple(calls), held_bytes=costs.held_bytes + costs.held_and_stashed_bytes)


class PackBytes:
    """The most bytes that one micro-batch adds while it runs through a pack, in each of the three ways."""

    def __init__(self, pack: Pack, costs: CostTable) -> None:
        self._costs = costs
        self.first, self.last = pack.positions[0], pack.positions[-1]
        self._calls = costs.costs[self.first : self.last + 1]
        padding = costs.scalar_bytes if costs.scalar_bytes > ALIGNMENT_BYTES else 0
        self.weight_bytes = pack.weight_bytes + (padding if pack.weight_bytes else 0)
        self.gradient_bytes = pack.gradient_bytes + (padding * len(pack.parameters) if pack.gradient_bytes else 0)
        # Sums of another dtype than the parameters' are added to call by call.
        gathers_on_leaves = sum(call.gradient_bytes for call in self._calls) >= pack.gradient_bytes
        self.set_aside_bytes = self.gradient_bytes if gathers_on_leaves else 0
        self.stash_bytes = sum(call.stashed_bytes for call in self._calls)
        self.returning_bytes = sum(call.stash_bytes for call in self._calls)
        self.excess_bytes = self.returning_bytes - self.stash_bytes
        self.alive_after_forward_bytes = self._calls[0].alive_after_forward_bytes
        self.shared_bytes = self._calls[0].shared_bytes
        graphs = [0, *accumulate(call.kept_bytes for call in self._calls)]
        none = [0] * len(graphs)
        self.kept_bytes = graphs[-1]
        self.forward_bytes = self._forward(none)
        self.forward_for_graph_bytes = self._forward(graphs)
        # The first micro-batch finds no sums of gradients there, the others all of them.
        all_there, first = [0] * (len(self._calls) + 1), self._sums(pack)
        tied = self._tied(pack)
        self.backward_bytes = (self._backward(first, none), self._backward(all_there, none))
        self.backward_from_graph_bytes = (self._backward(first, graphs), self._backward(all_there, graphs))
        both = zip(self.backward_from_graph_bytes, self.backward_bytes, strict=True)
        self.from_graph_excess_bytes = max(0, *(kept - made for kept, made in both))
        self.fused_bytes = (self._fused(tied, first), self._fused(tied, all_there))
        if costs.in_slices:
            held = costs.held_bytes + 2 * costs.scalar_bytes
            self.fused_bytes = (
                max(self.forward_bytes, held + self.backward_bytes[0]),
                max(self.forward_bytes, held + self.backward_bytes[1]),
            )

    def _forward(self, graphs: list[int]) -> int:
        """Beside the stash of earlier packs. `graphs`: what is kept of those of the calls before each."""
        stash, most = 0, 0
        for graph, call in zip(graphs, self._calls, strict=False):
            most = max(most, stash + graph + call.alive_bytes + call.forward_bytes)
            stash += call.stashed_bytes
        if self.last == len(self._costs.costs) - 1:
            call = self._calls[-1]
            most = max(most, stash - call.stashed_bytes + call.alive_bytes + call.graph_bytes + self._costs.tail_bytes)
        return most

    def _fused(self, tied: list[int], sums: list[int]) -> int:
        """Everything that the micro-batch holds but the stash of earlier packs."""
        before = self._calls[0].alive_bytes  # beside it, the graphs of the pack's calls so far
        graphs = list(accumulate((call.graph_bytes for call in self._calls), initial=before))
        forward = max(graph + call.forward_bytes for graph, call in zip(graphs, self._calls, strict=False))
        most = max(forward, graphs[-1] + self._costs.tail_bytes) + sums[-1]
        gathered = 0
        for place, call in reversed(list(enumerate(self._calls))):
            back = max(graphs[place + 1] + call.settle_bytes, graphs[place] + call.backward_bytes)
            if self._calls[0].keeps_graph:  # and the backward pass, in which graphs otherwise go, beside all of them
                back = graphs[-1] + max(call.settle_bytes, call.backward_bytes)
            most = max(most, back + gathered + tied[place] + sums[place])
            gathered += call.leaf_bytes
        return most

    def _sums(self, pack: Pack) -> list[int]:
        """Return sums of gradients that are not there yet (negative) while the first micro-batch is propagated through each
        call, and before that.
        """
        own = [call.gradient_bytes for call in self._calls]
        if sum(own) < pack.gradient_bytes:  # sums of another dtype: they come when the micro-batch is through
            return [0] * (len(own) + 1)
        there = [*reversed(list(accumulate(reversed(own)))), 0]
        return [min(nbytes, pack.gradient_bytes) - pack.gradient_bytes for nbytes in there]

    def _tied(self, pack: Pack) -> list[int]:
        """Gradients of parameters that calls from each one on use, and others before: all wait until they are added up."""
        layers = self._costs.calls[self.first : self.last + 1]
        by_layer = {layer: call.gradient_bytes for layer, call in zip(layers, self._calls, strict=True)}
        across = max(0, sum(by_layer.values()) - pack.gradient_bytes)  # parameters of several layers
        last = {layer: place for place, layer in enumerate(layers)}
        begin, end = [0] * len(layers), [0] * len(layers)
        for layer, nbytes in by_layer.items():
            begin[layers.index(layer)] += nbytes
            end[last[layer]] += nbytes
        repeated = accumulate(b - e for b, e in zip(begin, end, strict=True))
        waiting = [nbytes + across for nbytes in repeated]
        return [*waiting[:-1], 0]  # nothing has been propagated before the last call

    def _backward(self, sums: list[int], graphs: list[int]) -> int:
        """Beside what the micro-batch holds between its passes and the stash of earlier packs. `graphs`: as in `_forward`;
        a call's own is in what running it backward takes.
        """
        stash, gathered = self.stash_bytes, 0
        most = stash + sums[-1] + graphs[-1]
        for place, call in reversed(list(enumerate(self._calls))):
            here = max(graphs[place + 1] + call.settle_bytes, graphs[place] + call.backward_bytes)
            most = max(most, stash + here + gathered + sums[place])
            stash -= call.stashed_bytes
            gathered += call.leaf_bytes
        return max(most, gathered + sums[0])
