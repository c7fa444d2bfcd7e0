"""The engine under DeepSpeed's names: each one, and the part of the engine that answers it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch
from torch import nn

from harmony_ds.config import Config
from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.checkpoints import Checkpoints
from harmony_ds.engine.delegation import PartAttribute, delegated, delegated_alive
from harmony_ds.engine.lifetime import release
from harmony_ds.engine.loop import Loop
from harmony_ds.engine.open_step import OpenStep
from harmony_ds.engine.settings import Settings, deepspeed_names
from harmony_ds.engine.step_log import StepLog
from harmony_ds.engine.step_record import StepRecord
from harmony_ds.engine.training import Training
from harmony_ds.engine.training_data import TrainingData
from harmony_ds.errors import UnsupportedError
from harmony_ds.runtime.executor import Executor
from harmony_ds.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class UserObjects:
    """Arguments of `initialize` beside the model, as DeepSpeed's engine shows them."""

    optimizer: Any = None
    lr_scheduler: Any = None
    training_data: Any = None
    collate_fn: Callable[[Any], Any] | None = None


class HarmonyEngine(nn.Module):
    """The engine that trains one model. Attributes that it does not have are the model's."""

    is_compiled = False

    def __init__(self, model: nn.Module, config: Config, assembly: Assembly, client: UserObjects) -> None:
        super().__init__()
        self.module = model
        self.client_optimizer, self.client_lr_scheduler = client.optimizer, client.lr_scheduler
        self._assembly = assembly
        self._runner, world = assembly.runner, assembly.world
        self._planner, self._executor = self._runner.planner, self._runner.executor
        self.local_rank, self.global_rank = world.local_rank, world.rank
        self.world_size = self.dp_world_size = self.seq_dp_world_size = world.size
        self._settings = settings = Settings(config, world)
        settings.client_optimizer = client.optimizer
        self._data = TrainingData(settings, client.training_data, client.collate_fn, world)
        self._training = training = Training(model, assembly, settings, self._data, client.lr_scheduler)
        self._log = StepLog(training)
        self._record = self._log.record
        # From here on, the model and the optimizer are the engine's.
        self._open = OpenStep(training, self._log)
        # Also for an engine that is dropped, and at exit, when the interpreter would kill the update's thread inside C++.
        self._release = weakref.finalize(self, release, self._open.links, self._open.override, assembly)
        self._loop = Loop(training, self._open, self._log)
        self._checkpoints = Checkpoints(training, self._open)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            owner = self._settings if name in deepspeed_names() else super().__getattr__("module")
            return getattr(owner, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *deepspeed_names()})  # type: ignore[no-untyped-call]

    # ---- what a training loop calls

    forward = delegated_alive("_loop", Loop.forward)
    backward = delegated_alive("_loop", Loop.backward)
    scale = delegated_alive("_loop", Loop.scale)
    step = delegated_alive("_loop", Loop.step)
    _train_batch = delegated_alive("_loop", Loop.train_batch)
    train_group = delegated_alive("_loop", Loop.train_group)
    end_group = delegated_alive("_loop", Loop.end_group)
    eval_batch = delegated_alive("_loop", Loop.eval_batch)
    generate = delegated_alive("_loop", Loop.generate)
    streaming = delegated_alive("_loop", Loop.streaming)
    is_gradient_accumulation_boundary = delegated("_loop", Loop.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = delegated_alive("_loop", Loop.set_gradient_accumulation_boundary)
    no_sync = coalesce_grad_reduction = delegated_alive("_loop", Loop.no_sync)
    inside_no_sync_ctxt = PartAttribute[bool]("_loop")
    zero_grad = delegated_alive("_open", OpenStep.zero_grad)
    was_step_applied = delegated("_training", Training.was_step_applied)
    get_global_grad_norm = delegated("_training", Training.get_global_grad_norm)
    global_steps = PartAttribute[int]("_training")
    global_samples = PartAttribute[int]("_training")
    micro_steps = PartAttribute[int]("_training")
    skipped_steps = PartAttribute[int]("_training")

    def train_batch(
        self,
        data_iter: Iterator[Any] | Sequence[Any] | None = None,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        *,
        compute_loss: Callable[[HarmonyEngine, Any], torch.Tensor] | None = None,
    ) -> torch.Tensor:
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
        return self._train_batch(data_iter, loss_fn, None if compute_loss is None else partial(compute_loss, self))

    # ---- optimizer, learning rates, loss scale

    optimizer = PartAttribute[Any]("_training")
    lr_scheduler = PartAttribute[Any]("_training")
    get_lr = delegated("_training", Training.get_lr)
    get_mom = delegated("_training", Training.get_mom)
    get_type = delegated("_training", Training.get_type)

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer inside `engine.optimizer`."""
        return self._assembly.optimizer

    @property
    def cur_scale(self) -> float:
        """The factor that losses are multiplied with now (1.0 without fp16)."""
        return self._training.scaler.scale

    # ---- settings; `__getattr__` has the others of DeepSpeed's

    gradient_accumulation_steps = delegated("_settings", Settings.gradient_accumulation_steps)
    train_micro_batch_size_per_gpu = delegated("_settings", Settings.train_micro_batch_size_per_gpu)
    train_batch_size = delegated("_settings", Settings.train_batch_size)
    get_batch_info = delegated("_settings", Settings.get_batch_info)
    set_train_batch_size = delegated_alive("_settings", Settings.set_train_batch_size)
    set_train_micro_batch_size = delegated_alive("_settings", Settings.set_train_micro_batch_size)
    get_data_parallel_rank = delegated("_settings", Settings.get_data_parallel_rank)
    get_data_types = delegated("_settings", Settings.get_data_types)
    # Not kept: the threads of a process group must not outlive the program.
    data_parallel_group = seq_data_parallel_group = property(lambda _: torch.distributed.group.WORLD)

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

    training_data = PartAttribute[Any]("_data")
    training_dataloader = PartAttribute[Any]("_data")
    collate_fn = PartAttribute["Callable[[Any], Any] | None"]("_data")
    deepspeed_io = delegated("_data", TrainingData.deepspeed_io)
    set_dataloader = delegated("_data", TrainingData.set_dataloader)
    set_dataiterator = delegated("_data", TrainingData.set_dataiterator)
    set_data_post_process_func = delegated("_data", TrainingData.set_data_post_process_func)

    # ---- checkpoints and weights

    save_checkpoint = delegated_alive("_checkpoints", Checkpoints.save_checkpoint)
    load_checkpoint = delegated_alive("_checkpoints", Checkpoints.load_checkpoint)
    save_16bit_model = delegated_alive("_checkpoints", Checkpoints.save_16bit_model)
    save_fp16_model = save_16bit_model
    module_state_dict = delegated("_checkpoints", Checkpoints.module_state_dict)
    load_module_state_dict = delegated_alive("_checkpoints", Checkpoints.load_module_state_dict)
    _consolidated_16bit_state_dict = delegated("_checkpoints", Checkpoints.consolidated_16bit_state_dict)
    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    # ---- reports

    swap_report = delegated("_record", StepRecord.swap_report)
    plan_report = delegated("_record", StepRecord.plan_report)
    memory_report = delegated("_record", StepRecord.memory_report)
    on_progress = delegated_alive("_executor", Executor.on_progress)
    record_steps = delegated_alive("_record", StepRecord.record_steps)
    trace = delegated("_record", StepRecord.trace)
    get_wall_clock_timers = delegated("_log", StepLog.get_wall_clock_timers)

    @property
    def plan(self) -> Plan | None:
        """The plan of a full group; None before the first micro-batch has been measured."""
        return self._planner.plan

    monitor = PartAttribute[Any]("_log")

    @property
    def tput_timer(self) -> Any:
        """DeepSpeed's timer of samples per second."""
        return self._log.throughput

    # ---- device, and the end

    @property
    def device(self) -> torch.device:
        """The device that layers run on."""
        return self._assembly.device.torch_device

    @property
    def usable(self) -> bool:
        """False after a failure that left some layers updated and others not, and after `destroy`."""
        return self._release.alive and self._runner.failed is None

    def to(self, *args: Any, **kwargs: Any) -> HarmonyEngine:
        """Do nothing for a device alone, since layers go there by themselves; else what torch does."""
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return self if dtype is None else super().to(*args, **kwargs)

    def finish_updates(self) -> None:
        """Wait for pending updates, and copy resident packs to the host. Reading weights or state does so by itself."""
        self._assembly.finish_updates()
        self._training.settle()

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Free the device memory that is held between steps; the next step brings its contents back."""
        self.check_alive()
        self._runner.make_room()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: the next step brings states back."""
        self.check_alive()

    empty_partition_cache = offload_states

    def destroy(self) -> None:
        """Finish updates, end threads, free memory, and give the model its own forward and plain parameters back.

        An engine without references does so by itself.

        Raises:
            BaseException: an update's failure that was not raised yet, after all of that.
        """
        self._open.discard()
        try:
            if self.usable:
                self._training.settle()
        finally:
            self._release()

    def check_alive(self) -> None:
        """Raise UsageError after `destroy`."""
        self._runner.check_alive()

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
            backend, compile_kwargs: as `torch.compile` takes them.

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
            self._assembly.interception.compile(partial(torch.compile, **{**compile_kwargs, "backend": backend}))

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are reduced in `step()`."""
