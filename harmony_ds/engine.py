"""The engine under DeepSpeed's names: `initialize` makes it, and `HarmonyEngine` has every method that a program calls."""

from __future__ import annotations

import weakref
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from harmony_ds.assembly.arguments import (
    GivenConfig,
    check_model,
    check_schedule_argument,
    choose_config,
    join_processes,
    load_checked_config,
    match_loaded_dtype,
    refuse_duplicate_parameters,
)
from harmony_ds.assembly.assemble import assemble
from harmony_ds.assembly.lifetime import release
from harmony_ds.assembly.partitioned import gather_partitioned_parameters
from harmony_ds.assembly.training_data import TrainingData
from harmony_ds.checkpoint import LoadOptions
from harmony_ds.checkpoint.engine_checkpoints import Checkpoints
from harmony_ds.config import Config
from harmony_ds.config.deepspeed_getters import DEEPSPEED_NAMES
from harmony_ds.config.engine_settings import EngineSettings
from harmony_ds.device import Device
from harmony_ds.errors import BatchError, ConfigError, ModelError, UnsupportedError, UsageError
from harmony_ds.model.intercept import is_between_layers
from harmony_ds.optim.optimizer_chain import as_one_optimizer
from harmony_ds.optim.optimizers import ClientOptimizer, ParameterGroups
from harmony_ds.optim.zero_optimizer import unwrap_optimizer
from harmony_ds.reporting.reporter import Reporter
from harmony_ds.reporting.reports import MemoryReport, PlanReport, SwapReport
from harmony_ds.reporting.step_log import StepLog
from harmony_ds.scheduler.plan import Plan, Task
from harmony_ds.scheduler.trace import ExecutedStep
from harmony_ds.step.division import divided
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.inputs import CallInputs
from harmony_ds.step.pending import PendingTensor
from harmony_ds.step.pending_micro_batch import LossFunction, PendingMicroBatch
from harmony_ds.step.step import Step
from harmony_ds.step.step_record import StepRecord
from harmony_ds.step.steps import Steps
from harmony_ds.step.transitions import StepEvent

__all__ = ["HarmonyEngine", "add_config_arguments", "initialize"]


def initialize(
    args: Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | Sequence[torch.optim.Optimizer] | None = None,
    model_parameters: ParameterGroups | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,  # noqa: ARG001
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: GivenConfig | None = None,
    mesh_param: Any = None,
    config_params: GivenConfig | None = None,
    *,
    device: Device | None = None,
) -> tuple[HarmonyEngine, torch.optim.Optimizer | None, Any, Any]:
    """Wrap `model`, in host memory, for training; the signature and the result are those of `deepspeed.initialize`.

    Args:
        args: the program's arguments; `args.deepspeed_config` may be the ds_config.
        model: the model to train, in host memory.
        optimizer: an optimizer of the model's parameters, or a callable that makes one; overrides the ds_config's. Several
            optimizers over different parameters, in a list or in an object of the program's, are stepped together.
        model_parameters: parameters or parameter groups to train (all that require gradients).
        training_data: a dataset, which the third result loads in micro-batches as DeepSpeed does.
        lr_scheduler: a scheduler, a callable that makes one from the optimizer, or a list of schedulers, which are stepped
            together; overrides the ds_config's.
        distributed_port: accepted, without effect.
        mpu: accepted as long as it asks for no other parallelism than replicas of the model.
        dist_init_required: if True, `torch.distributed` and `deepspeed.comm` are initialized, for this process
            alone without a launcher.
        collate_fn: joins the samples of `training_data` to a micro-batch.
        config: the ds_config: a dict, a path, or url-safe base64 of JSON.
        mesh_param: accepted as long as it asks for no other parallelism than replicas of the model.
        config_params: another name of `config`.
        device: an explicit device, instead of the ds_config's.

    Returns:
        engine, optimizer, training data loader (or None), learning-rate scheduler (or None).

    Raises:
        ConfigError, ModelError, OptimizerError, UnsupportedError: an argument or key, which the message names.
    """
    module = check_model(args, model, mpu, mesh_param)
    if isinstance(module, HarmonyEngine):
        raise ModelError(
            f"model is an engine already, of a {type(module.module).__name__}: give initialize() the model, engine.module, "
            "after engine.destroy()."
        )
    gather_partitioned_parameters(module)
    given_config = choose_config(args, config if config is not None else config_params)
    client_optimizer: ClientOptimizer | None = as_one_optimizer(unwrap_optimizer(optimizer))
    checked_config = load_checked_config(given_config, client_optimizer, dist_init_required)
    checked_config = match_loaded_dtype(checked_config, module)
    check_schedule_argument(client_optimizer, lr_scheduler)
    parameters = None if model_parameters is None else list(model_parameters)
    refuse_duplicate_parameters(module, client_optimizer, parameters)
    checked_config, world = join_processes(checked_config, module, device)
    _release_from_idle_engine(module)
    with world.reporting_failures():
        state = assemble(module, checked_config, client_optimizer, parameters, device, world)
        try:
            engine = HarmonyEngine(
                module,
                checked_config,
                state,
                client_optimizer=client_optimizer,
                client_lr_scheduler=lr_scheduler,
                training_data=training_data,
                collate_fn=collate_fn,
            )
        except BaseException:
            state.destroy()
            raise
    _engine_of[module] = weakref.ref(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


_engine_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[HarmonyEngine]] = weakref.WeakKeyDictionary()
"""The engine that was made last for each model."""


