"""The DeepSpeed face of harmony_ds: `initialize`, forward, backward, step. No arithmetic and no policy of its own."""

from __future__ import annotations

import argparse
import inspect
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds import checkpoint
from harmony_ds.assembly import Assembly, assemble
from harmony_ds.config import Config, load_config
from harmony_ds.device import Device
from harmony_ds.errors import BatchError, CheckpointError, ConfigError, OptimizerError
from harmony_ds.loss_scaling import LossScaler
from harmony_ds.offload.ledger import Kind, Traffic
from harmony_ds.offload.optimizers import ClientOptimizer, ParameterGroups
from harmony_ds.offload.updater import Clipping, GradientNorm
from harmony_ds.reports import MemoryReport, PlanReport, SwapReport
from harmony_ds.runtime.group import GroupParts, OutputKinds, StepGroup
from harmony_ds.runtime.pending import PendingLoss
from harmony_ds.scheduler.bounds import lower_bound_bytes, zero3_offload_bytes
from harmony_ds.scheduler.plan import Plan
from harmony_ds.schedules import build_scheduler

_logger = logging.getLogger(__name__)

LossFunction = Callable[[Any], Tensor]
_STEPS_KEPT = 32


def initialize(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: ParameterGroups | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,  # noqa: ARG001
    mpu: Any = None,  # noqa: ARG001
    dist_init_required: bool | None = None,  # noqa: ARG001
    collate_fn: Callable[[Any], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,  # noqa: ARG001
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    device: Device | None = None,
) -> tuple[HarmonyEngine, torch.optim.Optimizer | None, Any, Any]:
    """Wraps `model` for training; the signature and the result are those of `deepspeed.initialize`.

    Args:
        args: may carry the path of a ds_config in `deepspeed_config`.
        model: any `nn.Module`, in host memory.
        optimizer: an optimizer over the model's parameters, or a callable that makes one; overrides the ds_config's.
        model_parameters: parameters or parameter groups to train (all that require gradients).
        training_data: a dataset; the third result is a DataLoader over it with the ds_config's micro-batch size.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer; overrides the ds_config's.
        config, config_params: the ds_config: a dict or a path.
        device: an explicit device, instead of the ds_config's.
        distributed_port, mpu, dist_init_required, mesh_param: accepted for DeepSpeed's sake; one process is used.

    Returns:
        engine, optimizer, training data loader (or None), learning-rate scheduler (or None).

    Raises:
        ConfigError: the ds_config cannot be meant.
        CompilerMissingError: the ds_config's optimizer has to be compiled and cannot be.
        ModelError: the model cannot be decomposed.
    """
    if model is None:
        raise ConfigError("harmony_ds.initialize requires a model")
    settings = load_config(_the_one_config(args, config if config is not None else config_params))
    if settings.without_meaning:
        _logger.warning("ds_config keys that mean nothing to harmony_ds: %s", ", ".join(settings.without_meaning))
    assembly = assemble(model, settings, optimizer, model_parameters, device)
    engine = HarmonyEngine(model, settings, assembly, lr_scheduler)
    loader = None
    if training_data is not None:
        loader = checkpoint.ResumableLoader(
            torch.utils.data.DataLoader(
                training_data, batch_size=settings.micro_batch, shuffle=True, collate_fn=collate_fn
            )
        )
        engine.training_dataloader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _the_one_config(args: object, config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | str | Path:
    named = getattr(args, "deepspeed_config", None)
    if named is not None and config is not None:
        raise ConfigError(
            "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and "
            "initialize() function call"
        )
    chosen = config if config is not None else named
    if chosen is None:
        raise ConfigError("harmony_ds requires a ds_config: pass config=..., or --deepspeed_config in args")
    return chosen


class HarmonyEngine(nn.Module):
    """Trains one model. Unknown attributes are looked up in the model."""

    def __init__(self, model: nn.Module, config: Config, assembly: Assembly, lr_scheduler: Any) -> None:
        super().__init__()
        self.module = model
        self._settings = config
        self._assembly = assembly
        self._runner = assembly.runner
        self.optimizer = assembly.optimizer
        self.lr_scheduler = build_scheduler(config.scheduler, lr_scheduler, self.optimizer)
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._group_began = 0  # micro_steps when the group that is queued now began
        self._boundary: bool | None = None
        self._applied = False
        self._norm: Future[GradientNorm] | None = None
        self._traffic: Traffic | None = None
        self._traffic_micro_batches = 0
        self._peak_bytes = 0
        self._step_ms: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._timed_plan: Plan | None = None  # the plan that `_step_ms` is of
        self._looked_early = False
        self._scaler = LossScaler(config.loss_scale)
        seed = config.harmony.seed
        self._group_parts = GroupParts(
            model,
            assembly.device,
            assembly.ledger,
            assembly.runner,
            OutputKinds(),
            torch.initial_seed() if seed is None else seed,
            self._warn_about_looking,
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
        if not torch.is_grad_enabled():
            with self.streaming():
                return self.module(*self._group.on_device(args), **self._group.on_device(kwargs))
        return self._group.add(args, kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Propagates back from `loss`, or notes that the group has to when it runs.

        Returns:
            The loss divided by the number of accumulation steps (unless not `scale_wrt_gas`).
        """
        self._need_optimizer()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise BatchError(
                "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors"
            )
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = loss if self._scaler.scale == 1.0 else loss * self._scaler.scale
        if isinstance(scaled, PendingLoss):
            scaled.propagate()
        else:
            torch.autograd.backward(scaled, retain_graph=retain_graph)
        return loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary: runs the queued group, updates the weights, steps the scheduler."""
        self._need_optimizer()
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            try:
                self._optimizer_step(lr_kwargs or {})
            except BaseException:
                self.micro_steps = self._group_began  # the loop may hand the group over again
                raise
            self._group_began = self.micro_steps + 1
        self.micro_steps += 1

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None) -> Tensor:
        """One optimizer step over the next `gradient_accumulation_steps()` micro-batches of `data_iter`.

        Args:
            data_iter: yields mappings (keyword arguments), tuples (positional ones) or single arguments. If it ends
                early, the step is taken over what it gave, and the mean is over that.
            loss_fn: from the model's outputs to a scalar (by default, the loss among them).

        Returns:
            The mean loss, detached, 0-dim, on the device.

        Raises:
            StopIteration: `data_iter` is at its end.
        """
        self._need_optimizer()
        if self._group:
            raise BatchError(
                f"{len(self._group)} micro-batches of engine(...) are still queued: call backward() and step() for "
                "them before train_batch()."
            )
        batches = self._take(data_iter)
        try:
            queued = [self._group.queue(*_arguments(batch), loss_fn) for batch in batches]
            scale = self._scaler.scale
            for micro_batch in queued:
                micro_batch.backward_from_loss(len(batches), scale)
            self._optimizer_step({})
        except BaseException:
            self._group = self._new_group()
            raise
        self.micro_steps += len(batches)
        self._group_began = self.micro_steps
        return torch.stack([micro_batch.loss(attached=False) for micro_batch in queued]).mean()

    def eval_batch(self, data_iter: Iterator[Any], loss_fn: LossFunction | None = None) -> Tensor:
        """The mean loss over the next `gradient_accumulation_steps()` micro-batches, without gradients.

        The model is in evaluation mode meanwhile; every pack is swapped in once for all of them.
        """
        batches = self._take(data_iter)
        training = self.module.training
        self.module.eval()
        self._assembly.wait_for_updates()
        try:
            losses = self._group.evaluate([(*_arguments(batch), loss_fn) for batch in batches])
        finally:
            self.module.train(training)
        return torch.stack(losses).mean()

    def _take(self, data_iter: Iterator[Any] | None) -> list[Any]:
        if data_iter is None:
            raise BatchError("train_batch and eval_batch need an iterator over micro-batches.")
        batches = []
        for _ in range(self.gradient_accumulation_steps()):
            try:
                batches.append(next(data_iter))
            except StopIteration:
                break
        if not batches:
            raise StopIteration("the data iterator is at its end")
        return batches

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        assembly, executor = self._assembly, self._runner.executor
        assert assembly.host_optimizer is not None
        group, count = self._group, len(self._group)
        assembly.device.reset_peak()
        clipping = None
        if self._settings.deferred_update:
            clipping = Clipping(
                self._settings.gradient_clipping, self._scaler.scale, self._settings.loss_scale is not None
            )
        begin = time.perf_counter()
        try:
            ran = group.run(assembly.host_optimizer.hyper(), clipping)
        finally:
            self._group = self._new_group()
        self._note_time((time.perf_counter() - begin) * 1e3, full=count == self.gradient_accumulation_steps())
        self._peak_bytes = assembly.device.peak_bytes()
        self._traffic = assembly.ledger.close()
        self._traffic_micro_batches = count
        self._boundary_passed(ran and executor.overflow, executor.norm if ran else None, lr_kwargs)

    def _note_time(self, step_ms: float, full: bool) -> None:
        """Keeps the times of full steps of the present plan; the first of a plan touches memory for the first time."""
        if self._timed_plan is not self._runner.plan:
            self._timed_plan = self._runner.plan
            self._step_ms.clear()
        elif full:
            self._step_ms.append(step_ms)

    def _boundary_passed(self, overflow: bool, norm: Future[GradientNorm] | None, lr_kwargs: dict[str, Any]) -> None:
        self._norm = norm
        self._applied = not overflow
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            # torch's schedulers look for a sign that the optimizer was stepped first.
            self.optimizer._opt_called = True  # type: ignore[union-attr]
            self.lr_scheduler.step(**lr_kwargs)
        self._scaler.update(overflow)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._group = self._new_group()

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

    def _need_optimizer(self) -> None:
        if self.optimizer is None:
            raise OptimizerError(
                "must provide optimizer during init in order to use backward/step: name one in the ds_config or pass one"
            )

    # ---- accumulation boundary, in DeepSpeed's words

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides what is counted; a group ends at the next `step()` at a boundary, whatever its size."""
        self._boundary = is_boundary

    def gradient_accumulation_steps(self) -> int:
        return self._settings.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._settings.micro_batch

    def train_batch_size(self) -> int:
        return self._settings.train_batch_size

    def gradient_clipping(self) -> float:
        return self._settings.gradient_clipping

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the weights (no boundary, or an overflow: it did not)."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping, unscaled; None before the first."""
        return None if self._norm is None else self._norm.result().total

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        self._need_optimizer()
        assert self.optimizer is not None
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with (1.0 without fp16)."""
        return self._scaler.scale

    @property
    def config(self) -> dict[str, Any]:
        """The ds_config as it was given."""
        return self._settings.raw

    @property
    def device(self) -> torch.device:
        """Where layers run."""
        return self._assembly.device.torch_device

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients live for one step only; there is nothing to do between steps."""

    # ---- without gradients

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, its weights streamed layer by layer."""
        with self.streaming():
            return self.module.generate(  # type: ignore[operator]
                *self._group.on_device(args), **self._group.on_device(kwargs)
            )

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """A context in which the model's methods can be called without gradients, under the device memory budget."""
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
        """False after a failure that left some layers updated and others not."""
        updater = self._assembly.parts.updater
        return self._runner.failed is None and (updater is None or updater.failure is None)

    @property
    def plan(self) -> Plan | None:
        """The plan of a full group; None before the first micro-batch has been measured."""
        return self._runner.plan

    def on_progress(self, callback: Callable[[int, int, str], None] | None) -> None:
        """`callback(done, total, task)` is called after each task of a step."""
        self._runner.executor.on_progress = callback

    def swap_report(self) -> SwapReport:
        """Bytes between host and device in the last optimizer step.

        Raises:
            RuntimeError: there has been none.
        """
        plan = self._runner.plan
        if self._traffic is None or plan is None:
            raise RuntimeError("there has been no optimizer step yet: swap_report() speaks of the last one.")
        store = self._assembly.store
        count = self._traffic_micro_batches
        return SwapReport.of(
            self._traffic,
            lower_bound_bytes(
                plan, self._runner.graph, store.dtype.itemsize, self._settings.accumulation_dtype.itemsize
            ),
            zero3_offload_bytes(self._runner.graph, store.dtype.itemsize, count),
            count,
        )

    def plan_report(self) -> PlanReport:
        """Predicted against measured step time, device peak and bytes, and the plans that were not chosen.

        Raises:
            RuntimeError: there has been no step.
        """
        if self._traffic is None or self._runner.plan is None:
            raise RuntimeError("there has been no optimizer step yet: plan_report() compares steps with their plan.")
        swapped = sum(
            side[kind]
            for side in (self._traffic.host_to_device, self._traffic.device_to_host)
            for kind in (Kind.WEIGHTS, Kind.GRADIENTS, Kind.ACTIVATIONS)
        )
        return PlanReport(self._runner.choices, tuple(self._step_ms), self._peak_bytes, swapped)

    def memory_report(self) -> MemoryReport:
        """Device peak of the last step against the plan and the budget; host bytes by kind."""
        self._assembly.wait_for_updates()
        plan = self._runner.plan
        device = self._assembly.device
        return MemoryReport(
            device_peak_bytes=self._peak_bytes,
            planned_peak_bytes=0 if plan is None else plan.peak_bytes,
            budget_bytes=device.budget_bytes,
            host_bytes=self._assembly.host_bytes(),
            counted="plan" if device.name == "cpu" else "allocator",
        )

    # ---- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything the run goes on from, as `save_dir`/`tag`; a kill on the way leaves what was saved before.

        Args:
            tag: the folder's name ("global_step<N>").
            client_state: what `load_checkpoint` gives back: plain data and tensors.
            save_latest: make it the one that is loaded by default.
            exclude_frozen_parameters: leave parameters out that are not trained.

        Raises:
            CheckpointError: it cannot be written, or `client_state` holds something else.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        snapshot = self._captured(client_state, exclude_frozen_parameters)
        checkpoint.write(
            snapshot, Path(save_dir), f"global_step{self.global_steps}" if tag is None else str(tag), save_latest
        )
        return True

    def load_checkpoint(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes on from a checkpoint: harmony_ds's own, or one of DeepSpeed's (ZeRO-0 to 3, universal).

        Returns:
            The checkpoint's folder and the client state; (None, None) if no tag is given and there is no `latest`.

        Raises:
            CheckpointError: it is torn, foreign, or of another model or optimizer; the engine is as it was.
        """
        folder = checkpoint.find(Path(load_dir), tag)
        if folder is None:
            return None, None
        snapshot = checkpoint.read_any(folder)
        wanted = checkpoint.Wanted(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        self._runner.check_usable()
        self.finish_updates()
        try:
            checkpoint.restore(self._trained(), snapshot, wanted, str(folder))
        except CheckpointError:
            raise
        except BaseException as error:
            self._runner.failed = f"loading {folder} stopped half-way: {error!r}"
            raise
        self._go_on_from(snapshot.progress, load_module_only)
        return str(folder), snapshot.client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Saves the weights alone, in the dtype of compute: by `torch.save`, or as safetensors by the file's suffix.

        Raises:
            CheckpointError: it cannot be written.
        """
        checkpoint.save_16bit(self._captured({}, exclude_frozen_parameters), Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def _captured(self, client_state: Mapping[str, Any], exclude_frozen: bool) -> checkpoint.Snapshot:
        self._runner.check_usable()
        self._assembly.wait_for_updates()
        if self._group:
            _logger.warning(
                "%d micro-batches are queued whose step is not taken yet: the checkpoint is of the step before, and they "
                "have to be handed over again after loading it.",
                len(self._group),
            )
        progress = checkpoint.Progress(
            global_steps=self.global_steps,
            global_samples=self.global_samples,
            skipped_steps=self.skipped_steps,
            micro_steps=self._group_began,
            accumulation=self.gradient_accumulation_steps(),
            seed=self._group_parts.seed,
            loss_scaler=self._scaler.state_dict(),
        )
        plan = self._runner.plan
        plan_text = None if plan is None else plan.to_json()
        return checkpoint.capture(self._trained(), progress, dict(client_state), plan_text, exclude_frozen)

    def _trained(self) -> checkpoint.Trained:
        parts = self._assembly
        loader = self.training_dataloader
        return checkpoint.Trained(
            self.module,
            parts.store,
            parts.device,
            parts.parts.device_store,
            parts.host_optimizer,
            self.lr_scheduler,
            loader if isinstance(loader, checkpoint.ResumableLoader) else None,
            len(self._group),
        )

    def _go_on_from(self, progress: checkpoint.Progress, module_only: bool) -> None:
        self._group.abandon()
        self._norm, self._applied = None, False
        if not module_only:
            self.global_steps = progress.global_steps
            self.global_samples = progress.global_samples
            self.skipped_steps = progress.skipped_steps
            self.micro_steps = progress.micro_steps_with(self.gradient_accumulation_steps())
            self._scaler.load_state_dict(progress.loss_scaler)
            if self._settings.harmony.seed is None and progress.seed is not None:
                self._group_parts = replace(self._group_parts, seed=progress.seed)
        else:
            self.micro_steps = self._group_began
        self._group_began = self.micro_steps
        self._group = self._new_group()

    def destroy(self) -> None:
        """Finishes updates, ends threads, and gives the model its own forward back."""
        self._group.abandon()
        self._assembly.destroy()


def _users_frame() -> int:
    """The stack level, as seen from the caller of `warnings.warn`, of the innermost line that is the user's own."""
    ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}
