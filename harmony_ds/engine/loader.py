"""Data loaders as DeepSpeed makes them: in its order of samples, which depends on no seed but its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def make_loader(
    dataset: Any,
    batch_size: int,
    drop_last: bool,
    collate_fn: Callable[[Any], Any] | None,
    sampler: Iterable[int] | None,
    workers: int | None,
) -> Any:
    """DeepSpeed's loader of batches of `batch_size`.

    Raises:
        ValueError: `dataset` is neither a map nor an iterable.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) and not hasattr(dataset, "__iter__"):
        raise ValueError("Training data must be a torch Dataset")
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader

    return DeepSpeedDataLoader(
        dataset=dataset,
        batch_size=batch_size,
        pin_memory=False,  # inputs are copied once, and a step is long
        local_rank=0,
        tput_timer=None,
        collate_fn=collate_fn,
        num_local_io_workers=workers or 0,  # unless asked for: they would be forked beside the update's thread
        data_sampler=sampler,
        data_parallel_world_size=1,
        data_parallel_rank=0,
        dataloader_drop_last=drop_last,
    )
