"""One layer as its calls run it: on device copies of its parameters, over what it was given, with what it leaves found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from harmony_ds.calls.arguments import Arguments, CallOutputs, collect, contents, has_changed
from harmony_ds.calls.boundary import cut, targets_of
from harmony_ds.calls.buffers import reads_statistics, updates_statistics, versions
from harmony_ds.calls.caches import restore_caches, snapshot_caches
from harmony_ds.calls.installed import LayerParameters
from harmony_ds.calls.recorded_call import RecordedCall
from harmony_ds.calls.storages import storages_of
from harmony_ds.calls.targets import DeadEnd, GradientTarget
from harmony_ds.calls.trees import flatten_all
from harmony_ds.decomposer.find import Layer
from harmony_ds.offload.residency import Leaves


class CalledLayer:
    """Runs one layer, and knows what its calls change.

    Attributes:
        changes_inputs, changes_buffers: whether a call was seen to.
        inputs_change: what a call was given was seen to be written to behind it, by the code between the layers.
        draws: a call was seen to draw random numbers, beside those of which that is known by how they are cut.
        replayed: it depends on buffers that it changes: a recomputation begins with what they were.
        aligned: makes the context that it runs in. Of several devices: where what it computes with is on another one.
    """

    def __init__(self, layer: Layer, parameters: LayerParameters) -> None:
        self.name = layer.name
        self.parameters = parameters
        self.dead_end = DeadEnd(layer.name)
        self.buffered = [module for module in layer.module.modules() if module._buffers]
        self.changes_inputs = False
        self.inputs_change = False
        self.changes_buffers = False
        self.replayed = False
        self.draws = False
        self.aligned: Callable[[], AbstractContextManager[object]] = nullcontext
        self._gathering: set[nn.Module] = set()  # normalization that has been seen to gather statistics
        self._reading: set[nn.Module] = set()  # and to read them
        self.names = layer.parameters

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

    def may_be_sliced(self, arguments: Arguments) -> bool:
        """Objects that a layer may write into, inputs and statistics that it changes, are of all rows at once."""
        return self.treats_rows_alike and arguments.may_be_sliced

    @property
    def treats_rows_alike(self) -> bool:
        """Whether nothing that it changes, as far as it has been seen, is of all rows at once."""
        return not (self.changes_inputs or self.changes_buffers)

    def parameter_storages(self, copies: Leaves) -> set[int]:
        """Where those of the layer's parameters that are among `copies` lie."""
        found: set[int] | None = copies.made.get(self)
        if found is None:
            found = copies.made[self] = storages_of(copies[name] for name in self.names if name in copies)
        return found

    def guarded(self, copies: Leaves) -> Leaves:
        """Those of `copies` that are the layer's (a pack may hold many), for a graph that is thrown away."""
        found: Leaves | None = copies.made.get(self.dead_end)
        if found is None:
            own = ((name, copies[name]) for name in self.names if name in copies)
            found = copies.made[self.dead_end] = self.dead_end.guarded(own)
        return found

    def run(
        self, call: RecordedCall, tensors: list[Tensor], copies: Leaves, targets: list[GradientTarget | None]
    ) -> CallOutputs:
        """The call over `tensors`, whose gradients go to `targets`."""
        request, arguments = call.request, call.arguments
        inputs = list(tensors)
        ends = [place for place, target in enumerate(targets) if target is not None]
        behind = cut([tensors[place] for place in ends], [target for target in targets if target is not None])
        for place, tensor in zip(ends, behind, strict=True):
            inputs[place] = tensor
        values = arguments.rebuild(inputs)
        held = [contents(values[place]) for place in arguments.containers] if arguments.containers else []
        collected = collect(request) if arguments.collects else {}
        caches = snapshot_caches(arguments.caches.values()) if arguments.caches else []
        before = versions(self.buffered) if self.buffered else []
        tracked = inputs if request.grad else []  # those of inference mode have no versions
        written_to = [tensor._version for tensor in tracked]
        kwargs = dict(zip(arguments.keywords, values[arguments.positional :], strict=True))
        with self.parameters.installed(copies), self.aligned():
            result = request.run(values[: arguments.positional], kwargs)
        if caches:
            restore_caches(caches)
        if self.buffered:
            self._look_at_buffers(before)
        altered, written = [], []
        if written_to != [tensor._version for tensor in tracked]:
            altered = [place for place, tensor in enumerate(inputs) if _leads_into_layer(tensor)]
        if held:
            written = [p for p, one in zip(arguments.containers, held, strict=True) if has_changed(values[p], one)]
        if altered or written or (collected and any(collected.values())):
            # Views: the tensors themselves may be among the results, as what the caller gave.
            views = [inputs[place].view_as(inputs[place]) for place in altered]
            leaves, shape = flatten_all((result, collected, [values[place] for place in written], views))
            for collection in collected.values():
                collection.clear()  # the call's context is kept
        else:  # as most are
            leaves, shape = flatten_all((result,))
        return CallOutputs(inputs, leaves, shape, written, altered)

    def _look_at_buffers(self, before: list[tuple[Tensor, int]]) -> None:
        """Notes whether a call has changed buffers."""
        if self.changes_buffers and self.replayed:
            return
        self._gathering.update(filter(updates_statistics, self.buffered))
        self._reading.update(filter(reads_statistics, self.buffered))
        after = versions(self.buffered)
        seen = len(after) != len(before) or any(
            a is not b or v != w for (a, v), (b, w) in zip(after, before, strict=True)
        )
        self.replayed |= seen or not self._gathering.isdisjoint(self._reading)
        self.changes_buffers |= seen or bool(self._gathering)


def _leads_into_layer(tensor: Tensor) -> bool:
    """Whether an input of a layer, with which its graph begins, comes from what the layer did to it since."""
    return tensor.grad_fn is not None and targets_of(tensor.grad_fn) is None
