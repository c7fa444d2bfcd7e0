"""Measurements, as JSON: saved after every turn, so that an interrupted comparison can be resumed."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from harmony_ds.bench.workload import Workload
from harmony_ds.errors import ConfigError

_PACKAGES = ("harmony_ds", "torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Contestant:
    """An engine with one task of its own."""

    label: str
    engine: str
    task: Workload


@dataclass
class Row:
    """Measurements of one contestant.

    Attributes:
        rounds: milliseconds per step, by the number of the round: until the last loss is known ("ms"), until no update
            is under way any longer ("drained_ms"), and CPU time of all threads to the same end ("cpu_ms").
        losses: of every step since the engine was built, warm-up included.
        report: the engine's own, and its process's.
        error: why it ended early, if it did.
    """

    engine: str
    task: dict[str, Any]
    rounds: dict[str, dict[str, float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    out_of_memory: bool = False

    def milliseconds(self, kind: str = "drained_ms") -> list[float]:
        return [measured[kind] for _, measured in sorted(self.rounds.items(), key=lambda item: int(item[0]))]


@dataclass
class Results:
    """One comparison.

    Attributes:
        wanted: contestants and timing, which must be the same for a comparison to be resumed.
        items_per_step: tokens or samples (`unit`) of one optimizer step, by contestant.
        sweeps: milliseconds per step by contestant and micro-batch, or the error there.
    """

    wanted: dict[str, Any]
    environment: dict[str, Any]
    rows: dict[str, Row] = field(default_factory=dict)
    items_per_step: dict[str, int] = field(default_factory=dict)
    unit: str = "tokens"
    parameters: int = 0
    sweeps: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: bool = False

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)

    @staticmethod
    def load(path: Path) -> Results:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: the file holds something else.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return Results(**{**data, "rows": {label: Row(**row) for label, row in data["rows"].items()}})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} holds no results of harmony-ds bench: {error}") from error


def environment(device: str) -> dict[str, Any]:
    """Return what the numbers depend on: command, date, versions, CPU, memory, load, and the GPU."""
    found = {
        "command": command_line(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
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
    """Return the command line of `harmony-ds`, or of the script that calls it."""
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.stem != "__main__":
        return " ".join(["python", script.name, *sys.argv[1:]])
    return " ".join(["harmony-ds", *sys.argv[1:]])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        # A package of sources on the path has no metadata.
        return getattr(sys.modules.get(package), "__version__", None)


def cpu_model() -> str:
    """Return the name of the CPU in /proc/cpuinfo."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
