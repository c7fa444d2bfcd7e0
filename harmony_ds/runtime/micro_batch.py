"""One micro-batch on its way through a step: its lane, its recorded calls, its gradients between layers.

What it holds from its forward to its backward pass through a pack, and where that waits:

    calls: tensors            inputs of layer calls (`offload.stash`)            device; host from STASH_OUT to STASH_IN
           states             of random numbers, before each call                host
           buffers            of layers that depend on buffers they change       device
           graph              of calls whose graph is kept                       device
           output_gradients   the gradients that have come to outputs            device; host from CROSSING_GRADIENTS_OUT
                                                                                 to CROSSING_GRADIENTS_IN
    inter_layer               the graph of the code between layers               device
    outputs                   of the model, until the loss is propagated from    device

`LayerCalls.backward` releases each call when it has been propagated through: then its inputs are freed, on the host, too,
unless another call has the same ones. While the forward pass goes on, the lane itself holds tensors of the model's code,
which wait on the host from CROSSING_OUT to CROSSING_IN (`held_on_host`).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.errors import BatchError
from harmony_ds.model.contract import CallState
from harmony_ds.model.crossing import WaitingValues
from harmony_ds.model.graph_cut import cut, explaining_errors, reachable_nodes
from harmony_ds.model.inter_layer import InterLayerGraph
from harmony_ds.model.intercept import Autocast, ContextFactory, Request
from harmony_ds.model.own_settings import LaneSettings, ModuleSettings, in_force
from harmony_ds.model.recorded_call import RecordedCall, RecordedHead
from harmony_ds.model.targets import GradientSum
from harmony_ds.model.token_expression import HeadCall, TiledWork
from harmony_ds.model.token_tensor import TokenTensor
from harmony_ds.model.trees import map_tensors, tensors_in
from harmony_ds.offload.crossing_tensors import CrossingOnHost
from harmony_ds.runtime.lane import AnyLane, Lane
from harmony_ds.runtime.thread_state import ThreadState
from harmony_ds.scheduler.plan import Pack

Objective = Callable[[Any], Tensor | None]
"""From a forward pass's outputs to the scalar to propagate back from (None: nothing)."""


class OffPlanError(Exception):
    """A micro-batch called a layer that the plan has no place for; the model must be measured with it."""


