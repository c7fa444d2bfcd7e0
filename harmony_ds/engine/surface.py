"""What DeepSpeed's engine offers beside forward, backward and step: modes, rates, batch sizes, states, loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import nn

from harmony_ds.engine.settings import Settings
from harmony_ds.errors import BatchError, ConfigError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from harmony_ds.assembly import Assembly
    from harmony_ds.engine.reporting import StepReports
    from harmony_ds.loss_scaling import LossScaler
    from harmony_ds.parameters import ParameterLinks


class Surface(Settings, nn.Module):
    """Methods and attributes under DeepSpeed's names."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    training_dataloader: Any
    collate_fn: Callable[[Any], Any] | None
    _assembly: Assembly
    _scaler: LossScaler
    _reports: StepReports
    _applied: bool
    _inside_no_sync: bool
    _links: ParameterLinks
    global_steps: int
    _own_batches: Iterator[Any] | None

    # Several processes: see HarmonyEngine.__init__.
    local_rank = global_rank = 0
    world_size = dp_world_size = mp_world_size = seq_dp_world_size = sequence_parallel_size = 1
    has_moe_layers = pipeline_parallelism = is_compiled = False

    # ---- modes

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        """Sets the model's mode."""
        self.training = mode
        if "module" in self._modules:
            self.module.train(mode)

    def eval(self) -> None:  # type: ignore[override]
        """Sets the model's mode."""
        self.train(False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """One process has nothing to synchronize: allowed with every ZeRO stage. `step()` is not allowed inside."""
        if self._inside_no_sync:
            raise UsageError("no_sync context manager reentry is unsupported")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def coalesce_grad_reduction(self) -> Any:
        """Gradients of a group are swapped out once anyway; as `no_sync`."""
        return self.no_sync()

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether a `no_sync` context is open."""
        return self._inside_no_sync

    # ---- learning rates and loss scale

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each parameter group."""
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def get_type(self) -> list[Any]:
        """The "type" of each parameter group."""
        return self._of_groups("type")

    def _of_groups(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; DeepSpeed wraps it, and this engine does not."""
        return self.optimizer

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied with now (1.0 without fp16)."""
        return self._scaler.scale

    def _tell_optimizer(self) -> None:
        """Keeps what scripts read from DeepSpeed's optimizer wrapper on the optimizer itself."""
        if self.optimizer is None:
            return
        told = {
            "overflow": self.global_steps > 0 and not self._applied,
            "cur_scale": self.cur_scale,
            "loss_scale": self.cur_scale,
            "dynamic_loss_scale": self._settings.values["fp16.enabled"] and self.dynamic_loss_scale(),
        }
        for name, value in told.items():
            setattr(self.optimizer, name, value)

    # ---- batch sizes

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches in a group.

        Raises:
            ConfigError: `train_batch_size` is no multiple of the micro-batch size.
        """
        micro_batch = self._settings.micro_batch
        if train_batch_size <= 0 or train_batch_size % (micro_batch * self.world_size):
            raise ConfigError(
                "Train batch size must be divisible by micro-batch data parallelism: "
                f"{train_batch_size} is no multiple of {micro_batch} * {self.world_size}"
            )
        self._resize(micro_batch, train_batch_size // (micro_batch * self.world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the size of micro-batches, and of batches with it."""
        if micro_batch_size <= 0:
            raise ConfigError(f"Micro batch size per gpu: {micro_batch_size} has to be greater than 0")
        self._resize(micro_batch_size, self._settings.gradient_accumulation_steps)

    def _resize(self, micro_batch: int, steps: int) -> None:
        self._settings = dataclasses.replace(
            self._settings,
            micro_batch=micro_batch,
            gradient_accumulation_steps=steps,
            train_batch_size=micro_batch * steps * self.world_size,
        )

    # ---- data

    def deepspeed_io(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of `dataset`: shuffled as DeepSpeed does for `route` "train", in order for "eval" and "predict".

        Raises:
            ValueError: `dataset` is no torch Dataset.
        """
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) and not hasattr(dataset, "__iter__"):
            raise ValueError("Training data must be a torch Dataset")
        if data_sampler is None and route in ("eval", "predict"):
            data_sampler = self._in_order(dataset)
        from deepspeed.runtime.dataloader import DeepSpeedDataLoader  # its order of samples depends on its own seed

        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=self._settings.micro_batch if batch_size is None else batch_size,
            pin_memory=False,  # inputs are copied once, and a step is long
            local_rank=self.local_rank,
            tput_timer=None,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers or 0,  # or they would be forked beside the update's thread
            data_sampler=data_sampler,
            data_parallel_world_size=self.world_size,
            data_parallel_rank=self.global_rank,
            dataloader_drop_last=self._settings.values["dataloader_drop_last"],
        )

    def _in_order(self, dataset: Any) -> torch.utils.data.Sampler[int]:
        if self.world_size == 1:
            return torch.utils.data.SequentialSampler(dataset)
        return torch.utils.data.DistributedSampler(dataset, self.world_size, self.global_rank, shuffle=False)

    def set_dataloader(self, loader: Any) -> None:
        """What `train_batch()` without an iterator takes its micro-batches from, over and over."""
        self.training_dataloader, self._own_batches = loader, None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch()` without an iterator takes its micro-batches from, until it ends."""
        self._own_batches = iterator

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Handed on to the training data loader."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    def _training_batches(self) -> Iterator[Any]:
        if self._own_batches is None:
            if self.training_dataloader is None:
                raise BatchError(
                    "train_batch and eval_batch need an iterator over micro-batches, or training_data at initialize."
                )
            self._own_batches = _repeated(self.training_dataloader)
        return self._own_batches

    # ---- weights

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        **_: Any,
    ) -> None:
        """Loads `checkpoint["module"]` into the model; masters follow."""
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
            self._links.take_over()
        else:
            self.module.load_state_dict(checkpoint["module"], strict=strict)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        if not self.zero_optimization_partition_weights():
            raise ConfigError(
                "consolidated_16bit_state_dict is only applicable to cases where weights are partitioned, including Zero "
                "Stage 3 and tensor parallelism."
            )
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state dict, in the dtype it computes in; Hugging Face asks for it under stage 3."""
        if not self.zero_optimization_partition_weights():
            raise ConfigError("this function requires ZeRO-3 mode")
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    # ---- what is on the device

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Frees the device of everything that stays there between steps; the next step brings it back."""
        self._assembly.finish_updates()
        self._assembly.parts.device_store.drop()

    def reload_states(self, non_blocking: bool = False) -> None:
        """The next step brings states back by itself."""

    def empty_partition_cache(self) -> None:
        """As `offload_states`."""
        self.offload_states()

    # ---- reports

    @property
    def monitor(self) -> Any:
        """DeepSpeed's monitor, or one that writes nothing."""
        return self._reports.monitor

    @property
    def tput_timer(self) -> Any:
        """Samples per second."""
        return self._reports.throughput

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step, with `wall_clock_breakdown`."""
        return dict(self._reports.times.last)

    # ---- not there

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refused: an engine is threads and memory.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "an engine cannot be copied or pickled. Its model can, at any time: copy.deepcopy(engine.module), "
            "torch.save(engine.module, ...); engine.save_checkpoint() saves what training goes on from."
        )

    def compile(self, *_: Any, **__: Any) -> None:
        """Refused: layers are called with device copies of their parameters, which a compiled model would not see.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "engine.compile() is not supported: the engine runs the model layer by layer with copies of its weights. "
            "Compile functions inside the layers with torch.compile before initialize."
        )

    def is_deepcompile_enabled(self) -> bool:
        """No."""
        return False

    is_deepcompile_active = is_deepcompile_enabled

    def clip_fp32_gradients(self) -> None:
        """Gradients are clipped inside `step()`, by `gradient_clipping`."""

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """One process has nobody to reduce with."""


def _repeated(loader: Any) -> Iterator[Any]:
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch
    raise BatchError("the training data loader is empty.")