def _release_from_idle_engine(model: nn.Module) -> None:
    """Destroy the engine that trains `model`, if there is one and nothing waits in it: a new one takes the model over."""
    earlier = _engine_of.get(model)
    engine = None if earlier is None else earlier()
    if engine is None or not engine.usable:
        return
    engine._steps.open.forget_out_of_reach()
    if engine._steps.is_idle:
        engine._state.health.hand_over()
        engine.destroy()


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config (and their deprecated forms), as `deepspeed.add_config_arguments` does."""
    import deepspeed

    added: ArgumentParser = deepspeed.add_config_arguments(parser)
    return added


class HarmonyEngine(nn.Module):
    """The engine that trains one model. Attributes that it does not have are the model's."""

    # Every method says which object does the work: `_steps` has the step that micro-batches are queued for, the optimizer,
    # the schedule and the counters; `_checkpoints` saves and loads, `_reporter` reports.
    #
    # Methods that need a live engine begin with `check_alive()`. A program that is compiled runs them uncompiled
    # (`_disable_dynamo`), since dynamo cannot follow a forward pass that runs later.

    is_compiled = False

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        state: EngineState,
        *,
        client_optimizer: Any = None,
        client_lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        """Take what `assemble` has made over `model`, and the arguments of `initialize` that DeepSpeed's engine shows."""
        super().__init__()
        self.module = model
        self.client_optimizer = client_optimizer
        self.client_lr_scheduler = client_lr_scheduler
        self.inside_no_sync_ctxt = False
        self.local_rank, self.global_rank = state.world.local_rank, state.world.rank
        self.world_size = self.dp_world_size = self.seq_dp_world_size = state.world.size
        self._boundary: bool | None = None  # as the caller has set it; None: found by counting
        self._state = state
        self._world = state.world
        self._settings = EngineSettings(config, state.world.rank, state.world.size)
        self._settings.client_optimizer = client_optimizer
        self._data = TrainingData(self._settings, training_data, collate_fn, state.world)
        self._record = StepRecord(state)
        self._reporter = Reporter(state, self._record)
        self._log = StepLog(state, self._settings, self._record, self._reporter)
        # From here on, the model and the optimizer are the engine's.
        self._steps = Steps(model, state, self._settings, client_lr_scheduler, self._record, self._log.report_step)
        # Also for an engine that is dropped, and at exit, when the interpreter would kill the update's thread inside C++.
        self._release = weakref.finalize(self, release, self._steps.context.links, self._steps.context.override, state)
        self._checkpoints = Checkpoints(self._steps, self._data.resumable_loader)

    def __getattr__(self, name: str) -> Any:
        """Return a getter of DeepSpeed's that the ds_config answers, or else the model's own attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            owner = self._settings if name in DEEPSPEED_NAMES else super().__getattr__("module")
            return getattr(owner, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *DEEPSPEED_NAMES})  # type: ignore[no-untyped-call]

    # ---- one micro-batch at a time

    @_disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for one micro-batch. While gradients are on, outputs with a loss stay pending.

        Raises:
            BatchError: there is no tensor among the arguments.
            DoesNotFitError: nothing fits this micro-batch in the device memory budget.
        """
        self.check_alive()
        if self._is_running():
            return self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            with self.streaming():
                return self._steps.context.model_calls.run(self.module, CallInputs(args, kwargs))
        with self._world.reporting_failures():
            step = self._steps.open
            self._steps.context.apply_user_edits(step.micro_batches_wait)
            return step.outputs_of(step.handle(StepEvent.CALL, CallInputs(args, kwargs, copies_tensors=True)))

    def _is_running(self) -> bool:
        """Return whether the caller is a function that this engine runs, such as `compute_loss`."""
        return self._state.runtime.contract.is_running and is_between_layers() and not self._state.streamer.is_open

    @_disable_dynamo
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Propagate back from `loss`, or note that the group has to when it runs.

        Returns:
            The loss divided by the number of accumulation steps (unless not `scale_wrt_gas`).
        """
        self.check_alive()
        self._steps.context.check_can_propagate()
        if self._is_running():
            raise UsageError(
                "engine.backward() was called within a function that the engine runs (compute_loss): return the loss "
                "instead, and the engine propagates back from it."
            )
        _need_scalar(
            loss, "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors"
        )
        unscaled = loss.node if isinstance(loss, PendingTensor) else None
        if unscaled is not None:
            unscaled.check_not_propagated()
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = self._steps.scaler.scaled(loss)
        # Every backward pass, a loss's own `backward()` too, calls the scaler's `check_scaled`.
        with self._steps.scaler.backward(), divided():
            if isinstance(scaled, PendingTensor):
                scaled.backward()
            else:
                self._steps.open.note_backward_from_real()
                with self._steps.context.step_gradients.receiving_scaled():
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
        if unscaled is not None:
            unscaled.was_propagated = not retain_graph
        return loss.detach()

    @_disable_dynamo
    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale, for the caller's own `backward()` (instead of `engine.backward(loss)`)."""
        self.check_alive()
        self._steps.require_optimizer("scale")
        _need_scalar(
            loss, "loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)"
        )
        self._steps.scaler.announce_backward()
        return self._steps.scaler.scaled(loss)

    @_disable_dynamo
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Run the queued group, update the weights, and step the scheduler, at an accumulation boundary."""
        self.check_alive()
        if self.inside_no_sync_ctxt:
            raise UsageError("It is illegal to call Engine.step() inside no_sync context manager")
        self._steps.require_optimizer("step")
        counters = self._steps.counters
        if self._manages_accumulation() and not self.is_gradient_accumulation_boundary():
            counters.count_call()
            return
        with self._world.reporting_failures():
            step = self._steps.open
            step.handle(StepEvent.BOUNDARY, lr_kwargs or {})
            self._steps.count_step(step, lr_kwargs or {}, counters.micro_steps + 1)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have accumulated since the last step."""
        self.check_alive()
        self._steps.zero_grad()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        if not self._manages_accumulation():
            return False
        counters = self._steps.counters
        called = counters.micro_steps + 1 - counters.group_began  # train_batch may end a group early
        return called % self.gradient_accumulation_steps() == 0

    @_disable_dynamo
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary by hand; a group ends at the next `step()` at a boundary, whatever its size."""
        self.check_alive()
        if not self._manages_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False; "
                "the caller owns the boundary by calling step()"
            )
        self._boundary = is_boundary

    def _manages_accumulation(self) -> bool:
        """Return whether the engine counts micro-batches to find the boundary, as the ds_config says."""
        return bool(self._settings.now.values["managed_gradient_accumulation"])

    @_disable_dynamo
    def no_sync(self) -> AbstractContextManager[None]:
        """Refuse `step()` inside. Allowed with every ZeRO stage: gradients are exchanged once a step anyway."""
        self.check_alive()
        return self._refusing_steps()

    coalesce_grad_reduction = no_sync

    @contextmanager
    def _refusing_steps(self) -> Iterator[None]:
        """Refuse `step()` while open."""
        if self.inside_no_sync_ctxt:
            raise UsageError("no_sync context manager reentry is unsupported")
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    # ---- a group at once

    @_disable_dynamo
    def train_batch(
        self,
        data_iter: Iterator[Any] | Sequence[Any] | None = None,
        loss_fn: LossFunction | None = None,
        *,
        compute_loss: Callable[[HarmonyEngine, Any], Tensor] | None = None,
    ) -> Tensor:
        """Take an optimizer step over the next `gradient_accumulation_steps()` micro-batches of `data_iter`.

        Args:
            data_iter: yields mappings (keyword arguments), tuples (positional ones) or single arguments; a list of them
                is one step's. If it ends early, the step is taken over what it gave, and the mean is over that.
            loss_fn: from the model's outputs to a scalar (by default, the loss among them).
            compute_loss: from the engine and a micro-batch, as `data_iter` yields it but on the device, to a scalar. It
                may call the engine any number of times, with and without gradients, and look at what it gets; it must not
                call backward. It is called a few times more to measure the model.

        Returns:
            The mean loss, detached, 0-dim, on the device.

        Raises:
            StopIteration: `data_iter` is at its end.
        """
        self.check_alive()
        self._steps.require_optimizer("train_batch")
        if loss_fn is not None and compute_loss is not None:
            raise UsageError(
                "train_batch() takes loss_fn, which is given the outputs of one call, or compute_loss, which calls the "
                "engine itself: not both."
            )
        step = self._steps.open
        step.forget_out_of_reach()
        if queued := step.queued:
            way_out = (
                "call backward() and step() for them"
                if step.micro_batches_wait
                else "take their step by step() or end_group()"
            )
            raise BatchError(
                f"micro-batches of engine(...) are still queued ({queued}): {way_out} before train_batch()."
            )
        call = None if compute_loss is None else partial(compute_loss, self)
        with self._world.reporting_failures():
            batches = self._data.next_group(data_iter, whole=call is not None)
            with self._group_at_once(step):
                queued_now = [step.handle(StepEvent.CALL, batch, loss_fn, call) for batch in batches]
                losses = self._propagate_losses(queued_now, divisor=len(batches))
                step.handle(StepEvent.BOUNDARY, {})
                self._steps.count_step(step, {}, self._steps.counters.micro_steps + len(batches))
            loss = self._world.mean(torch.stack([loss.node.materialize().detach() for loss in losses]).mean())
        self._log.write_loss("train_loss", loss, self.global_samples)
        return loss

    @_disable_dynamo
    def train_group(
        self,
        batches: Sequence[Any],
        loss_fn: LossFunction,
        profiling_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        boundary: bool = True,
    ) -> list[Tensor]:
        """Take an optimizer step over `batches`, whose losses `loss_fn(batch)` computes with its own calls of the model.

        Args:
            batches: one for each micro-batch, however many.
            loss_fn: from a batch, on the device, to the scalar to propagate back from; the gradients are those of the sum.
                It runs in a greenlet for each micro-batch, on the caller's thread, where the calls of several micro-batches
                take turns; and a few times more to measure the model. It may call `engine.module` any number of times,
                with and without gradients, and must not call backward.
            profiling_context: makes the context that measuring runs in, which may undo side effects of `loss_fn`.
            boundary: without it nothing is updated, and the gradients are part of the next step (one process alone).

        Returns:
            The losses, detached, 0-dim, on the device.
        """
        self.check_alive()
        self._steps.require_optimizer("train_group")
        step, counters = self._steps.open, self._steps.counters
        queued = step.queued if step.micro_batches_wait else 0
        if queued or not batches:
            raise BatchError(
                f"train_group() takes one or more micro-batches (here {len(batches)}) while none is queued (here {queued})."
            )
        if not boundary:
            self._world.refuse(
                "a group that ends without a step (a Trainer's data of unknown length that end within one, or a callback's "
                "on_pre_optimizer_step)"
            )
        given = [CallInputs((batch,), {}) for batch in batches]
        with self._world.reporting_failures(), self._group_at_once(step):
            queued_now = [step.handle(StepEvent.CALL, one, None, loss_fn, profiling_context) for one in given]
            losses = self._propagate_losses(queued_now, divisor=1)
            if boundary:
                step.handle(StepEvent.BOUNDARY, {})
                self._steps.count_step(step, {}, counters.micro_steps + len(given))
            else:
                step.handle(StepEvent.READ_GRADIENT)
                counters.begin_group(counters.micro_steps + len(given))
        return [loss.node.materialize().detach() for loss in losses]

    @_disable_dynamo
    def end_group(self, *, clip: bool = True) -> None:
        """Take the optimizer step over the gradients that `train_group(..., boundary=False)` has left.

        Args:
            clip: whether gradients are clipped as the ds_config says; False: the program has done it.
        """
        self.check_alive()
        with self._world.reporting_failures():
            step = self._steps.open
            step.handle(StepEvent.BOUNDARY, {}, clip)
            self._steps.count_step(step, {}, self._steps.counters.micro_steps)

    @contextmanager
    def _group_at_once(self, step: Step) -> Iterator[None]:
        """Queue micro-batches for `step`, and run them, in this context; an error drops the step."""
        self._steps.context.apply_user_edits(step.micro_batches_wait)
        try:
            yield
        except BaseException:
            if step.is_open:
                step.handle(StepEvent.CALLER_FAILED)
            raise

    def _propagate_losses(self, queued: list[PendingMicroBatch], *, divisor: int) -> list[PendingTensor]:
        """Note that the step propagates back from the losses of micro-batches, each over `divisor`; return the losses."""
        with self._steps.scaler.backward(), divided():
            return [pending.note_backward_from_own_loss(divisor, self._steps.scaler.scale) for pending in queued]

    # ---- without gradients

    @_disable_dynamo
    @torch.inference_mode(False)  # the model may be measured, with gradients
    def eval_batch(self, data_iter: Iterator[Any] | Sequence[Any], loss_fn: LossFunction | None = None) -> Tensor:
        """Return the mean loss over the next `gradient_accumulation_steps()` micro-batches, without gradients.

        The model is in evaluation mode meanwhile; every pack is swapped in once for all of them.
        """
        self.check_alive()
        modes = [(module, module.training) for module in self.module.modules()]
        with self._world.reporting_failures():
            batches = self._data.next_group(data_iter)
            try:
                self.module.eval()
                self._state.runtime.updater.wait_all()
                losses = self._steps.evaluate(batches, loss_fn)
            finally:
                for module, mode in modes:  # some may be frozen: `train()` would not leave them so
                    module.training = mode
            loss = self._world.mean(torch.stack(losses).mean())
        self._log.write_loss("eval_loss", loss, self.global_samples)
        return loss

    @_disable_dynamo
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate`, its weights streamed layer by layer."""
        self.check_alive()
        with self.streaming():
            return self._steps.context.model_calls.run(self.module.generate, CallInputs(args, kwargs))  # type: ignore[arg-type]

    @_disable_dynamo
    def streaming(self) -> AbstractContextManager[None]:
        """Open a context to call the model's methods in, without gradients, under the device memory budget."""
        self.check_alive()
        return self._streamed()

    @contextmanager
    def _streamed(self) -> Iterator[None]:
        """Stream the weights of layers that are called while open."""
        self._steps.before_evaluation()
        with self._state.ledger.beside(), self._state.streaming():
            yield

    # ---- counters, and the last step

    @property
    def global_steps(self) -> int:
        """The optimizer steps taken, skipped ones included."""
        return self._steps.counters.global_steps

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self._steps.counters.global_steps = count

    @property
    def global_samples(self) -> int:
        """The samples trained on, of all processes."""
        return self._steps.counters.global_samples

    @global_samples.setter
    def global_samples(self, count: int) -> None:
        self._steps.counters.global_samples = count

    @property
    def micro_steps(self) -> int:
        """The calls of `step()`, at a boundary or not."""
        return self._steps.counters.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self._steps.counters.micro_steps = count

    @property
    def skipped_steps(self) -> int:
        """The optimizer steps that were skipped for inf or NaN in their gradients."""
        return self._steps.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._steps.skipped_steps = count

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the weights: not without a boundary, or with an overflow."""
        return self._steps.was_step_applied()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step, before clipping, unscaled; None before the first."""
        return self._steps.get_global_grad_norm()

    # ---- optimizer, learning rates, loss scale

    @property
    def optimizer(self) -> Any:
        """The optimizer under DeepSpeed's names; None without one."""
        return self._steps.context.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._steps.context.optimizer = optimizer

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer inside `engine.optimizer`."""
        return self._state.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The user's scheduler, else the ds_config's, else None."""
        return self._steps.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._steps.lr_scheduler = scheduler

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self._steps.get_lr()

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        return self._steps.get_mom()

    def get_type(self) -> list[Any]:
        """Return the "type" of each parameter group."""
        return self._steps.get_type()

    @property
    def cur_scale(self) -> float:
        """The factor that losses are multiplied with now (1.0 without fp16)."""
        return self._steps.scaler.scale

    # ---- settings; `__getattr__` has the others of DeepSpeed's

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches in a group."""
        return self._settings.gradient_accumulation_steps()

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples in a micro-batch."""
        return self._settings.train_micro_batch_size_per_gpu()

    def train_batch_size(self) -> int:
        """Return the samples in a group, of all processes."""
        return self._settings.train_batch_size()

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return batch size, micro-batch size, accumulation steps."""
        return self._settings.get_batch_info()

    @_disable_dynamo
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches in a group.

        Raises:
            ConfigError: `train_batch_size` is no multiple of the micro-batch size.
        """
        self.check_alive()
        self._settings.set_train_batch_size(train_batch_size)

    @_disable_dynamo
    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of micro-batches, and of batches with it."""
        self.check_alive()
        self._settings.set_train_micro_batch_size(micro_batch_size)

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank among all that train the model; loaders share out their data by it."""
        return self._settings.get_data_parallel_rank()

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype that layers compute in, and the one that gradients are added up in."""
        return self._settings.get_data_types()

    @property
    def data_parallel_group(self) -> Any:
        """The process group of all processes that train the model.

        It is not kept: the threads of a process group must not outlive the program.
        """
        return torch.distributed.group.WORLD

    @property
    def seq_data_parallel_group(self) -> Any:
        """The process group of all processes that train the model."""
        return torch.distributed.group.WORLD

    @property
    def config(self) -> dict[str, Any]:
        """The ds_config as it was given."""
        return self._settings.now.raw

    @property
    def _config(self) -> Any:
        """DeepSpeed's own view of the ds_config."""
        return self._settings._config

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    # ---- data

    @property
    def training_data(self) -> Any:
        """The dataset that was given to `initialize`."""
        return self._data.training_data

    @training_data.setter
    def training_data(self, dataset: Any) -> None:
        self._data.training_data = dataset

    @property
    def training_dataloader(self) -> Any:
        """The loader that `train_batch()` takes micro-batches from without an iterator; None without one."""
        return self._data.training_dataloader

    @training_dataloader.setter
    def training_dataloader(self, loader: Any) -> None:
        self._data.training_dataloader = loader

    @property
    def collate_fn(self) -> Callable[[Any], Any] | None:
        """The function that makes a micro-batch of samples; None: torch's own."""
        return self._data.collate_fn

    @collate_fn.setter
    def collate_fn(self, collate_fn: Callable[[Any], Any] | None) -> None:
        self._data.collate_fn = collate_fn

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of `dataset`: shuffled as DeepSpeed does for `route` "train", in order for "eval", "predict".

        Args:
            pin_memory: accepted for DeepSpeed's sake: inputs are copied to the device once, and a step is long.

        Raises:
            ValueError: `dataset` is no torch Dataset.
        """
        return self._data.make_loader(dataset, batch_size, route, data_sampler, collate_fn, num_local_io_workers)

    def set_dataloader(self, loader: Any) -> None:
        """Take micro-batches for `train_batch()` without an iterator from `loader`, epoch after epoch."""
        self._data.set_dataloader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches for `train_batch()` without an iterator from `iterator`, until it ends."""
        self._data.set_dataiterator(iterator)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Set the function that the training data loader applies to each batch."""
        self._data.set_data_post_process_func(post_process_func)

    # ---- checkpoints and weights

    @_disable_dynamo
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything the run goes on from, as `save_dir`/`tag`; a kill on the way leaves the checkpoints before.

        Args:
            tag: the folder's name ("global_step<N>").
            client_state: what `load_checkpoint` gives back: plain data and tensors.
            save_latest: make it the one that is loaded by default.
            exclude_frozen_parameters: leave parameters out that are not trained.

        Raises:
            CheckpointError: it cannot be written, or `client_state` holds something else.
        """
        self.check_alive()
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        folder = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._checkpoints.save(
            Path(save_dir), folder, client_state, save_latest=save_latest, exclude_frozen=exclude_frozen_parameters
        )
        return True

    @_disable_dynamo
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint: harmony_ds's own, or one of DeepSpeed's (ZeRO-0 to 3, universal).

        Returns:
            The checkpoint's folder and the client state; (None, None) if no tag is given and there is no `latest`.

        Raises:
            CheckpointError: it is torn, foreign, or of another model or optimizer; the engine is as it was.
        """
        self.check_alive()
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
        )
        return self._checkpoints.load(Path(load_dir), tag, options)

    @_disable_dynamo
    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights alone, in the dtype of compute: by `torch.save`, or as safetensors by the file's suffix.

        Raises:
            CheckpointError: it cannot be written, or frozen weights that would be in it are quantized.
        """
        self.check_alive()
        self._checkpoints.save_weights(Path(save_dir) / save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state dict."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    @_disable_dynamo
    def load_module_state_dict(
        self,
        /,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        **_: Any,
    ) -> None:
        """Load `checkpoint["module"]` into the model; masters follow."""
        self.check_alive()
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
        else:
            self.module.load_state_dict(checkpoint["module"], strict=strict)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's state dict in the dtype it computes in; Hugging Face calls it under ZeRO-3."""
        if self._settings.now.values["zero_optimization.stage"] != 3:
            raise ConfigError(
                "this function requires ZeRO-3 mode: consolidated_16bit_state_dict is only applicable to cases where "
                "weights are partitioned, including Zero Stage 3 and tensor parallelism."
            )
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    # ---- reports

    @property
    def plan(self) -> Plan | None:
        """The plan of a full group; None before the first micro-batch has been measured."""
        return self._state.planner.plan

    def swap_report(self) -> SwapReport:
        """Return the bytes between host and device in the last optimizer step; RuntimeError before the first."""
        return self._reporter.swap_report()

    def plan_report(self) -> PlanReport:
        """Return step time, device peak and bytes, predicted and measured, and the plans that were not chosen;
        RuntimeError before the first step.
        """
        return self._reporter.plan_report()

    def memory_report(self) -> MemoryReport:
        """Return the device peak of the last step, the plan's and the budget, and host bytes by kind."""
        return self._reporter.memory_report()

    @_disable_dynamo
    def record_steps(self) -> AbstractContextManager[list[ExecutedStep]]:
        """Record when each task of every optimizer step in the context ran, on each stream.

        Yields:
            A list that holds the steps, in their order, once the context has been left without an error. Leaving it
            waits for updates that are still under way.

        Raises:
            RuntimeError: steps are being recorded already.
        """
        self.check_alive()
        return self._reporter.record_steps()

    def trace(self, executed: ExecutedStep | None = None) -> dict[str, Any]:
        """Return the predicted step, and the `executed` one, as a Chrome trace: https://ui.perfetto.dev opens its JSON.

        Raises:
            RuntimeError: there is no plan yet.
        """
        return self._reporter.trace(executed)

    @_disable_dynamo
    def on_progress(self, callback: Callable[[int, int, Task], None] | None) -> None:
        """Have `callback(done, total, task)`, and no other, called after each task of a step."""
        self.check_alive()
        self._state.executor.on_progress(callback)

    @property
    def monitor(self) -> Any:
        """DeepSpeed's monitors, or one that writes nothing."""
        return self._log.monitor

    @monitor.setter
    def monitor(self, monitor: Any) -> None:
        self._log.monitor = monitor

    @property
    def tput_timer(self) -> Any:
        """DeepSpeed's timer of samples per second."""
        return self._log.throughput

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of the last step, with `wall_clock_breakdown`; `trace()` has those of every task."""
        return self._log.get_wall_clock_timers()

    # ---- device, and the end

    @property
    def device(self) -> torch.device:
        """The device that layers run on."""
        return self._state.device.torch_device

    @property
    def usable(self) -> bool:
        """False after a failure that left some layers updated and others not, and after `destroy`."""
        return self._release.alive and self._state.health.failed is None

    def to(self, *args: Any, **kwargs: Any) -> HarmonyEngine:
        """Do nothing for a device alone, since layers go there by themselves; else what torch does, such as an error for a
        device that this machine lacks.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None:
            torch.empty(0, device=device)
        return self if dtype is None else super().to(*args, **kwargs)

    def finish_updates(self) -> None:
        """Wait for pending updates, and copy resident packs to the host. Reading weights or state does so by itself."""
        self._state.finish_updates()
        self._steps.settle()

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Free the device memory that is held between steps; the next step brings its contents back."""
        self.check_alive()
        self._state.free_device()

    empty_partition_cache = offload_states

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: the next step brings states back."""
        self.check_alive()

    def destroy(self) -> None:
        """Finish updates, end threads, free memory, and give the model its own forward and plain parameters back.

        An engine without references does so by itself.

        Raises:
            BaseException: an update's failure that was not raised yet, after all of that.
        """
        self._steps.destroy()
        try:
            if self.usable:
                self._steps.settle()
        finally:
            self._release()

    def check_alive(self) -> None:
        """Raise UsageError after `destroy`."""
        self._state.health.check_alive()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Raise UnsupportedError: an engine is threads and memory."""
        raise UnsupportedError(
            "an engine cannot be copied or pickled. Its model can, at any time: copy.deepcopy(engine.module), "
            "torch.save(engine.module, ...); engine.save_checkpoint() saves what training goes on from."
        )

    # ---- compilation; and a name with nothing to do

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] = MappingProxyType({}),
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile layers one by one; code between them stays as it is. A second call changes nothing.

        Args:
            backend: as `torch.compile` takes it.
            compile_kwargs: further arguments of `torch.compile`.
            schedule: must be None: DeepCompile's passes are of whole models.
            compiled_autograd_enabled: must be False.

        Raises:
            UnsupportedError: it asks for CUDA graphs, for passes of DeepCompile, or for compiled autograd.
        """
        self.check_alive()
        graphs = (compile_kwargs.get("options") or {}).get("triton.cudagraphs")
        if backend == "cudagraphs" or compile_kwargs.get("mode") in ("reduce-overhead", "max-autotune") or graphs:
            raise UnsupportedError(
                f"engine.compile() with backend {backend!r} and {dict(compile_kwargs)} records CUDA graphs, whose inputs "
                "stay at their addresses: layers run on copies that come and go."
            )
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError(
                "engine.compile() compiles layers one by one: a schedule of DeepCompile's passes and compiled autograd are "
                "of whole models. Leave schedule and compiled_autograd_enabled out."
            )
        if not self.is_compiled:
            self.is_compiled = True
            self._state.interception.compile(partial(torch.compile, **{**compile_kwargs, "backend": backend}))

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are reduced in `step()`."""


def _need_scalar(loss: object, message: str) -> None:
    """Raise UsageError unless `loss` is a tensor of one number."""
    if loss is None:
        raise UsageError("the loss is None. Models of transformers return a loss where the batch has labels.")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(message)
