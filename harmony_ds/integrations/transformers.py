"""Train by Hugging Face's Trainer over harmony_ds: `class MyTrainer(HarmonyMixin, AnyTrainer)`, or `HarmonyTrainer`.

    Trainer                           engine
    get_batch_samples                 -> the group is remembered
    training_step of its first batch  -> _prepare_inputs of every micro-batch, if it is not Hugging Face's own
                                         train_group: every micro-batch's own training_step, up to its backward
    training_step of the others       -> returns their losses
    clip, optimizer.step              -> done already: returns the norm

If the data of an epoch end in the middle of a group (data without a length), the Trainer takes that step in the next epoch.
These micro-batches wait and run then, with that step's own; their losses are added to the Trainer's sum before it is read.

So what a Trainer subclass does in `compute_loss` or `training_step` runs unchanged, once for each micro-batch. Weights
are new from the group's first `training_step` on, not from `optimizer.step`; unless a callback has an
`on_pre_optimizer_step`, which finds the gradients and the weights as they were: the update waits for `optimizer.step` then.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.state import GradientState
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.trainer import _is_peft_model
from transformers.training_args import OptimizerNames

from harmony_ds.config import dtype_of_checkpoint, trained_dtypes
from harmony_ds.config.check import MICRO_BATCH
from harmony_ds.config.read import read_config
from harmony_ds.engine import HarmonyEngine, initialize
from harmony_ds.errors import DoesNotFitError, UnsupportedError, UsageError
from harmony_ds.model.patching import Item, patched

_logger = logging.getLogger(__name__)
_losses: ContextVar[list[Tensor]] = ContextVar("losses of the micro-batch whose training_step runs")
_is_last: ContextVar[bool | None] = ContextVar("whether a micro-batch is its group's last", default=None)
_divisor: ContextVar[int | None] = ContextVar("how many micro-batches the Trainer divides a loss by", default=None)
_STEPS_IN_BACKWARD = (
    OptimizerNames.LOMO,
    OptimizerNames.ADALOMO,
    OptimizerNames.GALORE_ADAMW_LAYERWISE,
    OptimizerNames.GALORE_ADAMW_8BIT_LAYERWISE,
    OptimizerNames.GALORE_ADAFACTOR_LAYERWISE,
    OptimizerNames.APOLLO_ADAMW_LAYERWISE,
)
"""Optimizers that update a weight while the Trainer's own backward pass runs, which the engine's replaces."""


@contextmanager
def _in_words_of_arguments() -> Iterator[None]:
    """Name the size of a micro-batch as the TrainingArguments do in an error that asks for a smaller one."""
    try:
        yield
    except DoesNotFitError as error:
        error.args = (str(error).replace(MICRO_BATCH, "per_device_train_batch_size"),)
        raise


class _GradientState(GradientState):  # type: ignore[misc]
    """accelerate's gradient state, from which code in a micro-batch learns whether that is the last one of its group."""

    @property
    def sync_gradients(self) -> bool:
        last = _is_last.get()
        return bool(self.__dict__["sync_gradients"]) if last is None else last

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.__dict__["sync_gradients"] = value


_with_engines: weakref.WeakValueDictionary[int, HarmonyMixin] = weakref.WeakValueDictionary()
"""Trainers, by id: some cannot be hashed. They outlive their training: others, and transformers itself, refer to them."""


class _TrainerOptimizer(DeepSpeedOptimizerWrapper):  # type: ignore[misc]
    """The Trainer's optimizer: its `step` takes the engine's step, if that waits for callbacks to see gradients."""

    def __init__(self, optimizer: Any, step: Callable[[], None]) -> None:
        super().__init__(optimizer)
        self._step_of_trainer = weakref.WeakMethod(step)

    def step(self) -> None:
        if (step := self._step_of_trainer()) is not None:
            step()


@dataclass(frozen=True, slots=True)
class _TrainerMicroBatch:
    """Arguments of one `training_step`, and what the Trainer divides its loss by if there are no items to count."""

    batch: Any
    num_items_in_batch: Any
    divisor: int


