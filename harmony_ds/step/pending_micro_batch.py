"""One queued micro-batch. Its loss is computed when it is read, or at the boundary, or (if it is dropped) never.

Three ways lead from a backward pass of the program to the step's event BACKWARD. None propagates through a layer: that
comes at the boundary, or at READ_GRADIENT.

    a loss that is not computed yet    PendingTensor.backward -> note_backward: one more term of `SharedLoss.terms`
    a real loss, of real outputs       autograd -> receive: its gradients wait at the outputs of layers
    train_batch, train_group           note_backward_from_own_loss

The program may start backward passes itself: `loss.backward()` in the place of `engine.backward(loss)`, which divides its
loss. As in DeepSpeed, gradients that come to a model's outputs from outside are then divided by the accumulation steps.
Each gradient is divided once, at the output that it arrives at. An output that another one was made of (`logits` and their
`loss`) must not divide what comes by that one again: `forward_ran` chooses the tensors that get the hook.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor

from harmony_ds.errors import BatchError, UnsupportedError, UsageError
from harmony_ds.model.graph_cut import reachable_nodes
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.token_expression import loss_of_works
from harmony_ds.model.token_tensor import TokenTensor, is_not_computed
from harmony_ds.model.trees import map_tensors, tensors_in
from harmony_ds.model.untouched import is_for_measuring
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.step.division import divided_by
from harmony_ds.step.inputs import CallInputs
from harmony_ds.step.pending import Node, OutputsGiven, PendingTensor, mark_entrance
from harmony_ds.step.shared_loss import SharedLoss, keep_values
from harmony_ds.step.transitions import StepEvent

LossFunction = Callable[[Any], Tensor]
PROPAGATED_ALREADY = (
    "this micro-batch has been propagated back from already: a parameter's .grad was looked at, or its inputs "
    "require a gradient, so its backward pass ran at once. Propagate back once, from the sum of its losses."
)


class Stage(enum.Enum):
    """How far a micro-batch has come.

    Most go from QUEUED to PROPAGATED, in the run of their group. For one whose loss or outputs the program reads early:

        QUEUED -- forward alone --> FORWARDED -- a gradient comes --> RECEIVED -- its group runs --> PROPAGATED
          |                             ^
          |                             +-- read again --+
          |                                              |
          +------------------- an error --------------> FAILED -- the next call or write --> DROPPED

    A FAILED one, too, is RECEIVED if its loss raised the error and a gradient comes to its outputs, and PROPAGATED if its
    group runs with a loss that it was propagated back from.
    """

    QUEUED = "no pass has run"
    FORWARDED = "its forward pass has run, alone: the program has read its loss or outputs"
    RECEIVED = "the same, and gradients have come to its outputs, from which its backward pass is to run"
    FAILED = "its forward pass, or its loss right after it, has raised an error, which the program has got"
    DROPPED = "after such an error the program went on: no pass runs any more"
    PROPAGATED = "its forward and its backward pass have run"


RUN_ALONE = (Stage.FORWARDED, Stage.RECEIVED)
"""Stages in which the forward pass has run alone, and the backward pass has not run."""


class StepOfMicroBatch(Protocol):
    """The step that a micro-batch belongs to: it takes events."""

    @property
    def is_open(self) -> bool:
        """Whether the step takes micro-batches."""

    def handle(self, event: StepEvent, *arguments: Any) -> Any:
        """Do what the transition table says about `event`."""

    def gradient_divisor(self, loss_divisors: frozenset[float]) -> int:
        """Return the accumulation steps; warn if the program has divided its loss by them, too."""

    def check_divided_alike(self, steps: frozenset[int]) -> None:
        """Raise UnsupportedError if gradients that other engines have divided by `steps` are of no use here."""

    def send_gradients(self, micro_batch: MicroBatch) -> None:
        """Send the gradients that wait at outputs of a micro-batch's layers to the host, until its backward pass runs."""


