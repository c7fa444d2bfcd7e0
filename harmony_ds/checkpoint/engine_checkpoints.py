"""The engine's checkpoints, saved and loaded under DeepSpeed's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harmony_ds import checkpoint
from harmony_ds.errors import CheckpointError, ConfigError
from harmony_ds.step.open_step import OpenStep
from harmony_ds.step.training import Training

_logger = logging.getLogger(__name__)


class Checkpoints:
    """Captures a training, and goes on from one that was captured."""

    def __init__(
        self, training: Training, open_step: OpenStep, data_loader: Callable[[], checkpoint.ResumableLoader | None]
    ) -> None:
        """`data_loader`: returns the engine's own loader of now, whose position is saved; None: it has none."""
        self._training, self._open, self._data_loader = training, open_step, data_loader
        self._runner, self._world = training.state.runner, training.state.world

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
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        folder = f"global_step{self._training.global_steps}" if tag is None else str(tag)

        def write() -> None:
            snapshot = self._captured(client_state, exclude_frozen_parameters)
            if snapshot.random is not None:
                snapshot = replace(snapshot, random={**snapshot.random, "others": others})
            checkpoint.write(snapshot, Path(save_dir), folder, save_latest)

        with self._world.reporting_failures():
            others = self._world.all("save a checkpoint", checkpoint.capture_random(self._training.state.device))[1:]
            self._world.first(f"save the checkpoint {folder}", write)
        return True

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
        """Goes on from a checkpoint: harmony_ds's own, or one of DeepSpeed's (ZeRO-0 to 3, universal).

        Returns:
            The checkpoint's folder and the client state; (None, None) if no tag is given and there is no `latest`.

        Raises:
            CheckpointError: it is torn, foreign, or of another model or optimizer; the engine is as it was.
        """
        wanted = checkpoint.LoadOptions(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        with self._world.reporting_failures():
            return self._load(checkpoint.find(Path(load_dir), tag), wanted)

    def _load(self, folder: Path | None, wanted: checkpoint.LoadOptions) -> tuple[str | None, dict[str, Any] | None]:
        world = self._world
        world.agree(f"load the checkpoint {None if folder is None else folder.name}")
        if folder is None:
            return None, None
        self._verify(folder)
        snapshot = checkpoint.read_any(folder)
        snapshot = replace(snapshot, random=checkpoint.random_of(snapshot.random, world.rank, world.size))
        self._runner.check_usable()
        self._training.settle()
        state = self._training.state
        state.finish_updates()
        world.agree("load")  # no process uses weights any more
        state.runtime.device_store.note_all_written()
        try:
            checkpoint.restore(self._trained(), snapshot, wanted, str(folder))
            world.agree("loaded")
        except CheckpointError:
            raise
        except BaseException as error:
            self._runner.fail(f"loading {folder} stopped half-way: {error!r}")
            raise
        self._open.group.abandon()
        if wanted.module_only:
            self._training.forget_last_step()
            self._open.renew()
        else:
            progress = snapshot.progress
            self._training.resume(
                global_steps=progress.global_steps,
                global_samples=progress.global_samples,
                skipped_steps=progress.skipped_steps,
                micro_steps=progress.micro_steps_with(self._training.settings.gradient_accumulation_steps()),
                loss_scaler=progress.loss_scaler,
            )
            self._open.renew(progress.seed)
        return str(folder), snapshot.client_state

    def _verify(self, folder: Path) -> None:
        """Have one process of each server read every byte; a complaint of any is raised in all processes."""
        complaint = None
        if self._world.is_local_first:
            try:
                checkpoint.verify(folder)
            except CheckpointError as error:
                complaint = str(error)
        for told in self._world.all("verify the checkpoint", complaint):
            if told is not None:
                raise CheckpointError(told)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights alone, in the dtype of compute: by `torch.save`, or as safetensors by the file's suffix.

        Raises:
            CheckpointError: it cannot be written.
        """
        target = Path(save_dir) / save_filename

        def write() -> None:
            snapshot = self._captured({}, exclude_frozen_parameters)
            weights = snapshot.tensors  # tied ones once, as safetensors has them
            checkpoint.write_weights(
                weights if target.suffix == ".safetensors" else snapshot.with_tied(weights), target
            )

        with self._world.reporting_failures():
            self._world.first(f"save the weights as {save_filename}", write)
        return True

    def _captured(self, client_state: Mapping[str, Any], exclude_frozen: bool) -> checkpoint.Snapshot:
        training = self._training
        self._runner.check_usable()
        training.state.runtime.updater.wait_all()
        training.settle()
        if self._open.group:
            _logger.warning(
                "micro-batches are queued (%d) whose step is not taken yet: the checkpoint is of the step before, and they "
                "have to be handed over again after loading it.",
                len(self._open.group),
            )
        else:  # what was written into weights by hand is in what is saved of their masters, too
            self._open.links.apply_user_writes()
        progress = checkpoint.Progress(
            global_steps=training.global_steps,
            global_samples=training.global_samples,
            skipped_steps=training.skipped_steps,
            micro_steps=training.group_began,
            accumulation=training.settings.gradient_accumulation_steps(),
            seed=self._open.parts.seed,
            loss_scaler=training.scaler.state_dict(),
        )
        plan = self._runner.planner.plan
        plan_text = None if plan is None else plan.to_json()
        return checkpoint.capture(self._trained(), progress, dict(client_state), plan_text, exclude_frozen)

    def _trained(self) -> checkpoint.Trained:
        state = self._training.state
        return checkpoint.Trained(
            self._training.model,
            state.store,
            state.device,
            state.runtime.device_store,
            state.host_optimizer,
            self._training.lr_scheduler,
            self._data_loader(),
            len(self._open.group),
            self._open.group.buffers_before,
        )

    # ---- weights alone

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state dict."""
        model = self._training.model
        state: dict[str, Any] = model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        /,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        **_: Any,
    ) -> None:
        """Load `checkpoint["module"]` into the model; masters follow."""
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint["module"], dst=self._training.model)
        else:
            self._training.model.load_state_dict(checkpoint["module"], strict=strict)

    def consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's state dict in the dtype it computes in; Hugging Face calls it under ZeRO-3."""
        if self._training.settings.now.values["zero_optimization.stage"] != 3:
            raise ConfigError(
                "this function requires ZeRO-3 mode: consolidated_16bit_state_dict is only applicable to cases where "
                "weights are partitioned, including Zero Stage 3 and tensor parallelism."
            )
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
