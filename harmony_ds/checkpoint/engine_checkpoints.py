"""Saving and loading of a training: what `HarmonyEngine.save_checkpoint` and `load_checkpoint` do."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harmony_ds import checkpoint
from harmony_ds.errors import CheckpointError
from harmony_ds.step.steps import Steps

_logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves the training of an engine, and goes on from what was saved: in the engine's own layout or DeepSpeed's."""

    def __init__(self, steps: Steps, data_loader: Callable[[], checkpoint.ResumableLoader | None]) -> None:
        """`data_loader`: returns the engine's own loader of now, whose position is saved; None: it has none."""
        self._steps, self._data_loader = steps, data_loader
        self._world = steps.state.world

    def save(
        self, save_dir: Path, tag: str, client_state: Mapping[str, Any], *, save_latest: bool, exclude_frozen: bool
    ) -> None:
        """Save everything the run goes on from, as `save_dir`/`tag`, written by the first process."""

        def write() -> None:
            snapshot = self._capture(client_state, exclude_frozen)
            if snapshot.random is not None:
                snapshot = replace(snapshot, random={**snapshot.random, "others": random_of_others})
            checkpoint.write(snapshot, save_dir, tag, save_latest)

        with self._world.reporting_failures():
            own_random = checkpoint.capture_random(self._steps.state.device)
            random_of_others = self._world.gather_values("save a checkpoint", own_random)[1:]
            self._world.compute_on_first(f"save the checkpoint {tag}", write)

    def load(
        self, load_dir: Path, tag: str | None, options: checkpoint.LoadOptions
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint; return its folder and the client state (None, None: there is no `latest`)."""
        with self._world.reporting_failures():
            folder = checkpoint.find(load_dir, tag)
            self._world.agree(f"load the checkpoint {None if folder is None else folder.name}")
            if folder is None:
                return None, None
            self._verify(folder)
            snapshot = self._restore(folder, options)
            self._resume(None if options.module_only else snapshot.progress)
        return str(folder), snapshot.client_state

    def _verify(self, folder: Path) -> None:
        """Have one process of each server read every byte; a complaint of any is raised in all processes."""
        complaint: str | None = None
        if self._world.is_local_first:
            try:
                checkpoint.verify(folder)
            except CheckpointError as error:
                complaint = str(error)
        for reported in self._world.gather_values("verify the checkpoint", complaint):
            if reported is not None:
                raise CheckpointError(reported)

    def _restore(self, folder: Path, options: checkpoint.LoadOptions) -> checkpoint.Snapshot:
        """Put what `folder` holds into model, optimizer, schedule and generators, and return it.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        world, state = self._world, self._steps.state
        snapshot = checkpoint.read_any(folder)
        snapshot = replace(snapshot, random=checkpoint.random_of(snapshot.random, world.rank, world.size))
        state.health.check_usable()
        self._steps.settle()
        state.finish_updates()
        world.agree("load")  # no process uses weights any more
        state.runtime.resident_packs.note_all_written()
        try:
            checkpoint.restore(self._trained(), snapshot, options, str(folder))
            world.agree("loaded")
        except CheckpointError:
            raise
        except BaseException as error:
            state.health.fail(f"loading {folder} stopped half-way: {error!r}")
            raise
        if snapshot.plan is not None and not options.module_only:
            state.planner.cuts.repeat(json.loads(snapshot.plan)["policy"])
        return snapshot

    def _resume(self, progress: checkpoint.Progress | None) -> None:
        """Count on from `progress`, and begin a step without micro-batches; None: the engine's own counters go on."""
        if progress is None:
            self._steps.drop_steps()
            return
        self._steps.resume(
            global_steps=progress.global_steps,
            global_samples=progress.global_samples,
            skipped_steps=progress.skipped_steps,
            micro_steps=progress.micro_steps_with(self._steps.settings.gradient_accumulation_steps()),
            loss_scaler=progress.loss_scaler,
            seed=progress.seed,
        )

    def save_weights(self, path: Path, *, exclude_frozen: bool) -> None:
        """Save the weights alone, in the dtype of compute: as safetensors by the file's suffix, or else by `torch.save`."""

        def write() -> None:
            snapshot = self._capture({}, exclude_frozen)
            snapshot.check_plain(path.name)
            weights = snapshot.tensors
            if path.suffix != ".safetensors":  # which takes one name of tied weights
                weights = snapshot.with_tied(weights)
            checkpoint.write_weights(weights, path)

        with self._world.reporting_failures():
            self._world.compute_on_first(f"save the weights as {path.name}", write)

    def _capture(self, client_state: Mapping[str, Any], exclude_frozen: bool) -> checkpoint.Snapshot:
        steps, counters = self._steps, self._steps.counters
        steps.state.health.check_usable()
        steps.state.runtime.updater.wait_all()
        steps.settle()
        if handed_over := steps.open.handed_over:
            _logger.warning(
                "micro-batches are queued (%d) whose step is not taken yet: the checkpoint is of the step before, and they "
                "have to be handed over again after loading it.",
                handed_over,
            )
        else:  # what was written into weights by hand is in what is saved of their masters, too
            steps.context.links.apply_user_writes()
        progress = checkpoint.Progress(
            global_steps=counters.global_steps,
            global_samples=counters.global_samples,
            skipped_steps=counters.skipped_steps,
            micro_steps=counters.group_began,
            accumulation=steps.settings.gradient_accumulation_steps(),
            seed=steps.context.seed,
            loss_scaler=steps.scaler.state_dict(),
        )
        plan = steps.state.planner.plan
        plan_text = None if plan is None else plan.to_json()
        return checkpoint.capture(self._trained(), progress, dict(client_state), plan_text, exclude_frozen)

    def _trained(self) -> checkpoint.Trained:
        state = self._steps.state
        return checkpoint.Trained(
            module=self._steps.context.model,
            store=state.store,
            device=state.device,
            resident_packs=state.runtime.resident_packs,
            optimizer=state.host_optimizer,
            scheduler=self._steps.lr_scheduler,
            loader=self._data_loader(),
            queued=self._steps.open.handed_over,
            buffers=self._steps.open.buffers_before,
        )
