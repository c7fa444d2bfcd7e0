"""A data loader that knows its position, so that a resumed run is given the batches that the interrupted one was not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from harmony_ds.config.status_log import say
from harmony_ds.scheduler.grid import counted


class ResumableLoader:
    """The loader that the engine made, with its attributes, and one pass at a time.

    A position is the number of batches taken, and the state of torch's generator when the pass began, since samplers
    draw their order from it. Going on draws the same order and skips what was taken; the generator does not notice.
    Several processes are dealt batches of one order in turn; a position counts the batches of all, so that any number of
    processes goes on from it.
    """

    def __init__(self, loader: Any, processes: int) -> None:
        self._loader = loader
        self._processes = processes
        self._batches: Iterator[Any] | None = None
        self._began: torch.Tensor | None = None
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> ResumableLoader:
        """Begin a pass, or go on in the one that a checkpoint was saved in."""
        if self._batches is not None or self._began is None:
            self._began, self._taken = torch.get_rng_state(), 0
            self._batches = iter(self._loader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._continued()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches, self._began, self._taken = None, None, 0
            raise
        self._taken += 1
        return batch

    def _continued(self) -> Iterator[Any]:
        if self._began is None:
            raise StopIteration
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._began)
            batches: Iterator[Any] = iter(self._loader)
            for _ in range(self._taken):
                next(batches, None)
        return batches

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """Return the position, less the last `unused` batches, which were taken and not trained on yet."""
        return {"began": self._began, "taken": max(self._taken - unused, 0) * self._processes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position that so many processes can be at, also in a pass that is under way."""
        taken, rest = divmod(int(state["taken"]), self._processes)
        if rest:
            raise ValueError(
                f"{state['taken']} batches of the training data were taken, which {self._processes} processes cannot have "
                "taken: resume with a number of processes that divides it, or load without the engine's own loader"
            )
        if taken:
            say(
                f"the loader of training_data goes on after {counted(taken, 'batch')} of its pass, as the saved run took: "
                "a program that skips them by hand skips them twice"
            )
        self._began, self._taken, self._batches = state["began"], taken, None
