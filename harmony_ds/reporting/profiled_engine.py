"""What DeepSpeed's flops profiler reads of an engine, when it prints its table."""

from __future__ import annotations

from types import SimpleNamespace

from harmony_ds.config.engine_settings import EngineSettings


class ProfiledEngine:
    """The names of a DeepSpeedEngine that the table needs, with times of one micro-batch.

    DeepSpeed adds up the latencies of a micro-batch and of the update after it. Here the updates are no part of a
    micro-batch's own time: "step" is what the optimizer step took, shared out, beyond forward and backward.
    """

    mp_world_size = 1
    has_moe_layers = False

    def __init__(
        self, settings: EngineSettings, processes: int, forward_ms: float, backward_ms: float, micro_batch_ms: float
    ) -> None:
        """`micro_batch_ms`: the time of the optimizer step by the number of its micro-batches."""
        from deepspeed.utils.timer import BACKWARD_GLOBAL_TIMER, FORWARD_GLOBAL_TIMER, STEP_GLOBAL_TIMER

        self.world_size = self.dp_world_size = processes
        self.train_micro_batch_size_per_gpu = settings.train_micro_batch_size_per_gpu
        self.wall_clock_breakdown = lambda: True
        rest_ms = max(0.0, micro_batch_ms - forward_ms - backward_ms)
        self._ms = {
            FORWARD_GLOBAL_TIMER: forward_ms,
            BACKWARD_GLOBAL_TIMER: backward_ms,
            STEP_GLOBAL_TIMER: rest_ms,
        }

    def timers(self, name: str) -> SimpleNamespace:
        """Return a timer that has measured the milliseconds of this name."""
        return SimpleNamespace(elapsed=lambda _reset: self._ms[name])
