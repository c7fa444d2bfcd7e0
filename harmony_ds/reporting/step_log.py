"""The output of an engine after each step, as the ds_config asks: progress lines, times, memory, monitors."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from harmony_ds.config import Config
from harmony_ds.config.engine_settings import EngineSettings
from harmony_ds.config.status_log import has_own_handler
from harmony_ds.distributed.process_group import init_distributed
from harmony_ds.errors import ConfigError
from harmony_ds.reporting.profiled_engine import ProfiledEngine
from harmony_ds.reporting.reporter import Reporter
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.step_record import MeasuredStep, StepRecord
from harmony_ds.step.steps import Steps

_logger = logging.getLogger("harmony_ds.progress")
MonitorEvent = tuple[str, float, int]


class StepLog:
    """Says after each step what the ds_config asks for.

    Attributes:
        throughput: DeepSpeed's timer of samples per second, from step to step.
        monitor: DeepSpeed's, or one that writes nothing.
    """

    def __init__(self, state: EngineState, settings: EngineSettings, record: StepRecord, reporter: Reporter) -> None:
        self._settings = settings
        self._processes = state.world.size
        self._record = record
        self._planner = state.planner
        self._told_of_first_step = False
        self._reporter = reporter
        config, values = settings.now, settings.now.values
        speaks = state.world.rank == 0  # one process speaks for all
        self._every = (config.steps_per_print or None) if speaks else None
        self._breakdown = speaks and bool(values["wall_clock_breakdown"])
        self._memory = speaks and bool(values["memory_breakdown"])
        self.throughput = _throughput_timer(config, self._every)
        self.monitor = _monitor(config) if speaks else _NO_MONITOR
        if values["log_level"] is not None:
            logging.getLogger("harmony_ds").setLevel(values["log_level"].upper())
        dumps = speaks and values["dump_state"]
        if self._every or self._breakdown or self._memory or dumps:
            _show_progress()
        if dumps:
            for path, value in sorted(values.items()):
                _logger.info("  %s = %r", path, value)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of the last step, with `wall_clock_breakdown`; `trace()` has those of every task."""
        last = self._record.last
        return {"step": 0.0 if last is None else last.step_ms} if self._breakdown else {}

    def report_step(self, steps: Steps) -> None:
        """Report the optimizer step that is over; the counters of `steps` are those after it."""
        last = self._record.last
        assert last is not None
        if self._planner.choices and not self._told_of_first_step:
            predicted_ms = self._planner.choices[0].prediction.step_ms
            self._planner.progress.first_step_done(last.step_ms, predicted_ms, last.deviation)
            self._told_of_first_step = True
        size = self._settings.train_micro_batch_size_per_gpu() * self._processes
        number = steps.counters.global_steps
        if self._every and number % self._every == 0:
            lr, momentum = steps.get_lr(), steps.get_mom()
            _logger.info("step=%d, skipped=%d, lr=%s, mom=%s", number, steps.skipped_steps, lr, momentum)
        self.throughput.batch_size = last.micro_batches * size
        self.throughput.stop(global_step=True)
        self.throughput.start()
        if self.monitor.enabled:
            self.monitor.write_events(self._events(steps, last.step_ms))
        if self._breakdown:
            _logger.info("time (ms) | step: %.2f", last.step_ms)
        if self._memory:
            _logger.info("%s", self._reporter.memory_report())
        if steps.context.flop_counts is not None:
            steps.context.flop_counts.print_table(self._profiled_engine(steps, last), number, self._settings.now.values)
            steps.context.flop_counts = None

    def _profiled_engine(self, steps: Steps, last: MeasuredStep) -> ProfiledEngine:
        """Return what DeepSpeed's table says of the engine, with the times of one micro-batch of the step."""
        costs = self._planner.costs[1]
        forward_ms = costs.head_ms + sum(cost.forward_ms for cost in costs.costs)
        backward_ms = costs.tail_ms + sum(cost.backward_ms for cost in costs.costs if cost.needs_backward)
        micro_batch_ms = last.step_ms / max(1, last.micro_batches)
        return ProfiledEngine(self._settings, self._processes, forward_ms, backward_ms, micro_batch_ms)

    def write_loss(self, name: str, loss: Tensor, samples: int) -> None:
        """Write the mean of a `train_batch` ("train_loss") or `eval_batch` to the monitors, as DeepSpeed's pipeline."""
        if self.monitor.enabled:
            self.monitor.write_events([(f"Train/Samples/{name}", loss.item(), samples)])

    def _events(self, steps: Steps, step_ms: float) -> list[MonitorEvent]:
        samples = steps.counters.global_samples
        events: list[MonitorEvent] = [("Train/Samples/lr", steps.get_lr()[0], samples)]
        if self._settings.now.values["fp16.enabled"]:
            events.append(("Train/Samples/loss_scale", steps.scaler.scale, samples))
        if self._breakdown:
            events.append(("Train/Samples/elapsed_time_ms_step", step_ms, samples))
        return events


_NO_MONITOR = SimpleNamespace(enabled=False, write_events=lambda event_list: None)


def _throughput_timer(config: Config, every: int | None) -> Any:
    from deepspeed.utils.timer import ThroughputTimer

    # Not synchronized, which would have each step wait for the updates of the one before.
    asked = SimpleNamespace(enabled=config.values["timers.throughput.enabled"], synchronized=False)
    timer = ThroughputTimer(asked, batch_size=1, steps_per_output=every, logging_fn=_logger.info)
    timer.start()
    return timer


def _monitor(config: Config) -> Any:
    """Return DeepSpeed's monitors, as far as the ds_config enables them.

    Raises:
        ConfigError: a package that one of them needs is not installed.
    """
    asked = [n for n in ("tensorboard", "csv_monitor", "wandb", "comet") if config.values[f"{n}.enabled"]]
    if not asked:
        return _NO_MONITOR
    init_distributed()  # they ask for this process's rank
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    try:
        return MonitorMaster(get_monitor_config(config.raw))
    except ImportError as error:
        missing = [name for name in asked if name != "csv_monitor"]
        install = " ".join("comet_ml" if name == "comet" else name for name in missing)
        raise ConfigError(
            f"{' and '.join(json.dumps(name) for name in missing)} of the ds_config cannot be written: {error}. "
            f'Install it (pip install {install}), or take "csv_monitor", which needs nothing.'
        ) from None


def _show_progress() -> None:
    """Log progress, which was asked for by name, to standard output unless the program has a handler of its own."""
    _logger.setLevel(logging.INFO)
    if not has_own_handler(_logger.name):
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [harmony_ds] %(message)s"))
        _logger.addHandler(handler)