class PendingMicroBatch:
    """One micro-batch from its call to the end of its step, with the outputs and losses that the program has of it.

    Attributes:
        nodes: its outputs, and what the program makes of them.
        loss: what it propagates back from.
        stage: how far it has come.
        outputs_given: what its caller was given as its outputs.
        stand_ins: weak reference to the maker of stand-ins for parts of its outputs, where its caller was given such.
        divided_by: accumulation steps by which this engine or others have divided the gradients of its inputs.
        inputs_require_grad: whether any argument requires a gradient: then its backward pass cannot wait for the boundary.
        is_of_outputs: whether the loss that autograd propagates back from now is made of its outputs.
        uses_non_outputs: whether a loss that it was propagated back from is made of more than its outputs.
        shows_what_losses_use: whether `uses_non_outputs` tells about the program's losses: its outputs were given on trial
            (`OutputsGiven.ON_TRIAL`), and a gradient has come to them.
        joins_other_graphs: whether the program has joined a tensor with a graph of layers to its outputs.
        called_at: the file and the line of the program that has called it; ("", 0): not of a step.
    """

    def __init__(
        self,
        step: StepOfMicroBatch,
        micro_batch: MicroBatch,
        arguments: CallInputs,
        loss_fn: LossFunction,
        call: Callable[..., Any],
        profiling_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.step = step
        self.micro_batch = micro_batch
        micro_batch.objective = self.objective
        self.arguments = arguments
        self.call = call
        self.profiling_context = profiling_context
        self.loss_fn = loss_fn
        self.nodes: WeakSet[Node] = WeakSet()
        self.loss = SharedLoss(self)
        self.stage = Stage.QUEUED
        self.outputs_given = OutputsGiven.NONE
        self.stand_ins: Callable[[], object | None] = _nothing
        self._entrance: Callable[[], object | None] = _nothing  # to outputs that have been computed: weak, too
        self.divided_by: frozenset[int] = frozenset()
        self.inputs_require_grad = any(tensor.requires_grad for tensor in arguments.tensors)
        self.is_of_outputs = False
        self.uses_non_outputs = False
        self.shows_what_losses_use = False
        self.joins_other_graphs = False
        self.called_at = ("", 0)

    @property
    def has_run(self) -> bool:
        """Whether its forward pass has run, or has failed: its outputs are not pending any more."""
        return self.stage is not Stage.QUEUED

    @property
    def needs_backward(self) -> bool:
        """Whether the program propagates back from it, and its backward pass has not run."""
        if self.stage is Stage.PROPAGATED:
            return False
        return self.stage is Stage.RECEIVED or bool(self.loss.terms)

    @property
    def has_failed(self) -> bool:
        """Whether its forward pass has failed, and nothing but another read would run it again."""
        return self.stage is Stage.FAILED and not self.needs_backward

    @property
    def evaluates(self) -> bool:
        """Whether the model was in evaluation mode when it was called."""
        return not self.micro_batch.state.modes.training[0]

    @property
    def is_held(self) -> bool:
        """Whether the program still has something that is made of its outputs and is not computed."""
        return any(node.owner() is not None and node.value is None for node in self.nodes)

    @property
    def keeps_outputs_on_device(self) -> bool:
        """Whether outputs that its forward pass has computed, alone, are on the device: the program may hold them."""
        if self.stage not in RUN_ALONE:
            return False
        values = [node.value for node in self.nodes if node.owner() is not None and node.value is not None]
        return self.micro_batch.outputs is not None or any(value.ndim > 0 for value in values)

    @property
    def is_of_evaluation(self) -> bool:
        """Whether it is an evaluation's without `torch.no_grad()`, as far as the program has shown."""
        return self.evaluates and self.stage in (Stage.QUEUED, Stage.FORWARDED) and not self.needs_backward

    def is_in_reach(self) -> bool:
        """Return whether the program has something of its outputs that may still be computed or propagated back from.

        Once it has nothing that stands for any of them, the engine does not hold those that were computed either.
        """
        if self.outputs_given is OutputsGiven.NONE or self.needs_backward:
            return True
        if self.stand_ins() is not None or any(node.owner() is not None for node in self.nodes):
            return True
        self.micro_batch.outputs = None
        return self._entrance() is not None

    def free_unread_outputs(self) -> None:
        """Free the outputs of a forward pass that has run alone, if the program has nothing that would read them."""
        if self.stage is Stage.RECEIVED and self.stand_ins() is None and not self.is_held:
            self.micro_batch.outputs = None

    def keep_outputs(self) -> None:
        """Keep, of outputs of a forward pass that has run alone, what the program may still read after the step."""
        if self.stage in RUN_ALONE and self.micro_batch.outputs is not None:
            keep_values({self: self.micro_batch.outputs}, {})
            self.micro_batch.outputs = None

    @property
    def measured_modes(self) -> bytes:
        """Key of its measurements: its modes, and whether the program makes its loss of other outputs, or of several."""
        flags, passes = self.micro_batch.state.modes.flags, len(self.loss.members)
        if passes > 1:
            return flags + f"a loss of {passes} forward passes".encode()
        makes_loss = self.makes_loss_in_tiles or any(one.shape.numel() != 1 for one in self.loss.outputs_used)
        return flags + (b"a loss of the program's" if makes_loss else b"")

    @property
    def makes_loss_in_tiles(self) -> bool:
        """Whether the program has made its loss in tiles of tokens, of outputs that a forward pass alone has given it."""
        return self.stage is Stage.RECEIVED and bool(self.micro_batch.works_of_program)

    @property
    def inputs_beside(self) -> list[Any]:
        """The inputs of the other micro-batches that share its loss."""
        return [member.micro_batch.inputs for member in self.loss.members if member is not self]

    # ---- its forward pass

    def outputs(self) -> Any:
        """Return the model's outputs, with their graph; computed now if need be."""
        if self.micro_batch.outputs is None:
            if self.stage in (Stage.PROPAGATED, Stage.DROPPED) and self.step.is_open:
                self.refuse_read()
            self.step.handle(StepEvent.READ_OUTPUT, self)
        return self.micro_batch.outputs

    def refuse_read(self) -> NoReturn:
        """Raise BatchError: its outputs were not read in time."""
        why = "it was never propagated back from in its step"
        if self.stage is Stage.PROPAGATED:
            why = "its backward pass is over"
        elif self.stage is Stage.DROPPED:
            why = "its forward pass failed, and the program went on without it"
        raise BatchError(
            f"this micro-batch's outputs are not known any more: {why}. Look at them before engine.backward(loss) or "
            "engine.step(), or run the engine under torch.no_grad()."
        )

    def forward_ran(self) -> None:
        """Note that its forward pass ran alone: its loss can be read, and propagated from, until the step is over."""
        micro_batch = self.micro_batch
        micro_batch.cut_outputs()
        outputs = {id(output): output for output in tensors_in(micro_batch.outputs) if output.requires_grad}
        used = _used_by_other_outputs(outputs.values())
        handed_out = {key: _without_view(output) for key, output in outputs.items()}
        micro_batch.outputs = map_tensors(lambda tensor: handed_out.get(id(tensor), tensor), micro_batch.outputs)
        receiver = _Receiver(self)
        self._entrance = ref(receiver)
        self.stage = Stage.FORWARDED
        if self.needs_backward:
            self.loss.propagate_now()
        for key, output in outputs.items():
            # Gradients of other outputs come to those that they are made of.
            entrance = handed_out[key] if key in used else output
            if isinstance(entrance, TokenTensor):  # gradients come to what is made of it
                entrance.enter_by(receiver.receive)
                continue
            entrance.register_hook(receiver.receive_of_leaf if output.is_leaf else receiver.receive)

    # ---- its loss

    def share_loss(self, others: Sequence[Any]) -> bool:
        """Propagate back together with `others`, from a loss of all their outputs.

        Returns:
            Whether they are the same engine's, in the same step.
        """
        for other in others:
            if not isinstance(other, PendingMicroBatch) or other.step is not self.step:
                return False
        for other in others:
            if other.loss is not self.loss:
                self.loss.merge(other.loss)
        return True

    def note_backward(self, node: Node) -> None:
        """Note that the program propagates back from `node`, which it has made of outputs that are not computed."""
        members = [source for source in node.sources if source in self.loss.members]
        if self is not members[0]:  # which has noted it for all of them
            return
        self._refuse_after_step()
        self._note_term(node)
        if any(member.inputs_require_grad for member in self.loss.members):
            self.step.handle(StepEvent.READ_GRADIENT)

    def note_backward_from_own_loss(self, divisor: int, scale: float) -> PendingTensor:
        """Note that the engine propagates back from the loss of its outputs, over `divisor` and times `scale`.

        Gradients of its inputs come when the step is taken, at once.

        Returns:
            The loss, which is not computed.
        """
        device = self.micro_batch.home
        loss = PendingTensor(Node((self,), torch.Size(), torch.float32, device, read=self.loss_fn))

        def scaled(values: Any) -> Tensor:
            (value,) = values
            made: Tensor = value / divisor * scale
            return made

        self._note_term(Node((self,), torch.Size(), torch.float32, device, function=scaled, operands=[loss.node]))
        if self.stage in RUN_ALONE:
            self.loss.propagate_now()
        return loss

    def _note_term(self, node: Node) -> None:
        """Add `node` to the loss that it shares, as one more term to propagate back from when the group runs."""
        for member in self.loss.members:
            assert isinstance(member, PendingMicroBatch)
            divisor = member._divisor(node.divisors)
            member._note_caller()
        self.loss.terms.append((node, divisor))
        for member in self.loss.members:
            self.step.handle(StepEvent.BACKWARD, member, f"from term {node.number}")

    def receive(self, gradient: Tensor) -> Tensor:
        """Take a gradient of one of its outputs, which a forward pass alone has computed; return what goes on."""
        # On its way from a later layer to an earlier one: an output may lie between them.
        if self.micro_batch.is_at_work:
            return gradient
        if is_for_measuring() is not None:  # another engine measures a loss that leads here, too
            return gradient
        self.check_not_propagated()
        if not self.loss.is_propagating:  # else noted when the program called backward()
            self._note_caller()
        self.note_gradient()
        self.uses_non_outputs |= not self.is_of_outputs
        backward_pass = None if self.loss.is_propagating else f"of autograd {torch._C._current_graph_task_id()}"
        self.step.handle(StepEvent.BACKWARD, self, backward_pass)
        at_end = self._read_gradient if self.inputs_require_grad else self.send_gradients
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        divisor = self._divisor(frozenset())
        if divisor != 1 and self.joins_other_graphs:
            raise UnsupportedError(
                "loss.backward() of a loss that is made of more than the model's outputs (an attribute of a module, or "
                "what a hook has kept): only gradients that come by outputs can be divided by the accumulation steps. Call "
                "engine.backward(loss), or let the model return what the loss is made of."
            )
        return gradient if divisor == 1 else gradient / divisor

    def note_gradient(self) -> None:
        """Note that gradients have come to its outputs, which a forward pass alone has computed."""
        if self.stage in (Stage.FORWARDED, Stage.FAILED):  # FAILED: where a loss raised an error after the forward pass
            self.stage = Stage.RECEIVED
        self.shows_what_losses_use |= self.outputs_given is OutputsGiven.ON_TRIAL

    def send_gradients(self) -> None:
        """Let gradients that have come to its outputs wait on the host, once autograd has brought all of them."""
        if self.step.is_open:
            self.step.send_gradients(self.micro_batch)

    def _read_gradient(self) -> None:
        """Let gradients go on to the micro-batch's inputs, once autograd has brought all to its outputs."""
        if self.step.is_open:
            self.step.handle(StepEvent.READ_GRADIENT)

    def check_not_propagated(self) -> None:
        """Raise UsageError if its backward pass or its step is over, or its engine destroyed."""
        self._refuse_after_step()
        if self.stage is Stage.PROPAGATED:
            raise UsageError(PROPAGATED_ALREADY)

    def _refuse_after_step(self) -> None:
        if not self.step.is_open:
            self.step.handle(StepEvent.BACKWARD, self, None)  # which says why that is refused

    def _divisor(self, loss_divisors: frozenset[float]) -> int:
        """Return what gradients that come to its outputs now are divided by: 1 if they have been divided already."""
        before = divided_by()
        if before is None:
            divisor = self.step.gradient_divisor(loss_divisors)
            self.divided_by |= {divisor}
            return divisor
        self.step.check_divided_alike(before)
        self.divided_by |= before
        return 1

    def _note_caller(self) -> None:
        """Note the modes in which its loss is propagated back from: autocast, and what is frozen by now."""
        micro_batch = self.micro_batch
        micro_batch.backward_autocast = Autocast.current(micro_batch.home.type)
        before, micro_batch.state = micro_batch.state, micro_batch.state.at_backward()
        if self.needs_backward and micro_batch.state is not before:
            raise UnsupportedError(
                "parameters were frozen (requires_grad_(False)) between two backward passes from one micro-batch, which "
                "run as one: propagate back from the sum of its losses."
            )

    # ---- what the executor and the measuring propagate back from

    def objective(self, outputs: Any) -> Tensor | None:
        """Return what the fused pack propagates back from; None if the forward pass ran alone, or a later one shares the
        loss.
        """
        if self.stage in RUN_ALONE:
            keep_values({self: outputs}, {})
            return None
        self.micro_batch.outputs = outputs  # the engine has those of joined micro-batches
        return self.loss.objective() if self is self.loss.members[-1] else None

    def surrogate_loss(self, outputs: Any) -> Tensor | None:
        """Return a loss of `outputs`, for measuring a backward pass: see `own_loss`, if that can be computed.

        Else some other scalar of them, whose backward pass takes about as long. None: no output requires a gradient.
        """
        loss = self.own_loss(outputs)
        if loss is not None:
            return loss
        parts = [_surrogate_part(tensor) for tensor in tensors_in(outputs) if tensor.requires_grad]
        return sum(parts[1:], parts[0]) if parts else None

    def own_loss(self, outputs: Any) -> Tensor | None:
        """Return the program's own loss, or, where it was made in tiles, one of all that these have left (`loss_of_works`).

        None: it cannot be computed from `outputs`, of another shape or alone.
        """
        used = [
            (node, node.read) for node in self.loss.outputs_used if node.sources[0] is self and node.read is not None
        ]
        heads = {one.head for one in tensors_in(outputs) if isinstance(one, TokenTensor)}
        if self.makes_loss_in_tiles and len(heads) == 1:
            return loss_of_works(self.micro_batch.works_of_program, heads.pop())
        # Other micro-batches of a shared loss are represented by zeros as large as their outputs: tiles are to avoid those.
        in_tiles = len(self.loss.members) > 1 and any(map(is_not_computed, tensors_in(outputs)))
        with suppress(BatchError):
            if not used:
                return self.loss_fn(outputs)
            alike = all(node.shape.numel() == 1 or read(outputs).shape == node.shape for node, read in used)
            if alike and not in_tiles:
                return self.loss.sum({self: outputs}, detached=True)[0]
        return None

    def forget_values(self) -> None:
        """Forget the values of what the program still has of its outputs: the run that is made again keeps them anew."""
        for node in self.nodes:
            node.value = None

    def note_call(self, error: BaseException, when: str) -> None:
        """Note on an error which micro-batch it is of, and where the program called it."""
        file, line = self.called_at
        error.add_note(f"harmony_ds: micro-batch {self.micro_batch.index + 1}, {when}, called in {file}, line {line}")

    # ---- its end

    def close_heads(self) -> None:
        """Compute nothing more of what the model's last layer gives: its weights are about to change, or have changed."""
        for *_, head in self.micro_batch.heads:
            head.close()

    def finish_propagation(self) -> None:
        """Note that its backward pass is done; what the program still has of it stays."""
        self.loss.terms.clear()
        self.stage = Stage.PROPAGATED

    def drop(self) -> None:
        """Drop it after its forward pass has failed."""
        self.stage = Stage.DROPPED
        self.close()

    def close(self, keeps_outputs: bool = True) -> None:
        """Drop graph, outputs and inputs; `keeps_outputs`: but for values that the program may still read."""
        self.close_heads()
        if keeps_outputs:
            self.keep_outputs()
        for node in self.nodes:
            if node.value is not None:
                node.function, node.operands = None, ()
        self.loss.terms.clear()
        self.micro_batch.close()
        self.arguments.close()


class _Receiver:
    """Receiver of the gradients of a micro-batch's outputs: it lives as long as anything leads gradients to them."""

    def __init__(self, pending: PendingMicroBatch) -> None:
        self._pending = pending

    def receive(self, gradient: Tensor) -> Tensor:
        return self._pending.receive(gradient)

    def receive_of_leaf(self, gradient: Tensor) -> None:
        """Take the gradient of an output that the model was given, or keeps: no gradient of its own comes by it."""
        if self._pending.step.is_open:
            self._pending.receive(gradient)


def _nothing() -> None:
    """Stand in for a weak reference to something that is gone."""


def _surrogate_part(output: Tensor) -> Tensor:
    """Return a sum that is propagated back from in the place of a loss of `output`: in tiles, if `output` is."""
    values = output.float()
    return values.log_softmax(-1).amax(-1).sum() if is_not_computed(output) else values.sum()


def _used_by_other_outputs(outputs: Collection[Tensor]) -> set[int]:
    """Return the ids of those `outputs` that others were computed from."""
    edges = {edge for node in reachable_nodes(output.grad_fn for output in outputs) for edge in node.next_functions}
    return {id(output) for output in outputs if (output.grad_fn, output.output_nr) in edges}


def _without_view(output: Tensor) -> Tensor:
    """Return `output` as the program gets it: in the same memory, but no view.

    To write into a view in place gives it another place in autograd's graph, past the hooks on the one that it had.
    """
    if isinstance(output, TokenTensor) or output.is_leaf or output.layout is not torch.strided:
        return output
    with torch.inference_mode(False), torch.enable_grad():  # though the reader may want no gradient now
        alias: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
    mark_entrance(alias.grad_fn)
    return alias
