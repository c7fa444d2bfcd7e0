"""One layer as its calls run it: on device copies of its parameters, over what it was given, with what it leaves found."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from harmony_ds.calls.arguments import Arguments, collecting, give_back, take_tensors
from harmony_ds.calls.boundary import cut
from harmony_ds.calls.buffers import changes_buffers_unseen, reads_statistics, versions
from harmony_ds.calls.caches import emptied
from harmony_ds.calls.installed import LayerParameters
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.own_memory import ParameterMemory
from harmony_ds.calls.recorded_call import Outcome, RecordedCall
from harmony_ds.calls.targets import DeadEnd, GradientTarget
from harmony_ds.calls.trees import Contents, changed, flatten_all, unflatten_all
from harmony_ds.decomposer.find import Layer
from harmony_ds.offload.residency import Leaves


class CalledLayer:
    """Runs one layer, and knows what its calls change.

    Attributes:
        changes_inputs, changes_buffers: whether a call was seen to.
        inputs_change: what a call was given was seen to be written to behind it, by the code between the layers.
        draws: a call was seen to draw random numbers, beside those of which that is known by how they are cut.
        replayed: it depends on buffers that it changes: a recomputation begins with what they were.
    """

    def __init__(self, layer: Layer, parameters: LayerParameters) -> None:
        self.name = layer.name
        self.parameters = parameters
        self.dead_end = DeadEnd(layer.name)
        self.memory = ParameterMemory(layer.parameters)
        self.buffered = [module for module in layer.module.modules() if module._buffers]
        self.changes_inputs = False
        self.inputs_change = False
        self.changes_buffers = False
        self.replayed = False
        self.draws = False
        self._gathering: set[nn.Module] = set()  # normalization that has been seen to gather statistics
        self._reading: set[nn.Module] = set()  # and to read them
        self._names = layer.parameters

    def take(self, request: Request) -> tuple[Arguments, list[Tensor]]:
        """What a call takes without its tensors, and those."""
        return take_tensors(request)

    @property
    def inputs_may_change(self) -> bool:
        """Whether what calls are given is written to, by them or behind them."""
        return self.changes_inputs or self.inputs_change

    @property
    def may_keep_graphs(self) -> bool:
        """Not where calls write into what they go on from: others do so before one is propagated back. Nor where what they
        were given is written to, which a graph may have saved.
        """
        return not (self.replayed or self.inputs_change)

    def may_be_cut(self, arguments: Arguments) -> bool:
        """Objects that a layer may write into, inputs and statistics that it changes, are of all rows at once."""
        return not (self.changes_inputs or self.changes_buffers) and arguments.may_be_cut

    def guarded(self, copies: Leaves) -> Leaves:
        """Those of `copies` that are the layer's (a pack may hold many), for a graph that is thrown away."""
        found: Leaves | None = copies.made.get(self)
        if found is None:
            own = ((name, copies[name]) for name in self._names if name in copies)
            found = copies.made[self] = self.dead_end.guarded(own)
        return found

    def run(
        self,
        call: RecordedCall,
        tensors: list[Tensor],
        copies: Leaves,
        targets: list[GradientTarget | None],
    ) -> Outcome:
        """The call over `tensors`, whose gradients go to `targets`."""
        request = call.request
        inputs = list(tensors)
        ends = [place for place, target in enumerate(targets) if target is not None]
        behind = cut([tensors[place] for place in ends], [target for target in targets if target is not None])
        for place, tensor in zip(ends, behind, strict=True):
            inputs[place] = tensor
        args, kwargs, made = call.arguments.filled(inputs)
        node = behind[0].grad_fn if behind else None  # of all
        tracked = inputs if request.grad else []  # those of inference mode have no versions
        written_to = [tensor._version for tensor in tracked]
        before = versions(self.buffered) if self.buffered else []
        collected: dict[str, list[Any]] = {}
        with self.parameters.installed(copies):
            if call.arguments.caches or call.arguments.collects:
                with collecting(request) as collected, emptied(call.arguments.caches):
                    result = request.run(args, kwargs)
            else:  # as most are: no contexts for each
                result = request.run(args, kwargs)
        if self.buffered:
            self._look_at_buffers(before)
        if not (made or collected) and written_to == [tensor._version for tensor in tracked]:  # as most
            leaves, shape = flatten_all((result,))
            outcome = Outcome(inputs, leaves, shape, [], [])
        else:
            nodes = dict.fromkeys(ends, node)
            altered = [p for p, t in enumerate(inputs) if t.requires_grad and t.grad_fn is not nodes.get(p)]
            outcome = _outcome_of(result, inputs, made, altered, collected)
        return outcome

    def _look_at_buffers(self, before: list[tuple[Tensor, int]]) -> None:
        """Notes whether a call has changed buffers."""
        if self.changes_buffers and self.replayed:
            return
        self._gathering.update(filter(changes_buffers_unseen, self.buffered))
        self._reading.update(filter(reads_statistics, self.buffered))
        after = versions(self.buffered)
        seen = len(after) != len(before) or any(
            a is not b or v != w for (a, v), (b, w) in zip(after, before, strict=True)
        )
        self.replayed |= seen or not self._gathering.isdisjoint(self._reading)
        self.changes_buffers |= seen or bool(self._gathering)

    def hand_over(self, call: RecordedCall, outcome: Outcome, leaves: list[Any], sources: list[Tensor]) -> Any:
        """The result, made of `leaves`; what was written elsewhere goes where the layer put it."""
        result, *beside = unflatten_all(leaves, outcome.shape)
        if not beside:
            return result
        collected, values, views = beside
        for place, view in zip(outcome.altered, views, strict=True):
            # Its memory holds that already: now its graph does, too. For who has saved it, nothing has changed.
            with _unsafe_preserve_version_counter(sources[place]):
                sources[place].copy_(view)
        give_back(call.request, collected, outcome.written, values)
        return result


def _outcome_of(
    result: Any,
    inputs: list[Tensor],
    made: list[Contents],
    altered: list[int],
    collected: dict[str, list[Any]],
) -> Outcome:
    """The outcome of a run that may have left something beside its result."""
    written = changed(made)
    same = {id(one.value): one.branch.original for one in made}
    # Views: the tensors themselves may be among the results, as what the caller gave.
    views = [inputs[place].view_as(inputs[place]) for place in altered]
    beside = (collected, [one.children for one in written], views)
    leaves, shape = flatten_all((result, *beside) if any(beside) else (result,), same)
    return Outcome(inputs, leaves, shape, written, altered)
