"""The jobs that those of a task wait for, beside data: with overlap and without (Harmony's scheduler, VLDB'22).

serial        overlapped
W X0 X1       W X0 X1         swap in
    F0  F1          F0 F1     compute
      Y0  Y1          Y0 Y1   swap out
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.vldb22.cost_model.graph import DeviceTask, DeviceTaskKind

Places = tuple[int, ...]


@dataclass(slots=True)
class Done:
    """The places of a task's jobs in the list, for the jobs that wait for them.

    Attributes:
        task: which.
        weights: the swap-in of its weights.
        computed: by micro-batch: the last computation.
        recomputed: by micro-batch: the one before it, in backward tasks.
        copied: by micro-batch: its output, or its gradient, to the host.
        handed: by layer, and by micro-batch of the task that takes it: what lies ready on the host.
        gradients: the copy of its weights' gradients.
        freed: its last job on the compute stream.
    """

    task: DeviceTask
    weights: int = -1
    computed: list[int] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    handed: dict[int, list[int]] = field(default_factory=dict)
    gradients: int = -1
    freed: int = -1


class Serial:
    """One thing after the other. Says what each kind of job waits for; `i` counts micro-batches.

    Args:
        done: the task.
        history: the tasks before it on its device, but updates.
        pipeline: the device does not wait for what it sends to others.
    """

    def __init__(self, done: Done, history: list[Done], pipeline: bool) -> None:
        self._done = done
        self._left = history[-1] if history else None
        self._left2 = history[-2] if len(history) > 1 else None
        self._pipeline = pipeline

    @property
    def weights_come_first(self) -> bool:
        """Whether the weights are queued before the first input, or after it."""
        return True

    def weights(self) -> Places:
        return self._left_freed()

    def input(self, i: int) -> Places:
        if i == 0:
            return (self._done.weights,)
        return self.end() or (self._done.computed[i - 1],)

    def stash(self, i: int) -> Places:
        """Return the copy of an input that is a stash too, beyond the input itself."""
        return ()

    def computation_after(self, copy: int) -> Places:
        """Return the computation that follows a stash's copy."""
        return (copy,)

    def gradient_before_recomputation(self, i: int) -> Places | None:
        """Return what the gradient waits for; None: it comes after the recomputation."""
        return None

    def end(self) -> Places:
        """Return the end of a task, or its all-reduce."""
        return () if self._pipeline else tuple(self._done.copied[-1:])

    def _left_freed(self) -> Places:
        return (self._left.freed,) if self._left else ()


class Overlapped(Serial):
    """Weights come during the last micro-batch of the task before, inputs two ahead; nobody waits for copies out."""

    @property
    def weights_come_first(self) -> bool:
        task = self._done.task
        return self._left is None or (self._pipeline and (task.kind is DeviceTaskKind.FORWARD or task.fused))

    def weights(self) -> Places:
        return (self._left.computed[-1],) if self._left else ()

    def input(self, i: int) -> Places:
        if i == 0:
            return self._second_buffer()
        if i == 1:
            return self._left_freed()
        return (self._done.computed[i - 2],)

    def stash(self, i: int) -> Places:
        return (self._done.computed[i - 1],) if i else self._left_freed()

    def computation_after(self, copy: int) -> Places:
        return ()

    def gradient_before_recomputation(self, i: int) -> Places | None:
        if i > 0:
            return (self._done.recomputed[i - 1],)
        if self._left is None:
            return ()
        left_is_backward = self._left.task.kind is DeviceTaskKind.BACKWARD and not self._left.task.fused
        if not self._pipeline or left_is_backward:
            return (self._left.recomputed[-1],)
        return self._second_buffer()

    def end(self) -> Places:
        return ()

    def _second_buffer(self) -> Places:
        """Free when the task before has only one micro-batch left to compute."""
        if self._left is None:
            return ()
        if len(self._left.computed) > 1:
            return (self._left.computed[-2],)
        return (self._left2.freed,) if self._left2 else ()