@dataclass(slots=True, eq=False)
class MicroBatch:
    """One micro-batch as the executor runs it: its forward pass, its recorded layer calls, its outputs and gradients.

    Attributes:
        index: among the micro-batches of the group.
        seed: of its random stream.
        forward: runs the model on its inputs; called in the lane.
        objective: called with the outputs, by the engine, where forward and backward are fused.
        autocast: the caller's, entered again in the lane.
        backward_autocast: of the caller of backward on its loss; None: the one in force when it runs.
        context: the caller's context variables, likewise.
        state: what the call saw of the model.
        inputs_form: what of them and of autocast decides which operations run (`profiling.sample.form_of_inputs`).
        home: the device of losses whose values the program reads.
        device: that it runs on, or the group of devices.
        count: how many micro-batches it stands for.
        reduce: of one without gradients: what is kept of its outputs (the loss, not everybody's logits).
        loss_members: the micro-batches of its shared loss, which is made of the outputs of all of them, in the order of
            their calls, itself included; empty: its loss is its own. The last one's `objective` makes the loss.
    """

    index: int
    seed: int
    forward: Callable[[], Any]
    objective: Objective
    autocast: Autocast | None
    state: CallState
    home: torch.device
    device: Device
    backward_autocast: Autocast | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    count: int = 1
    inputs_form: str = ""
    reduce: Callable[[Any], Any] | None = None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = field(default_factory=lambda: ((), {}))
    lane: AnyLane | None = None
    outputs: Any = None
    lane_settings: LaneSettings | None = None
    """Settings of modules that its code has left."""
    forward_done: bool = False
    is_at_work: bool = False
    """Whether the engine runs it now, forward or back."""
    calls: list[tuple[int, RecordedCall]] = field(default_factory=list)
    """Recorded calls with their positions, in the order they were made."""
    heads: list[tuple[int, int, HeadCall]] = field(default_factory=list)
    """With positions and layers: heads whose output it has, and computes in tiles of tokens, after a forward pass that ran
    by itself."""
    inter_layer: InterLayerGraph = field(default_factory=InterLayerGraph)
    loss_members: tuple[MicroBatch, ...] = ()
    values: WaitingValues = field(default_factory=WaitingValues)
    """Outputs of its layer calls."""
    held_on_host: CrossingOnHost | None = None
    """What it has on the host while it waits between two packs."""
    _cursor: int = 0
    _numbers: int = 0

    def complete_settings(self, settings: ModuleSettings) -> None:
        """Let layer calls that have run be run again with what was in force, also of settings not yet exchanged then."""
        for _, call in self.calls:
            call.request.lane_settings = settings.completed(call.request.lane_settings)

    # ---- its forward pass

    def start(self, device: Device, between_layers: ContextFactory | None) -> AnyLane:
        """Run forward up to the first layer call; `between_layers` makes the context of the code between layer calls."""
        lane = self.lane = self.new_lane(device, between_layers)
        lane.resume()
        return lane

    def new_lane(self, device: Device, between_layers: ContextFactory | None) -> Lane:
        """Return a lane for its forward pass."""
        thread = ThreadState(device, self.state.model_attributes)
        settings = self.state.settings
        return Lane(self.forward, self.reduce is None, self.autocast, thread, self.context, settings, between_layers)

    def position_of(self, order: tuple[int, ...], request: Request) -> int:
        """Return the position of `request`, its next layer call, in the call order.

        Raises:
            OffPlanError: there is none.
        """
        try:
            return order.index(request.layer, self._cursor)
        except ValueError:
            raise OffPlanError from None

    def pass_position(self, position: int) -> int:
        """Move on past `position`; return the number of the call that is made there, one of several if calls are joined."""
        self._cursor = position + 1
        self._numbers += 1
        return self._numbers - 1

    def calls_in(self, pack: Pack) -> list[RecordedCall]:
        """Return the recorded calls of `pack`."""
        return [call for position, call in self.calls if position in pack.positions]

    def pop_calls(self, pack: Pack) -> Iterator[RecordedCall]:
        """Yield the recorded calls of `pack`, the last one first, and forget each."""
        while self.calls and self.calls[-1][0] >= pack.positions[0]:
            yield self.calls.pop()[1]

    def open_head(self, position: int, layer: int, head: HeadCall) -> None:
        """Note that it has the output of a head's call at `position`, which is the last one."""
        self.heads.append((position, layer, head))

    def record_of_head(self, number: int, call: RecordedHead) -> None:
        """Note a record of head `number` of those that were opened, of what the program has made of its output."""
        position, *_ = self.heads[number]  # as it is now
        call.is_of_program = self.forward_done
        self.calls.append((position, call))

    @property
    def works_of_program(self) -> list[TiledWork]:
        """What the program, not the model, has computed of the outputs of heads that it has, with a graph."""
        heads = [call for _, call in self.calls if isinstance(call, RecordedHead) and call.is_of_program]
        return [head.work for head in heads if head.work is not None]

    def close_heads(self, close: Callable[[int, HeadCall], None]) -> None:
        """Compute nothing of heads' outputs any more: weights are about to change. `close`: of one head of a layer."""
        for _, layer, head in self.heads:
            close(layer, head)
        self.heads.clear()

    def move(self, positions: tuple[int, ...]) -> None:
        """Follow a call order that has grown: `positions[p]` is where the call once at `p` is now."""
        self.calls = [(positions[position], call) for position, call in self.calls]
        self.heads = [(positions[position], layer, head) for position, layer, head in self.heads]

    def finish(self) -> None:
        """Take the outputs from a lane that ran to its end."""
        assert self.lane is not None
        outputs, self.lane_settings, self.lane = self.lane.result, self.lane.lane_settings, None
        self.outputs = outputs if self.reduce is None else self.reduce(outputs)
        self.forward_done = True

    # ---- its backward pass

    def propagate_loss(self) -> None:
        """Propagate from its outputs, which are kept no longer, through the code after its last call.

        The last one of those that share a loss does so for all of them.
        """
        members = self.loss_members or (self,)
        for member in members:
            member.check_unwritten()
        with in_force(self.lane_settings):
            loss = self.objective(self.outputs)
        for member in members:
            member.outputs = None
        if loss is not None:
            graphs = [member.inter_layer for member in members if not member.inter_layer.is_trivial]
            with in_force(self.lane_settings), explaining_errors():
                loss.backward(retain_graph=any(graph.touches(loss) for graph in graphs))

    def check_unwritten(self) -> None:
        """Raise ModelError if what was kept of its calls, or a view that one gave, has been changed in place since."""
        for entry in {entry for _, call in self.calls for entry in call.tensors}:
            entry.check()
        for view in [view for _, call in self.calls for view in call.views]:
            view.check()

    def waiting_gradients(self) -> list[GradientSum]:
        """Return the holders of gradients that wait for earlier packs."""
        waiting: list[GradientSum] = []
        for _, call in self.calls:
            waiting += [
                target for target in call.output_gradients if target is not None and target.gradient is not None
            ]
        return waiting + self.inter_layer.waiting()

    def propagate_rest(self) -> None:
        """Propagate what is left after all layers: to unlayered parameters and to the user's own leaves."""
        if not self.calls:
            self.inter_layer.propagate_all()
            self.inter_layer = InterLayerGraph()

    # ---- what becomes of it

    def cut_outputs(self) -> None:
        """Cut its outputs from what the caller's backward pass must not reach.

        That is code that layers depend on too, whose graph would be freed; and the graphs of the arguments, which get
        their gradients from this micro-batch's own backward pass.
        """
        given = {tensor.grad_fn for tensor in tensors_in(self.inputs) if tensor.grad_fn is not None}

        def own(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or isinstance(tensor, TokenTensor):  # whose graph begins at the head
                return tensor
            if self.inter_layer.touches(tensor) or not given.isdisjoint(reachable_nodes([tensor.grad_fn])):
                return cut([tensor.detach()], [self.inter_layer.target(tensor)])[0]
            return tensor

        if given or not self.inter_layer.is_trivial:
            self.outputs = map_tensors(own, self.outputs)

    def reset(self) -> None:
        """End the lane wherever it is, and forget everything recorded."""
        if self.lane is not None:
            self.lane.close()
        self.lane = None
        self.outputs = self.lane_settings = self.held_on_host = None
        self.values = WaitingValues()
        self.calls.clear()
        for *_, head in self.heads:
            head.close()
        self.heads.clear()
        self.inter_layer = InterLayerGraph()
        self.forward_done = False
        self._cursor = self._numbers = 0

    def close(self) -> None:
        """Drop its inputs and the program's objects: its step is over."""
        self.reset()
        self.forward, self.objective = (lambda: None), (lambda outputs: None)
        self.inputs, self.loss_members = ((), {}), ()
        self.state = replace(self.state, attributes={}, trained_now=tuple)


def loss_of(outputs: Any) -> Tensor:
    """Return the loss among a model's outputs: `.loss`, `["loss"]`, the first of a tuple, or the scalar itself.

    Raises:
        BatchError: there is none.
    """
    loss = outputs if isinstance(outputs, Tensor) else getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, dict):
        loss = outputs.get("loss")
    if loss is None and isinstance(outputs, tuple) and outputs:
        loss = outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else None
        found = f"a tensor of shape {shape}" if shape is not None else type(outputs).__name__
        raise BatchError(
            f"the model returned no scalar loss but {found}. Pass labels, so that the model computes one, or use the "
            "loop: outputs = engine(...); loss = ...; engine.backward(loss); engine.step()."
        )
    return loss
