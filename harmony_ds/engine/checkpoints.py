"""The engine's checkpoints: what a run goes on from, saved and loaded under DeepSpeed's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harmony_ds import checkpoint
from harmony_ds.engine.surface import Surface
from harmony_ds.errors import CheckpointError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from harmony_ds.config import Config
    from harmony_ds.offload.updater import GradientNorm
    from harmony_ds.parallel import Alone
    from harmony_ds.stepping.group import GroupParts, StepGroup
    from harmony_ds.stepping.runner import Runner

_logger = logging.getLogger(__name__)


class Checkpoints(Surface):
    """`save_checkpoint`, `load_checkpoint`, `save_16bit_model`."""

    _settings: Config
    _runner: Runner
    _world: Alone
    _group: StepGroup
    _group_parts: GroupParts
    _group_began: int
    _norm: Future[GradientNorm] | None
    micro_steps: int
    skipped_steps: int
    global_samples: int
    _backwards: int

    if TYPE_CHECKING:

        def finish_updates(self) -> None: ...

        def _new_group(self) -> StepGroup: ...

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
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)

        def write() -> None:
            snapshot = self._captured(client_state, exclude_frozen_parameters)
            if snapshot.random is not None:
                snapshot = replace(snapshot, random={**snapshot.random, "others": others})
            checkpoint.write(snapshot, Path(save_dir), tag, save_latest)

        with self._world.together():
            others = self._world.all("save random states", checkpoint.capture_random(self._assembly.device))[1:]
            self._world.first(f"save the checkpoint {tag}", write)
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
        wanted = checkpoint.LoadOptions(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        with self._world.together():
            return self._load(load_dir, tag, wanted)

    def _load(
        self, load_dir: str | Path, tag: str | None, wanted: checkpoint.LoadOptions
    ) -> tuple[str | None, dict[str, Any] | None]:
        folder = checkpoint.find(Path(load_dir), tag)
        self._world.agree(f"load the checkpoint {None if folder is None else folder.name}")
        if folder is None:
            return None, None
        snapshot = checkpoint.read_any(folder)
        snapshot = replace(snapshot, random=checkpoint.random_of(snapshot.random, self._world.rank, self._world.size))
        self._runner.check_usable()
        self.finish_updates()
        self._world.agree("load")  # nobody uses weights any more
        try:
            checkpoint.restore(self._trained(), snapshot, wanted, str(folder))
            self._world.agree("loaded")
        except CheckpointError:
            raise
        except BaseException as error:
            self._runner.fail(f"loading {folder} stopped half-way: {error!r}")
            raise
        self._links.forget()
        self._go_on_from(snapshot.progress, wanted.module_only)
        return str(folder), snapshot.client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Saves the weights alone, in the dtype of compute: by `torch.save`, or as safetensors by the file's suffix.

        Raises:
            CheckpointError: it cannot be written.
        """
        target = Path(save_dir) / save_filename

        def write() -> None:
            checkpoint.save_16bit(self._captured({}, exclude_frozen_parameters), target)

        with self._world.together():
            self._world.first(f"save the weights as {save_filename}", write)
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
        plan = self._runner.planner.plan
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
        self._backwards = 0
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
