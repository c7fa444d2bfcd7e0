"""The engine in DeepSpeed's words: forward, backward, step. No arithmetic and no policy of its own."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.assembly import Assembly
from harmony_ds.config import Config
from harmony_ds.engine.by_hand import OptimizerByHand
from harmony_ds.engine.checkpoints import Checkpoints
from harmony_ds.engine.gradients import EngineOwner
from harmony_ds.engine.lifetime import let_go, while_alive
from harmony_ds.engine.reporting import StepReports
from harmony_ds.engine.step_gradients import StepGradients
from harmony_ds.engine.step_record import StepRecord
from harmony_ds.errors import (
    BatchError,
    CallChangedError,
    NoOptimizerError,
    NotScalarError,
    UnsupportedError,
    UsageError,
)
from harmony_ds.loss_scaling import LossScaler
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.updater import Clipping, GradientNorm
from harmony_ds.parameters import ParameterLinks
from harmony_ds.reports import MemoryReport, PlanReport, SwapReport
from harmony_ds.runtime.work import Outcome
from harmony_ds.scheduler.plan import Plan, Task
from harmony_ds.scheduler.trace import ExecutedStep
from harmony_ds.schedules import build_scheduler
from harmony_ds.stepping.group import GroupParts, StepGroup
from harmony_ds.stepping.inputs import Arguments, take_batches
from harmony_ds.stepping.output_kinds import OutputKinds
from harmony_ds.stepping.pending import PendingLoss
from harmony_ds.stepping.ticket import LossFunction, QueuedMicroBatch


class HarmonyEngine(Checkpoints):
    """Trains one model. Unknown attributes are looked up in the model."""

    def __init__(self, model: nn.Module, config: Config, assembly: Assembly, lr_scheduler: Any) -> None:
        super().__init__()
        self.module = model
        self._settings = config
        self._assembly = assembly
        self._runner = assembly.runner
        self._world = world = assembly.world
        self.local_rank, self.global_rank = world.local_rank, world.rank
        self.world_size = self.dp_world_size = self.seq_dp_world_size = world.size
        self.optimizer = assembly.optimizer
        self.lr_scheduler = build_scheduler(config.scheduler, lr_scheduler, self.optimizer)
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._group_began = 0  # micro_steps when the group that is queued now began
        self._boundary: bool | None = None
        self._backwards = 0  # of the group that is queued now
        self._applied = False
        self._norm: Future[GradientNorm] | None = None
        self._record = StepRecord(assembly, config.accumulation_dtype)
        self._looked_early = False
        self._running = False  # a step, or a part of one
        self._scaler = LossScaler(config.loss_scale)
        self._gradients = StepGradients(assembly, self._scaler)
        self._by_hand = None if assembly.host_optimizer is None else self._take_optimizer(assembly.host_optimizer)
        self._reports = StepReports(config, world.speaks)
        self._links = ParameterLinks(model, assembly.store, assembly.host_optimizer, EngineOwner(self))
        # Also for an engine that is dropped, and at exit, when the interpreter would kill the update's thread inside C++.
        self._let_go = weakref.finalize(self, let_go, self._links, self._by_hand, assembly)
        self._inside_no_sync = False
        self.training_data: Any = None
        self.training_dataloader: Any = None
        self.collate_fn: Callable[[Any], Any] | None = None
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.mpu: Any = None
        self.loaded_checkpoint_dp_world_size: int | None = None
        self._own_batches: Iterator[Any] | None = None
        self._tell_optimizer()
        self.on_progress(None)
        seed = config.harmony.seed
        self._group_parts = GroupParts(
            model,
            assembly.device,
            assembly.ledger,
            assembly.runner,
            OutputKinds(),
            world.first("seed", torch.initial_seed) if seed is None else seed,
            while_alive(self._warn_about_looking),
            self._scaler.check_scaled,
            while_alive(self._propagate),
        )
        self._group = self._new_group()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # ---- what a training loop calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for one micro-batch. While gradients are on, outputs with a loss stay pending.

        Raises:
            BatchError: there is no tensor among the arguments.
            DoesNotFitError: no plan fits this micro-batch in the device memory budget.
        """
        self._runner.check_alive()
        if not torch.is_grad_enabled():
            with self.streaming():
                return self._group.call_now(self.module, args, kwargs)
        with self._world.together():
            self._settle()
            return self._group.add(args, kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Propagates back from `loss`, or notes that the group has to when it runs.

        Returns:
            The loss divided by the number of accumulation steps (unless not `scale_wrt_gas`).
        """
        self._need_optimizer("backward")
        _need_scalar(
            loss, "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors"
        )
        if isinstance(loss, PendingLoss):
            loss.check_not_propagated()
        self._backwards += 1
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = self._scaler.scaled(loss)
        with self._scaler.backward():
            if isinstance(scaled, PendingLoss):
                scaled.propagate()
            else:
                torch.autograd.backward(scaled, retain_graph=retain_graph)
        return loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary: runs the queued group, updates the weights, steps the scheduler."""
        if self._inside_no_sync:
            raise UsageError("It is illegal to call Engine.step() inside no_sync context manager")
        self._need_optimizer("step")
        self._applied = False
        if self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation():
            try:
                with self._world.together():
                    self._optimizer_step(lr_kwargs or {})
            except BaseException:
                self.micro_steps = self._group_began  # the loop may hand the group over again
                raise
            self._group_began = self.micro_steps + 1
        self.micro_steps += 1

    def train_batch(
        self, data_iter: Iterator[Any] | Sequence[Any] | None = None, loss_fn: LossFunction | None = None
    ) -> Tensor:
        """One optimizer step over the next `gradient_accumulation_steps()` micro-batches of `data_iter`.

        Args:
            data_iter: yields mappings (keyword arguments), tuples (positional ones) or single arguments; a list of them
                is one step's. If it ends early, the step is taken over what it gave, and the mean is over that.
            loss_fn: from the model's outputs to a scalar (by default, the loss among them).

        Returns:
            The mean loss, detached, 0-dim, on the device.

        Raises:
            StopIteration: `data_iter` is at its end.
        """
        self._need_optimizer("train_batch")
        if self._group:
            raise BatchError(
                f"{len(self._group)} micro-batches of engine(...) are still queued: call backward() and step() for "
                "them before train_batch()."
            )
        with self._world.together():
            batches = self._take(data_iter)
            losses = self._step_over(len(batches), lambda: [self._group.queue(batch, loss_fn) for batch in batches])
            loss = self._world.mean(torch.stack(losses).mean())
        self._reports.train_loss(self, loss)
        return loss

    def _step_over(self, divisor: int, queue: Callable[[], list[QueuedMicroBatch]]) -> list[Tensor]:
        """One optimizer step over what `queue` queues, each loss divided by `divisor`; the losses."""
        try:
            queued = queue()
            self._ask_for_gradients(queued, divisor)
            self._backwards = len(queued)
            self._optimizer_step({})
        except BaseException:
            self._group = self._new_group()
            raise
        self.micro_steps += len(queued)
        self._group_began = self.micro_steps
        return [ticket.loss(attached=False) for ticket in queued]

    def train_group(
        self,
        batches: Sequence[Any],
        loss_fn: LossFunction,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[Tensor]:
        """One optimizer step over `batches`, whose losses `loss_fn(batch)` computes with calls of the model of its own.

        Args:
            batches: one for each micro-batch, however many.
            loss_fn: from a batch, on the device, to the scalar to propagate back from; the gradients are those of the sum.
                It is called on a thread of its own for each micro-batch, and a few times more to measure the model. It may
                call `engine.module` any number of times, with and without gradients, and must not call backward.
            aside: makes the context that measuring runs in, which may undo what `loss_fn` noted meanwhile.

        Returns:
            The losses, detached, 0-dim, on the device.
        """
        self._need_optimizer("train_group")
        if self._group or not batches:
            raise BatchError(
                f"train_group() got {len(batches)} micro-batches while {len(self._group)} of engine(...) are queued: it "
                "takes at least one, and none may be queued."
            )
        given = [Arguments((batch,), {}) for batch in batches]
        with self._world.together():
            return self._step_over(1, lambda: [self._group.queue(one, call=loss_fn, aside=aside) for one in given])

    def _ask_for_gradients(self, queued: Sequence[QueuedMicroBatch], divisor: int) -> None:
        for micro_batch in queued:
            micro_batch.backward_from_loss(divisor, self._scaler.scale)
            if self._runner.hooked:
                self._settle()
                self._propagate()

    def eval_batch(self, data_iter: Iterator[Any] | Sequence[Any], loss_fn: LossFunction | None = None) -> Tensor:
        """The mean loss over the next `gradient_accumulation_steps()` micro-batches, without gradients.

        The model is in evaluation mode meanwhile; every pack is swapped in once for all of them.
        """
        self._runner.check_alive()
        training = self.module.training
        with self._world.together():
            batches = self._take(data_iter)
            self.module.eval()
            self._assembly.wait_for_updates()
            try:
                losses = self._group.evaluate(batches, loss_fn)
            finally:
                self.module.train(training)
            return self._world.mean(torch.stack(losses).mean())

    def _take(self, data_iter: Iterator[Any] | Sequence[Any] | None) -> list[Arguments]:
        batches = self._training_batches() if data_iter is None else data_iter
        return take_batches(batches, self.gradient_accumulation_steps())

    def _optimizer_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        assert self._by_hand is not None
        self._by_hand.follow(by_hand=lr_kwargs is None)
        group, count = self._group, len(self._group)
        full = count == self.gradient_accumulation_steps() and not group.propagated
        self._reports.begin()
        with self._record.step(count, full):
            try:
                ran = self._run_group(group)
            finally:
                self._group = self._new_group()
            held = self._links.held()
            if held:  # what shares a parameter's memory shows the update, as it does in plain PyTorch
                self._assembly.looks.at_weights(tuple(held))
                self._links.watch(held)
        outcome = self._runner.executor.outcome if ran else Outcome()
        self._boundary_passed(outcome, lr_kwargs)

    def _run_group(self, group: StepGroup) -> bool:
        """The queued group, and what the user's own backward passes left; False if there is no gradient at all."""
        optimizer = self._assembly.host_optimizer
        assert optimizer is not None
        hyper, clipping = optimizer.hyper(), self._clipping()
        self._settle()
        if self._assembly.parts.own.are_there():
            self._world.refuse(
                "gradients that are put on parameters by hand, or by a backward pass of the program's own"
            )
        if self._scaler.scale != 1.0 and self._assembly.parts.own.are_there():
            raise UnsupportedError(
                "gradients were put on parameters by hand, or by a backward pass of the program's own, while losses are "
                "scaled (fp16): they cannot be told from scaled ones. Add what they are of to the loss, or train in bf16."
            )
        with self._busy():
            self._gradients.hide()
            return group.run(hyper, clipping) or self._runner.update_only(hyper, clipping)

    def _take_optimizer(self, optimizer: HostOptimizer) -> OptimizerByHand:
        return OptimizerByHand(
            optimizer,
            while_alive(self._step_by_hand),
            self._gradients.zero_by_hand,
            while_alive(self.finish_updates),
        )

    def _settle(self) -> None:
        """Before the model runs: what the user has done to it by hand is taken over.

        Raises:
            ModelError, CallChangedError: it cannot be.
        """
        self._links.settle()
        if self._assembly.interception.follow() and self._group.is_open:
            raise CallChangedError(
                "the forward of a layer was replaced while micro-batches wait that were called before: replace it before "
                "the first micro-batch of a step."
            )

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """A step, or a part of one, wherever it is asked for: gradients may be read under `torch.no_grad()`."""
        self._gradients.used.check()
        self._running = True
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self._running = False

    def _step_by_hand(self) -> None:
        """`optimizer.step()`: the update of what has gathered, as at a boundary; schedulers are the caller's.

        Gradients of parameters that are not the optimizer's stay, for another one to step.
        """
        assembly, count = self._assembly, len(self._group)
        assert assembly.host_optimizer is not None
        if not count and not assembly.parts.own.are_there(assembly.host_optimizer.trained):
            self._gradients.used.check()
            return
        others = self._gradients.take_others()
        try:
            self._optimizer_step(None)
        except BaseException:
            self.micro_steps = self._group_began
            raise
        self.micro_steps = self._group_began = self._group_began + count
        self._gradients.note_used(others)

    def _clipping(self) -> Clipping | None:
        settings = self._settings
        if not settings.deferred_update:
            return None
        return Clipping(settings.gradient_clipping, self._scaler.scale, settings.skip_overflow)

    def _propagate(self) -> bool:
        """Runs what is queued and propagated from, so that gradients are there; False if there are none.

        A part of a step: later micro-batches add to them, and `step()` uses them.
        """
        optimizer = self._assembly.host_optimizer
        if self._running or optimizer is None or not self._group:
            return False
        if not self._group.wanted:
            return self._group.propagated
        self._world.refuse("looking at gradients, or dropping them, before the step that they are for")
        try:
            with self._busy():
                self._gradients.hide()
                return self._group.propagate(optimizer.hyper(), self._clipping() or Clipping())
        except BaseException:
            self._group.abandon()
            self._group = self._new_group()
            self.micro_steps = self._group_began
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that have gathered since the last step, as plain PyTorch does."""
        if self.optimizer is None:
            return
        self._gradients.used.clear()
        self._gradients.drop(self._propagate())

    def _run_queued(self, why: str) -> None:
        """As `_propagate`, because `why` is about to happen.

        Raises:
            UsageError: a micro-batch is queued that has not been propagated back from.
        """
        if self._running or not self._group:
            return
        self._propagate()
        if self._group.waits:
            raise UsageError(
                f"{why}, while a micro-batch that was handed over with the values before is still to be propagated back "
                "from: call engine.backward(loss) first, or change parameters behind engine.step()."
            )

    def _boundary_passed(self, outcome: Outcome, lr_kwargs: dict[str, Any] | None) -> None:
        """`lr_kwargs`: for the scheduler; None: it is not stepped."""
        self._norm = outcome.norm
        self._applied = not outcome.overflow
        if outcome.overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None and lr_kwargs is not None:
            # torch's schedulers look for a sign that the optimizer was stepped first.
            self.optimizer._opt_called = True  # type: ignore[union-attr]
            self.lr_scheduler.step(**lr_kwargs)
        self._scaler.update(outcome.overflow)
        self.global_steps += 1
        self.global_samples += self._samples_of_step()
        self._group = self._new_group()
        self._tell_optimizer()
        self._reports.boundary(self, self._record.micro_batches)

    def _new_group(self) -> StepGroup:
        return StepGroup(self._group_parts, self.global_steps)

    def _warn_about_looking(self) -> None:
        if not self._looked_early:
            self._looked_early = True
            warnings.warn(
                "a loss or an output was looked at before its accumulation boundary, so this micro-batch's forward "
                "pass swapped the whole model in for itself. The value is right. To keep micro-batches grouped, look at "
                "losses after engine.step(), keep sums out of place (total = total + loss.detach()), or use "
                "engine.train_batch().",
                RuntimeWarning,
                stacklevel=_users_frame(),
            )

    def _need_optimizer(self, what: str) -> None:
        self._runner.check_alive()
        if self.optimizer is None:
            raise NoOptimizerError(
                f"must provide optimizer during init in order to use {what}: name one in the ds_config or pass one"
            )

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for a `backward()` of the caller's own (instead of `engine.backward(loss)`)."""
        self._need_optimizer("scale")
        _need_scalar(
            loss, "loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)"
        )
        self._scaler.announce_backward()
        return self._scaler.scaled(loss)

    def _samples_of_step(self) -> int:
        backwards, self._backwards = self._backwards, 0
        if self.managed_gradient_accumulation():
            return self.train_batch_size()
        return backwards * self.train_micro_batch_size_per_gpu()

    # ---- accumulation boundary, in DeepSpeed's words

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return False
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides what is counted; a group ends at the next `step()` at a boundary, whatever its size."""
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False; "
                "the caller owns the boundary by calling step()"
            )
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the weights (no boundary, or an overflow: it did not)."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping, unscaled; None before the first."""
        return None if self._norm is None else self._norm.result().total

    @property
    def device(self) -> torch.device:
        """Where layers run."""
        return self._assembly.device.torch_device

    # ---- without gradients

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, its weights streamed layer by layer."""
        with self.streaming():
            return self._group.call_now(self.module.generate, args, kwargs)  # type: ignore[arg-type]

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """A context in which the model's methods can be called without gradients, under the device memory budget."""
        self._group.catch_up()
        with self._assembly.ledger.aside(), self._runner.streaming():
            yield

    # ---- state and reports

    def finish_updates(self) -> None:
        """Waits for updates that are still under way, and brings what lives on the device to the host. Reading weights
        through the model, or the optimizer's state, does so by itself.
        """
        self._assembly.finish_updates()

    @property
    def usable(self) -> bool:
        """False after a failure that left some layers updated and others not, and after `destroy`."""
        return self._let_go.alive and self._runner.failed is None

    @property
    def plan(self) -> Plan | None:
        """The plan of a full group; None before the first micro-batch has been measured."""
        return self._runner.planner.plan

    def on_progress(self, callback: Callable[[int, int, Task], None] | None) -> None:
        """`callback(done, total, task)` is called after each task of a step."""
        self._runner.executor.on_progress = self._reports.progress(callback)

    def swap_report(self) -> SwapReport:
        """Bytes between host and device in the last optimizer step.

        Raises:
            RuntimeError: there has been none.
        """
        return self._record.swaps()

    def plan_report(self) -> PlanReport:
        """Predicted against measured step time, device peak and bytes, and the plans that were not chosen.

        Raises:
            RuntimeError: there has been no step.
        """
        return self._record.plan()

    @contextmanager
    def record_steps(self) -> Iterator[list[ExecutedStep]]:
        """Records when each task of every optimizer step in the context ran, on each stream.

        Yields:
            A list that holds the steps, in their order, once the context has been left without an error. Leaving it
            waits for updates that are still under way.

        Raises:
            RuntimeError: steps are being recorded already.
        """
        with self._runner.recording() as steps:
            yield steps

    def trace(self, executed: ExecutedStep | None = None) -> dict[str, Any]:
        """The predicted step, and beside it the `executed` one: saved as JSON, https://ui.perfetto.dev opens it.

        Raises:
            RuntimeError: there is no plan yet.
        """
        if self._runner.planner.plan is None:
            raise RuntimeError("there is no plan before the first micro-batch: trace() draws the one that runs.")
        return self._runner.planner.trace(executed)

    def memory_report(self) -> MemoryReport:
        """Device peak of the last step against the plan and the budget; host bytes by kind."""
        return self._record.memory()

    def destroy(self) -> None:
        """Finishes updates, ends threads, frees memory, and gives the model its own forward and plain parameters back.

        An engine that nobody holds any more does so by itself.

        Raises:
            BaseException: an update's failure that nobody has seen yet, after all of that.
        """
        self._group.abandon()
        self._let_go()


def _need_scalar(loss: object, message: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise NotScalarError(message)


def _users_frame() -> int:
    """The stack level, as seen from the caller of `warnings.warn`, of the innermost line that is the user's own."""
    ours = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)
