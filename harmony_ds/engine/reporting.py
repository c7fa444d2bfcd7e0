"""What the engine says after a step, as the ds_config asks: progress lines, times, memory, monitors."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harmony_ds.config import Config
from harmony_ds.engine.step_record import StepRecord
from harmony_ds.engine.training import Training
from harmony_ds.errors import ConfigError
from harmony_ds.parallel.distributed import init_distributed
from harmony_ds.runtime.executor import OnTask
from harmony_ds.scheduler.plan import BACKWARD_KINDS, FORWARD_KINDS, Task, TaskKind

_logger = logging.getLogger("harmony_ds.progress")
Event = tuple[str, float, int]
_FIRST_TIMED = 2  # DeepSpeed's throughput leaves two steps out

_TIMERS = {
    "fwd": FORWARD_KINDS,
    "fwd_bwd": (TaskKind.FUSED,),
    "bwd": BACKWARD_KINDS,
    "swap_in": (TaskKind.SWAP_IN, TaskKind.GATHER, TaskKind.STASH_IN),
    "swap_out": (TaskKind.REDUCE, TaskKind.SWAP_OUT, TaskKind.STASH_OUT, TaskKind.EVICT, TaskKind.FREE_GRADIENTS),
    "step": (TaskKind.UPDATE, TaskKind.UPDATE_ON_DEVICE, TaskKind.NORM),
}
"""Name of a timer: the kinds of tasks whose time it is."""


class TaskTimes:
    """Where the time of a step goes, by kind of task, on the engine's thread.

    On CUDA tasks are only issued, so that time is found where the thread waits.
    """

    def __init__(self) -> None:
        self.callback: OnTask | None = None
        self.last: dict[str, float] = {}
        self._ms = dict.fromkeys(_TIMERS, 0.0)
        self._since = time.perf_counter()
        self._name_of = {kind: name for name, kinds in _TIMERS.items() for kind in kinds}

    def begin(self) -> None:
        """A step begins."""
        self._ms = dict.fromkeys(_TIMERS, 0.0)
        self._since = time.perf_counter()

    def __call__(self, done: int, total: int, task: Task) -> None:
        self._note(self._name_of[task.kind])
        if self.callback is not None:
            self.callback(done, total, task)
            self._since = time.perf_counter()

    def end(self) -> None:
        """A step is over; what came behind its tasks is the update's."""
        self._note("step")
        self.last = dict(self._ms)

    def _note(self, name: str) -> None:
        now = time.perf_counter()
        self._ms[name] += (now - self._since) * 1e3
        self._since = now


class Throughput:
    """Samples per second from step to step, under the names of DeepSpeed's `ThroughputTimer`."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.global_step_count = 0
        self.epoch_count = 0
        self.micro_step_count = 0
        self._samples = 0
        self._began = 0.0
        self._last = 0.0
        self.current = 0.0

    def update_epoch_count(self) -> None:
        """The caller begins another epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Time runs from step to step."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Time runs from step to step."""

    def step(self, samples: int, micro_batches: int) -> None:
        """An optimizer step over `samples` is over."""
        now = time.perf_counter()
        self.global_step_count += 1
        self.micro_step_count += micro_batches
        if self.global_step_count == _FIRST_TIMED:
            self._began = now
        elif self.global_step_count > _FIRST_TIMED:
            self._samples += samples
            self.current = samples / max(now - self._last, 1e-9)
        self._last = now

    def avg_samples_per_sec(self) -> float:
        """Since the second step; -inf before the third."""
        return self._samples / max(self._last - self._began, 1e-9) if self._samples else float("-inf")


