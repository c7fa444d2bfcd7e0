"""The engine's own data: a dataset in DeepSpeed's loader, or the loader that the program has set in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from harmony_ds.checkpoint import ResumableLoader
from harmony_ds.config.engine_settings import EngineSettings
from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import BatchError
from harmony_ds.step.inputs import CallInputs, take_batches


class TrainingData:
    """The source of micro-batches for `train_batch()` without an iterator."""

    def __init__(
        self, settings: EngineSettings, dataset: Any, collate_fn: Callable[[Any], Any] | None, world: SingleProcess
    ) -> None:
        self._settings = settings
        self._world = world
        self._batches: Iterator[Any] | None = None
        self.training_data = dataset
        self.collate_fn = collate_fn
        self.training_dataloader: Any = None
        if dataset is not None:
            self.training_dataloader = ResumableLoader(self.make_loader(dataset), world.size)

    def resumable_loader(self) -> ResumableLoader | None:
        """Return the engine's own loader, whose position a checkpoint holds; None without one, or with the program's."""
        loader = self.training_dataloader
        return loader if isinstance(loader, ResumableLoader) else None

    def next_group(self, data_iter: Iterator[Any] | Sequence[Any] | None, whole: bool = False) -> list[CallInputs]:
        """Return the micro-batches of the next group, from `data_iter` (None: from the engine's own data).

        `whole`: each is one argument, as it is.

        Raises:
            BatchError: there is nothing to take them from.
            StopIteration: it is at its end.
        """
        batches = self._own_batches() if data_iter is None else data_iter
        return take_batches(batches, self._settings.gradient_accumulation_steps(), whole)

    def _own_batches(self) -> Iterator[Any]:
        if self._batches is None:
            if self.training_dataloader is None:
                raise BatchError(
                    "train_batch and eval_batch need an iterator over micro-batches, or training_data at initialize."
                )
            self._batches = _repeated(self.training_dataloader)
        return self._batches

    def make_loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return DeepSpeed's loader of `dataset`, as `HarmonyEngine.deepspeed_io` says."""
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) and not hasattr(dataset, "__iter__"):
            raise ValueError("Training data must be a torch Dataset")
        if data_sampler is None and route in ("eval", "predict"):
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, self._world.size, self._world.rank, shuffle=False
            )
        from deepspeed.runtime.dataloader import DeepSpeedDataLoader  # its order of samples depends on its own seed

        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=self._settings.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            pin_memory=False,
            local_rank=self._world.local_rank,
            tput_timer=None,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers or 0,  # or they would be forked beside the update's thread
            data_sampler=data_sampler,
            data_parallel_world_size=self._world.size,
            data_parallel_rank=self._world.rank,
            dataloader_drop_last=self._settings.now.values["dataloader_drop_last"],
        )

    def set_dataloader(self, loader: Any) -> None:
        """Take micro-batches for `train_batch()` without an iterator from `loader`, epoch after epoch."""
        self.training_dataloader, self._batches = loader, None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches for `train_batch()` without an iterator from `iterator`, until it ends."""
        self._batches = iterator

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Set the function that the training data loader applies to each batch."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func


def _repeated(loader: Any) -> Iterator[Any]:
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch
    raise BatchError("the training data loader is empty.")