class HarmonyMixin(Trainer):  # type: ignore[misc]
    """First base of a Trainer subclass: makes it train by harmony_ds."""

    harmony_engine: HarmonyEngine | None = None
    """The engine, for its reports; None before training or evaluation has begun."""
    optimizer: Any
    _max_steps = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        earlier = cls.__mro__[: cls.__mro__.index(HarmonyMixin)]
        before = next((one for one in earlier if issubclass(one, Trainer) and not issubclass(one, HarmonyMixin)), None)
        if before is not None:
            raise UsageError(
                f"class {cls.__name__}: HarmonyMixin comes after {before.__name__}, where it does nothing. Put it first: "
                f"class {cls.__name__}(HarmonyMixin, {before.__name__})."
            )

    def __init__(self, *args: Any, ds_config: Mapping[str, Any] | str | Path | None = None, **kwargs: Any) -> None:
        """Take the Trainer's arguments and a ds_config.

        Args:
            ds_config: a ds_config (dict or path; "auto" values are filled from the TrainingArguments). Without one,
                `TrainingArguments(deepspeed=...)`; without that, every value is "auto".
        """
        self._ds_config = None if ds_config is None else read_config(ds_config)
        self._losses: deque[Tensor] = deque()
        self._batches: list[Any] = []
        self._waiting: list[_TrainerMicroBatch] = []  # of an epoch that ended within a group
        self._ends_step = True
        self._step_waits = False  # for optimizer.step()
        super().__init__(*args, **kwargs)

    @property
    def _engine(self) -> HarmonyEngine:
        assert self.harmony_engine is not None
        return self.harmony_engine

    # ---- setup

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        if self._ds_config is None:
            self._ds_config = self._ds_config_of_arguments()
        # accelerate's own DeepSpeed stays out: the engine places weights, clips, scales and casts.
        self.args.deepspeed = self.args.deepspeed_plugin = None
        self.args._n_gpu = min(1, self.args.n_gpu)  # the engine drives those there are: no DataParallel
        theirs = super()._build_accelerator_args(**kwargs)
        return {**theirs, "deepspeed_plugin": None, "mixed_precision": "no", "device_placement": False}

    def _ds_config_of_arguments(self) -> dict[str, Any]:
        if self.args.deepspeed:
            return read_config(self.args.deepspeed)
        of_launcher = self.args.deepspeed_plugin  # which `accelerate launch --use_deepspeed` describes
        return {} if of_launcher is None else dict(of_launcher.hf_ds_config.config)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator; its backward only notes the loss that the engine propagates back from."""
        with patched([(os.environ, "ACCELERATE_USE_DEEPSPEED", "false")]):  # set by `accelerate launch --use_deepspeed`
            super().create_accelerator_and_postprocess()
        unwrap, prepare = self.accelerator.unwrap_model, self.accelerator.prepare_model

        def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return unwrap(model.module if isinstance(model, HarmonyEngine) else model, *args, **kwargs)

        def prepare_model(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
            other = evaluation_mode and model is not self.model  # a reference or reward model
            return prepare(model, other if device_placement is None else device_placement, evaluation_mode)

        self.accelerator.backward = lambda loss, **_: _losses.get().append(loss)
        self.accelerator.prepare_model = prepare_model
        self.accelerator.unwrap_model = unwrap_model
        self.accelerator.gradient_state = _GradientState()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model in host memory: the engine swaps weights in."""

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        self._max_steps = max_steps
        self._losses.clear()
        self._waiting.clear()
        if self.harmony_engine is not None and self.harmony_engine.optimizer is None:
            self._destroy_engine()
        return super()._prepare_for_training(max_steps, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the Trainer's optimizer, unless the ds_config names one.

        Raises:
            UnsupportedError: it updates weights in the Trainer's backward pass.
        """
        if self.optimizer is None and "optimizer" in (self._ds_config or {}):
            return None
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and self.args.optim in _STEPS_IN_BACKWARD:
            raise UnsupportedError(
                f'optim="{OptimizerNames(self.args.optim).value}" updates weights in the Trainer\'s own backward pass, and '
                'harmony_ds propagates back itself: use another, such as optim="adamw_torch", "adafactor" or "sgd", or '
                'name one in the ds_config ("optimizer"). Its state lies in host memory.'
            )
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the Trainer's scheduler, unless the ds_config names one."""
        if self._engine.lr_scheduler is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = DeepSpeedSchedulerWrapper(self._engine.lr_scheduler, self.optimizer)
        return self.lr_scheduler

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:
            return cast(nn.Module, self.model)
        if self.harmony_engine is None:
            self._destroy_engines_of_others()
            config = self._filled_config()
            self.harmony_engine, made, _, _ = initialize(model=self.model, optimizer=self.optimizer, config=config)
            self.optimizer = _TrainerOptimizer(made, self._take_step)
            self.optimizer._is_accelerate_prepared = True
            self.accelerator._optimizers.append(self.optimizer)
            self.accelerator._models.append(self._engine)
            _with_engines[id(self)] = self
        return self._engine

    def _destroy_engines_of_others(self) -> None:
        """Destroy the engines of trainers that are done with this model, or a part of it: SFT, then DPO."""
        mine = set(self.model.modules())
        for other in list(_with_engines.values()):
            engine = other.harmony_engine
            if engine is not None and not other.is_in_train and not mine.isdisjoint(engine.modules()):
                other._destroy_engine()

    def _filled_config(self) -> dict[str, Any]:
        """Return the ds_config with its "auto" values filled as Hugging Face fills them."""
        config = copy.deepcopy(dict(self._ds_config or {}))
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
            config.setdefault(key, "auto")
        for name, wanted in (("bf16", self.args.bf16), ("fp16", self.args.fp16)):
            if wanted:
                config.setdefault(name, {"enabled": "auto"})
        filler = hf_deepspeed.HfTrainerDeepSpeedConfig(config)
        try:
            filler.trainer_config_process(self.args)
            filler.trainer_config_finalize(self.args, self.model, self._max_steps)
        finally:
            hf_deepspeed.unset_hf_deepspeed_config()  # from_pretrained would build later models for ZeRO-3
        filled = dict(filler.config)
        self._enable_dtype_of_checkpoint(filled)
        return filled

    def _enable_dtype_of_checkpoint(self, config: dict[str, Any]) -> None:
        """Enable the dtype that the model was loaded in, as `bf16=True` does, where the ds_config leaves it open."""
        given = {name: (self._ds_config or {}).get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16")}
        is_enabled = any(
            config.get(name, {}).get("enabled", False) is True for name in ("bf16", "fp16", "torch_autocast")
        )
        loaded = dtype_of_checkpoint(trained_dtypes(self.model))
        name = "bf16" if loaded == torch.bfloat16 else "fp16"
        if loaded is None or is_enabled or given[name] != "auto":
            return
        config[name] = {**config.get(name, {}), "enabled": True}
        as_stock = ""
        if name == "bf16":
            as_stock = (
                ', or set "bf16": {"enabled": false} in the ds_config to keep all in bf16, as the stock Trainer does'
            )
        _logger.warning(
            "the parameters to train are in %s, since the model was loaded so, or the trainer has cast them (TRL's cast "
            "adapters of a quantized base): it is trained as with %s=True, which keeps fp32 masters and optimizer state. "
            "Load it with dtype=torch.float32 to compute in fp32%s.",
            loaded,
            name,
            as_stock,
        )

    def _destroy_engine(self) -> None:
        self._engine.destroy()
        self.accelerator._models = [one for one in self.accelerator._models if one is not self.harmony_engine]
        self.harmony_engine = None
        self.model_wrapped = self.model

    # ---- a step

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """The number of micro-batches that the Trainer divides a loss by: of the group that this one was fetched with."""
        divisor = _divisor.get()
        return self.__dict__["current_gradient_accumulation_steps"] if divisor is None else divisor

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, value: int) -> None:
        self.__dict__["current_gradient_accumulation_steps"] = value

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch the group's batches, and keep them for its first `training_step`."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches = list(batches)
        self._ends_step = len(self._batches) == num_batches
        self._losses.clear()
        return batches, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of one micro-batch. The first call for a group runs the whole group.

        Where data end within a group, its micro-batches wait for the next one, and the losses returned here are zero.

        Raises:
            UnsupportedError: the Trainer's training_step generates, or its _prepare_inputs counts micro-batches.
        """
        if not self._losses:
            batches, self._batches = self._batches or [inputs], []
            prepares = _prepares_inputs(type(self))
            if prepares:
                batches = self._prepared(batches)
            divisor = self.__dict__["current_gradient_accumulation_steps"]
            group = [
                _TrainerMicroBatch(dict(batch) if isinstance(batch, Mapping) else batch, num_items_in_batch, divisor)
                for batch in batches
            ]
            # A trainer that prepares its inputs counts its micro-batches in training_step, so that must run now; earlier
            # versions of transformers keep the sum of losses where it cannot be added to.
            if self._ends_step or prepares or not hasattr(self, "_tr_loss"):
                self._run_waiting_with(group)
            else:
                self._waiting.extend(group)
                self._losses.extend(torch.zeros_like(self._tr_loss) for _ in group)
        return self._losses.popleft()

    def _run_waiting_with(self, group: Sequence[_TrainerMicroBatch]) -> None:
        """Run the micro-batches of `group` after those that wait, whose losses go to the Trainer's sum."""
        waiting, self._waiting = self._waiting, []
        losses = self._run_group([*waiting, *group])
        for loss in losses[: len(waiting)]:
            self._add_to_sum(loss)
        self._losses.extend(losses[len(waiting) :])

    def _run_group(self, group: Sequence[_TrainerMicroBatch]) -> list[Tensor]:
        """Return the losses of micro-batches that run together, and take the optimizer's step if the Trainer does."""
        last = len(group) - 1 if self._ends_step else None
        returned: dict[int, Tensor] = {}

        def loss_of(one: tuple[int, _TrainerMicroBatch]) -> Tensor:
            index, micro_batch = one
            loss, returned[index] = self._run_step(micro_batch, index == last)
            return loss

        self._step_waits = self._ends_step and self._shows_gradients()
        boundary = self._ends_step and not self._step_waits
        with self._running_together(), _in_words_of_arguments():
            self._engine.train_group([*enumerate(group)], loss_of, self._without_traces, boundary=boundary)
        return [returned[index] for index in range(len(group))]

    def _add_to_sum(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch to the sum that the Trainer logs, as its own loop adds it."""
        if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
            self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += loss

    def _run_waiting(self) -> None:
        """Run the micro-batches that wait, without a step, because their losses are wanted now."""
        if self._waiting:
            self._ends_step = False
            self._run_waiting_with([])

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._run_waiting()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._run_waiting()
        return super()._finalize_training(*args, **kwargs)

    def _shows_gradients(self) -> bool:
        """Return whether a callback sees gradients before the update (transformers' own saves on SIGTERM then)."""
        nothing = TrainerCallback.on_pre_optimizer_step
        return any(type(one).on_pre_optimizer_step is not nothing for one in self.callback_handler.callbacks)

    def _take_step(self) -> None:
        if self._step_waits:
            self._step_waits = False
            self._engine.end_group(clip=False)  # they are clipped

    def _prepared(self, batches: Sequence[Any]) -> list[Any]:
        """Return each batch as the Trainer's own `_prepare_inputs` prepares it, in order; it may generate.

        The weights are those before the step, as they are in the stock order. TRL's trainers find in `_step` which
        micro-batch it is; their training_step counts it.

        Raises:
            UnsupportedError: `_prepare_inputs` counts it, so that training_step would find the last one's number.
        """
        first: int = getattr(self, "_step", 0)
        prepared = []
        self.model.train()
        with self._engine.streaming():
            for index, batch in enumerate(batches):
                self._step = first + index
                prepared.append(self._prepare_inputs(batch))
                if self._step != first + index:
                    raise UnsupportedError(
                        f"{type(self).__name__}._prepare_inputs counts micro-batches (in _step), and harmony_ds "
                        "prepares all of a step before the first runs. Use this trainer without HarmonyMixin."
                    )
        self._step = first
        return prepared

    def _running_together(self) -> AbstractContextManager[None]:
        """Refuse to generate, and prepare no inputs, while the micro-batches of a group run together."""

        def generate(*_: Any, **__: Any) -> Any:
            raise UnsupportedError(
                f"{type(self).__name__} generates in its training_step, and harmony_ds runs the micro-batches of a step "
                "together. Generate in _prepare_inputs, or use this trainer without HarmonyMixin."
            )

        instead: list[Item] = [(self.model.__dict__, "generate", generate)]
        if _prepares_inputs(type(self)):
            instead.append((self.__dict__, "_prepare_inputs", lambda batch: batch))
        return patched(instead)

    @contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Undo what `compute_loss` sets, and adds to containers (metrics, with TRL), while it is measured, unlogged."""
        kept = dict(self.__dict__)
        self.__dict__.update(_copied(kept), log=lambda *_, **__: None)
        try:
            yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(kept)

    def _run_step(self, micro_batch: _TrainerMicroBatch, last: bool) -> tuple[Tensor, Tensor]:
        """Return the loss to propagate back from, and the one to be logged, which the Trainer's training_step returns."""
        noted: list[Tensor] = []
        losses, is_last, divisor = _losses.set(noted), _is_last.set(last), _divisor.set(micro_batch.divisor)
        try:
            returned = super().training_step(self.model, micro_batch.batch, micro_batch.num_items_in_batch)
        finally:
            _losses.reset(losses)
            _is_last.reset(is_last)
            _divisor.reset(divisor)
        if len(noted) != 1:
            raise UsageError(
                f"{type(self).__name__}.training_step() called accelerator.backward {len(noted)} times, not once."
            )
        return noted[0], returned.detach()

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        """Return the norm before clipping, which the engine does; where a callback reads gradients, clip them here."""
        if not self._step_waits:
            return self._engine.get_global_grad_norm()
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        limit = self._engine.gradient_clipping()
        if limit > 0:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    # ---- evaluation

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Predict as the Trainer does, the weights streamed layer by layer."""
        if self.harmony_engine is None:
            config = {k: v for k, v in self._filled_config().items() if k not in ("optimizer", "scheduler")}
            self.harmony_engine, _, _, _ = initialize(model=self.model, config=config)
        with self._engine.streaming():
            return super().prediction_step(model, *args, **kwargs)

    # ---- checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._as_with_deepspeed():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            strict = not _is_peft_model(self.model)
            hf_deepspeed.deepspeed_load_checkpoint(self._engine, checkpoint, load_module_strict=strict)
        with self._as_with_deepspeed():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        """Load weights alone in one process; several have them once for all, and load a checkpoint together."""
        with nullcontext() if self._engine.world_size == 1 else self._as_with_deepspeed():
            super()._load_best_model()

    def _as_with_deepspeed(self) -> AbstractContextManager[None]:
        """Let the Trainer save and load by the engine; of adapters alone where there are some: the rest never changes."""
        return patched([(self.__dict__, "is_deepspeed_enabled", True)])


class HarmonyTrainer(HarmonyMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` over harmony_ds."""


def _copied(value: Any) -> Any:
    """Return a copy of a container or a tensor, and of those in a dict; other values, and a list's items, as they are."""
    if type(value) in (dict, defaultdict):
        copied = copy.copy(value)
        copied.update((key, _copied(one)) for key, one in value.items())
        return copied
    if isinstance(value, Tensor) and not value.requires_grad:
        return value.clone()
    return copy.copy(value) if type(value) in (list, deque, set) else value


def _prepares_inputs(trainer: type[Trainer]) -> bool:
    """Return whether a class other than Hugging Face's own has a `_prepare_inputs`: TRL's GRPO and RLOO generate there."""
    return not trainer._prepare_inputs.__module__.startswith("transformers.")