class StepReports:
    """Told of every step, says what was asked for."""

    def __init__(self, training: Training) -> None:
        config, values = training.settings.now, training.settings.now.values
        self._training = training
        speaks = training.assembly.world.speaks  # what is said once for all processes
        self._every = config.steps_per_print if speaks else None
        self._breakdown = speaks and bool(values["wall_clock_breakdown"])
        self._memory = speaks and bool(values["memory_breakdown"])
        self._times = TaskTimes()
        self.record = StepRecord(training.assembly)
        self.throughput = Throughput(bool(values["timers.throughput.enabled"]))
        self.monitor = make_monitor(config) if speaks else NoMonitor()
        if values["log_level"] is not None:
            logging.getLogger("harmony_ds").setLevel(values["log_level"].upper())
        dumps = speaks and values["dump_state"]
        if self._every or self._breakdown or self._memory or dumps:
            _let_progress_be_seen()
        if dumps:
            for path, value in sorted(values.items()):
                _logger.info("  %s = %r", path, value)
        self.on_progress(None)

    def on_progress(self, callback: OnTask | None) -> None:
        """`callback(done, total, task)` is called after each task of a step."""
        self._times.callback = callback
        self._training.assembly.runner.executor.tell(self._times if self._breakdown else callback)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step, with `wall_clock_breakdown`."""
        return dict(self._times.last)

    @contextmanager
    def step(self, micro_batches: int, as_planned: bool) -> Iterator[None]:
        """Around an optimizer step; `as_planned`: a full group, run at once."""
        self._times.begin()
        with self.record.step(micro_batches, as_planned):
            yield

    def boundary(self) -> None:
        """An optimizer step is over, and the counters are those after it."""
        if self._breakdown:
            self._times.end()
        micro_batches, world = self.record.micro_batches, self._training.assembly.world
        samples = micro_batches * self._training.settings.train_micro_batch_size_per_gpu() * world.size
        self.throughput.step(samples, micro_batches)
        if self._every and self._training.global_steps % self._every == 0:
            self._progress()
        if self.monitor.enabled:
            self.monitor.write_events(self._events())
        if self._breakdown:
            _logger.info("time (ms) | %s", " | ".join(f"{n}: {ms:.2f}" for n, ms in self._times.last.items()))
        if self._memory:
            _logger.info("%s", self.record.memory_report())

    def mean_loss(self, name: str, loss: Tensor) -> None:
        """Of a `train_batch` ("train_loss") or an `eval_batch`, to the monitors, as DeepSpeed's pipeline engine does."""
        if self.monitor.enabled:
            self.monitor.write_events([(f"Train/Samples/{name}", loss.item(), self._training.global_samples)])

    def _progress(self) -> None:
        counts, timer = self._training, self.throughput
        _logger.info(
            "step=%d, skipped=%d, lr=%s, mom=%s",
            counts.global_steps,
            counts.skipped_steps,
            self._training.get_lr(),
            self._training.get_mom(),
        )
        if timer.enabled and timer.global_step_count > _FIRST_TIMED:
            _logger.info(
                "epoch=%d/micro_step=%d/global_step=%d, RunningAvgSamplesPerSec=%s, CurrSamplesPerSec=%s",
                timer.epoch_count,
                timer.micro_step_count,
                timer.global_step_count,
                timer.avg_samples_per_sec(),
                timer.current,
            )

    def _events(self) -> list[Event]:
        training, samples = self._training, self._training.global_samples
        events: list[Event] = [("Train/Samples/lr", self._training.get_lr()[0], samples)]
        if training.settings.now.values["fp16.enabled"]:
            events.append(("Train/Samples/loss_scale", training.scaler.scale, samples))
        if self._breakdown:
            names = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward_backward"}
            for name, ms in self._times.last.items():
                events.append((f"Train/Samples/elapsed_time_ms_{names.get(name, name)}", ms, samples))
            # Beside ours, the other names of DeepSpeed's: backward without the exchange between processes, and that.
            events.append(("Train/Samples/elapsed_time_ms_backward_inner", self._times.last["bwd"], samples))
            events.append(("Train/Samples/elapsed_time_ms_backward_allreduce", 0.0, samples))
        return events


class NoMonitor:
    """Writes nothing."""

    enabled = False

    def write_events(self, event_list: list[Event]) -> None:
        """Nobody asked for them."""


def make_monitor(config: Config) -> Any:
    """DeepSpeed's monitors, as far as the ds_config enables them.

    Raises:
        ConfigError: a package that one of them needs is not there.
    """
    names = ("tensorboard", "csv_monitor", "wandb", "comet")
    if not any(config.values[f"{name}.enabled"] for name in names):
        return NoMonitor()
    init_distributed()  # they ask for this process's rank
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    try:
        return MonitorMaster(get_monitor_config(config.raw))
    except ImportError as error:
        package = {"comet": "comet_ml"}
        asked = [name for name in names if config.values[f"{name}.enabled"] and name != "csv_monitor"]
        install = " ".join(package.get(name, name) for name in asked)
        raise ConfigError(
            f"{' and '.join(json.dumps(name) for name in asked)} of the ds_config cannot be written: {error}. "
            f'Install it (pip install {install}), or take "csv_monitor", which needs nothing.'
        ) from None


def _let_progress_be_seen() -> None:
    """Progress was asked for by name: without a handler of the program's own it goes to standard output."""
    _logger.setLevel(logging.INFO)
    if not _logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [harmony_ds] %(message)s"))
        _logger.addHandler(handler)
