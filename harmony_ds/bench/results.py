"""Measurements of a comparison, saved as JSON after every turn, so that an interrupted comparison can be resumed."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from harmony_ds.bench.workload import Workload
from harmony_ds.checkpoint.folders import replace_text
from harmony_ds.errors import ConfigError

_PACKAGES = ("harmony_ds", "torch", "deepspeed", "transformers", "accelerate", "peft", "trl")


@dataclass(frozen=True, slots=True)
class Rounds:
    """Timing of a comparison: rounds of so many steps, after the warm-up of a process."""

    rounds: int = 5
    warmup_steps: int = 2
    steps: int = 2


@dataclass
class Row:
    """An engine with a task of its own, and its measurements.

    Attributes:
        sweep: milliseconds per step by micro-batch, or the error there, if the task's was chosen among several.
        rounds: milliseconds per step until no update is under way any longer ("drained_ms"), by the number of the round.
        losses: of every step since the engine was built, warm-up included.
        report: the engine's own, and its process's.
        error: why it ended early, if it did.
    """

    engine: str
    task: Workload
    sweep: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: dict[str, dict[str, float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    out_of_memory: bool = False


@dataclass
class Results:
    """One comparison.

    Attributes:
        rows: by their labels.
        sample_items: tokens or samples (`unit`) of one sample.
    """

    timing: Rounds
    environment: dict[str, Any]
    rows: dict[str, Row]
    unit: str
    sample_items: int
    parameters: int
    finished: bool = False

    @staticmethod
    def empty(rows: dict[str, Row], timing: Rounds) -> Results:
        """Return the results of a comparison that is to begin."""
        task = next(iter(rows.values())).task
        parameters = sum(parameter.numel() for parameter in task.subject.model.parameters())
        return Results(timing, environment(task.device), rows, task.subject.unit, task.sample_items, parameters)

    def resumed(self, path: Path) -> Results:
        """Return the results in `path`, to which rounds are added as this comparison's timing says.

        Raises:
            ConfigError: naming the settings there that are not those of this comparison.
        """
        known = Results.load(path)
        for label, row in known.rows.items():
            if row.sweep and label in self.rows:
                self.rows[label].task = self.rows[label].task.cut(row.task.micro_batch)
            if not row.out_of_memory:
                row.error = None  # any other failure is tried once more
        wanted, was = self._settings(), known._settings()
        if differing := sorted(key for key in wanted if wanted[key] != was[key]):
            told = "; ".join(f"{key} was {was[key]!r} and is {wanted[key]!r}" for key in differing)
            raise ConfigError(f"these results were begun with other settings: {told}. Leave --resume away.")
        return replace(known, timing=self.timing)

    def _settings(self) -> dict[str, Any]:
        engines = {label: {"engine": row.engine, "task": asdict(row.task)} for label, row in self.rows.items()}
        return {"engines": engines, "steps": self.timing.steps, "warmup_steps": self.timing.warmup_steps}

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        replace_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Results:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: the file holds something else.
        """
        try:
            return TypeAdapter(Results).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(f"{path} holds no results of harmony-ds bench: {error}") from error


def environment(device: str) -> dict[str, Any]:
    """Return what the numbers depend on: command, date, versions, CPU, memory, load, and the GPU."""
    found = {
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: sys.modules[name].__version__ for name in _PACKAGES if name in sys.modules},
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
    }
    if device == "cuda":
        properties, driver = torch.cuda.get_device_properties(0), Path("/proc/driver/nvidia/version")
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.is_file() else None,
        }
    return found


def command_line() -> str:
    """Return the command line of this process: of `harmony-ds`, or of the module or script that runs."""
    module, script = sys.modules["__main__"].__spec__, Path(sys.argv[0])
    if module is not None:
        program = ["python", "-m", module.name.removesuffix(".__main__")]
    else:
        program = ["python", script.name] if script.suffix == ".py" else [script.name]
    return shlex.join([*program, *sys.argv[1:]])


def cpu_model() -> str:
    """Return the name of the CPU in /proc/cpuinfo."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
