"""Bytes that one micro-batch adds on the device while it runs through a pack, in each of the three ways.

Every peak is the largest of a few sums, one for each call of the pack; the docstrings give the sums. The numbers that
are added are those of `CallCost`; tests/scheduler/test_memory.py adds up some by hand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

from harmony_ds.decomposer.graph import ALIGNMENT_BYTES
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Pack


def with_stash_on_host(firsts: Collection[int], costs: CostTable) -> CostTable:
    """Return the costs where stashes go to the host, see `CallCost.with_stash_on_host`.

    Args:
        firsts: calls with which packs begin (those may be left out that stash nothing again there).
    """
    calls = tuple(cost.with_stash_on_host(position in firsts) for position, cost in enumerate(costs.costs))
    held = costs.held_and_stashed_bytes
    return replace(costs, costs=calls, held_bytes=costs.held_bytes + held, loss_bytes=costs.loss_bytes + held)


class PackBytes:
    """The bytes of one micro-batch in one pack, worked out once from the costs of the pack's calls.

    Attributes:
        first, last: positions of the pack's first and last call.
        weight_bytes, gradient_bytes: of the pack, with what the allocator rounds up.
        copied_sums_bytes: copy of the sums of gradients that is kept while micro-batches with a shared loss add up theirs.
        stash_bytes: what the pack's calls stash, while that is on the device.
        returning_bytes: what comes back of it from the host.
        kept_graph_bytes: the graphs of all its calls, where they are kept from forward to backward.
        after_forward_bytes: what of the pack's inputs may still be there when the forward pass is over.
        input_gradient_bytes: gradients that wait for earlier packs once the pack has been propagated through.
        runs_with_loss: whether its last call does.
    """

    def __init__(self, pack: Pack, costs: CostTable, slices_from_host: bool) -> None:
        """Work them out; `slices_from_host`: see `Policy`."""
        self.first, self.last = pack.positions[0], pack.positions[-1]
        self._calls = calls = costs.costs[self.first : self.last + 1]
        self._layers = costs.calls[self.first : self.last + 1]
        self._tail_bytes = costs.end_bytes if slices_from_host else costs.tail_bytes
        self._slices_from_host = slices_from_host
        self._ends_model = self.last == len(costs.costs) - 1
        padding = costs.scalar_bytes if costs.scalar_bytes > ALIGNMENT_BYTES else 0
        self.weight_bytes = pack.weight_bytes + (padding if pack.weight_bytes else 0)
        self.gradient_bytes = pack.gradient_bytes + (padding * len(pack.parameters) if pack.gradient_bytes else 0)
        # Sums of another dtype than the parameters' are added to call by call.
        summed_on_leaves = sum(call.backward.summed_bytes for call in calls) >= pack.gradient_bytes
        self.copied_sums_bytes = self.gradient_bytes if summed_on_leaves else 0
        self.stash_bytes = sum(call.stash.on_device_bytes for call in calls)
        self.returning_bytes = sum(call.stash.new_bytes for call in calls)
        self.kept_graph_bytes = sum(call.forward.kept_graph_bytes for call in calls)
        self.after_forward_bytes = calls[0].waiting.after_forward_bytes
        self.input_gradient_bytes = calls[0].backward.input_gradient_bytes
        self.runs_with_loss = calls[-1].runs_with_loss

        self._forward = self._forward_peak(keeps_graphs=False)
        self._forward_for_graph = self._forward_peak(keeps_graphs=True)
        # The first micro-batch finds no sums of gradients, every other one finds all of them.
        none_missing, all_missing = [0] * (len(calls) + 1), self._missing_sums(pack)
        self._backward_first = self._backward_peak(all_missing, graphs_kept=False)
        self._backward_later = self._backward_peak(none_missing, graphs_kept=False)
        self._from_graph_first = self._backward_peak(all_missing, graphs_kept=True)
        self._from_graph_later = self._backward_peak(none_missing, graphs_kept=True)
        if costs.in_slices:  # no graph is kept: forward as any other pack, then backward as any other pack
            held = costs.held_bytes + 2 * costs.scalar_bytes  # the loss, and its scaled copy
            loss = costs.loss_bytes if slices_from_host else 0
            without_sums = max(self._forward, loss) - all_missing[len(calls)]
            self._fused_first = max(without_sums, held + self._backward_first)
            self._fused_later = max(self._forward, loss, held + self._backward_later)
            self._making_first, self._making_later = self._fused_first, self._fused_later
        else:
            tied = self._tied_gradients(pack)
            self._fused_first = self._fused_peak(all_missing, tied)
            self._fused_later = self._fused_peak(none_missing, tied)
            self._making_first = self._making_peak(costs.making_bytes) - all_missing[len(calls)]
            self._making_later = self._making_peak(costs.making_bytes)

    # ---- the peaks

    def forward_peak_bytes(self, keeps_graph: bool) -> int:
        """Return the most that running a micro-batch forward takes, without the stash of earlier packs."""
        return self._forward_for_graph if keeps_graph else self._forward

    def backward_peak_bytes(self, from_graph: bool, sums_exist: bool) -> int:
        """Return the most that running a micro-batch backward takes, its stash of this pack included.

        What it holds between its passes and the stash of earlier packs are not in it. The sums of the pack's gradients
        are counted by the caller, as if they were there from the start: this is less by those that are still missing.

        Args:
            from_graph: whether its graph has been kept, so that nothing is recomputed.
            sums_exist: whether an earlier micro-batch has left sums of gradients.
        """
        if from_graph:
            return self._from_graph_later if sums_exist else self._from_graph_first
        return self._backward_later if sums_exist else self._backward_first

    def fused_peak_bytes(self, sums_exist: bool) -> int:
        """Return the most that running a micro-batch forward and backward at once takes, without the stash of earlier
        packs. `sums_exist` and what is counted of sums: as in `backward_peak_bytes`.
        """
        return self._fused_later if sums_exist else self._fused_first

    def making_peak_bytes(self, sums_exist: bool) -> int:
        """Return the part of `fused_peak_bytes` that comes before the loss is propagated back from.

        In slices it is all of it: the parts are not told apart.
        """
        return self._making_later if sums_exist else self._making_first

    @property
    def from_graph_excess_bytes(self) -> int:
        """How much more running backward from a kept graph takes than recomputing it."""
        return max(0, self._from_graph_first - self._backward_first, self._from_graph_later - self._backward_later)

    # ---- how they are added up

    def _forward_peak(self, keeps_graphs: bool) -> int:
        """Return the largest, over the pack's calls, of

            stash of the pack's calls before + their kept graphs + waiting bytes of the call + its forward peak

        and, after the model's last call, of the same with graph and tail in place of the forward peak (the loss is made
        before the graphs of a forward pass are kept).
        """
        stash = graphs = most = 0
        for call in self._calls:
            most = max(most, stash + graphs + call.waiting.alive_bytes + call.forward.peak_bytes)
            stash += call.stash.on_device_bytes
            if keeps_graphs:
                graphs += call.forward.kept_graph_bytes
        if self._ends_model:
            last = self._calls[-1]
            before = stash - last.stash.on_device_bytes
            most = max(most, before + last.waiting.alive_bytes + last.forward.graph_bytes + self._tail_bytes)
        return most

    def _backward_peak(self, missing_sums: list[int], graphs_kept: bool) -> int:
        """Return the largest, over the pack's calls from the last to the first, of

        stash of the pack's calls up to this one + gradients of later calls that wait for sums of another dtype
        - sums of gradients that are still missing
        + the larger of: kept graphs up to this call + its code peak; kept graphs before this call + its backward peak

        Where slices take their inputs from the host, there is no stash but that of a slice of this call, beside its
        backward peak.
        """
        count = len(self._calls)
        graphs_before = [0] * (count + 1)  # the kept graphs of the calls before each, and of all
        if graphs_kept:
            graphs_before = [*accumulate((call.forward.kept_graph_bytes for call in self._calls), initial=0)]
        stash, unsummed = 0 if self._slices_from_host else self.stash_bytes, 0
        most = stash + graphs_before[count] - missing_sums[count]
        for place in reversed(range(count)):
            call = self._calls[place]
            own = call.stash.slice_bytes if self._slices_from_host else 0
            running = max(
                graphs_before[place + 1] + call.backward.code_peak_bytes,
                graphs_before[place] + call.backward.peak_bytes + own,
                self._tail_bytes if call.runs_with_loss else 0,
            )
            most = max(most, stash + running + unsummed - missing_sums[place])
            stash -= 0 if self._slices_from_host else call.stash.on_device_bytes
            unsummed += call.backward.unsummed_bytes
        return max(most, unsummed - missing_sums[0])

    def _making_peak(self, making_bytes: int) -> int:
        """Return the way forward of `_fused_peak`, with `making_bytes` in the place of the tail."""
        graphs = (call.forward.graph_bytes for call in self._calls)
        before = [*accumulate(graphs, initial=self._calls[0].waiting.alive_bytes)]
        most = before[-1] + making_bytes
        for place, call in enumerate(self._calls):
            most = max(most, before[place] + call.forward.peak_bytes)
        return most

    def _fused_peak(self, missing_sums: list[int], tied: list[int]) -> int:
        """Return the larger of the way forward and the way back, `before` being the waiting bytes of the first call and
        the graphs of the pack's calls before this one.

            forward     before + forward peak of the call; after the last one, all graphs + tail
            backward    gradients of later calls that wait for sums of another dtype + tied gradients
                        - sums of gradients that are still missing
                        + the larger of: before + graph of the call + its code peak; before + its backward peak
        """
        count = len(self._calls)
        graphs = (call.forward.graph_bytes for call in self._calls)
        before = [*accumulate(graphs, initial=self._calls[0].waiting.alive_bytes)]
        most = self._making_peak(self._tail_bytes) - missing_sums[count]
        unsummed = 0
        for place in reversed(range(count)):
            backward = self._calls[place].backward
            if self._calls[0].keeps_graph:  # no graph goes before the whole pack is through
                running = before[count] + max(backward.code_peak_bytes, backward.peak_bytes)
            else:
                running = max(before[place + 1] + backward.code_peak_bytes, before[place] + backward.peak_bytes)
            most = max(most, running + unsummed + tied[place] - missing_sums[place])
            unsummed += backward.unsummed_bytes
        return most

    def _missing_sums(self, pack: Pack) -> list[int]:
        """Return the sums of gradients that are not there yet while the first micro-batch is propagated through each call,
        and, as the last number, before that: the pack's, less those of this call and of the later ones. Those of calls that
        run with the loss come with the loss.
        """
        summed = [call.backward.summed_bytes for call in self._calls]
        if sum(summed) < pack.gradient_bytes:  # sums of another dtype: they come when the micro-batch is through
            return [0] * (len(summed) + 1)
        with_loss = sum(call.backward.summed_bytes for call in self._calls if call.runs_with_loss)
        missing = [pack.gradient_bytes - min(with_loss, pack.gradient_bytes)]
        there = 0
        for nbytes in reversed(summed):
            there += nbytes
            missing.append(pack.gradient_bytes - min(there, pack.gradient_bytes))
        return missing[::-1]

    def _tied_gradients(self, pack: Pack) -> list[int]:
        """Return, by call, gradients of parameters that it or later calls use and calls before it, too: they wait until the
        earliest of these calls adds them up.
        """
        summed = {layer: call.backward.summed_bytes for layer, call in zip(self._layers, self._calls, strict=True)}
        of_several_layers = max(0, sum(summed.values()) - pack.gradient_bytes)
        last_place = {layer: place for place, layer in enumerate(self._layers)}
        called: set[int] = set()
        tied: list[int] = []
        called_again = 0  # gradients of layers that are called up to here and later again
        for place, layer in enumerate(self._layers):
            if layer not in called:
                called.add(layer)
                called_again += summed[layer]
            if last_place[layer] == place:
                called_again -= summed[layer]
            tied.append(called_again + of_several_layers)
        tied[-1] = 0  # nothing has been propagated before the last call
        return tied
