"""A data loader that knows where it is, so that a resumed run is given the batches that the interrupted one was not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class ResumableLoader:
    """Wraps the loader that the engine made. Attributes of that are found here too; there is one pass at a time.

    A position is the number of batches taken, and the state of torch's generator when the pass began, since samplers
    draw their order from it. Going on draws the same order and skips what was taken; the generator does not notice.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._began: torch.Tensor | None = None
        self._taken = 0
        self._passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> ResumableLoader:
        """A pass from the start, or the rest of the one that a checkpoint was saved in."""
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
            self._passes += 1
            self._batches = self._began = None
            self._taken = 0
            raise
        self._taken += 1
        return batch

    def _continued(self) -> Iterator[Any]:
        if self._began is None:
            raise StopIteration
        now = torch.get_rng_state()
        try:
            torch.set_rng_state(self._began)
            batches: Iterator[Any] = iter(self._loader)
            for _ in range(self._taken):
                next(batches, None)
        finally:
            torch.set_rng_state(now)
        return batches

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """The position, `unused` batches back (those that were taken but not trained on yet)."""
        began = None if self._began is None else self._began.clone()
        return {"began": began, "taken": max(self._taken - unused, 0), "passes": self._passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at a position; a pass that is under way goes on there too."""
        self._began, self._taken, self._passes = state["began"], int(state["taken"]), int(state["passes"])
        self._batches = None
