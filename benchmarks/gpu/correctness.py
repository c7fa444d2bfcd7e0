"""(a) Is it right? The GPU tests: exactness, delayed streams, sync-debug mode, peaks against plans, out of memory.

    python benchmarks/gpu/correctness.py [--resume] [--limit-s 400]

Without a GPU the same properties are tested on the CPU device. Writes what every test did to `correctness.json`, after
every test; `--resume` leaves out what has passed before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from suite import ROOT, device, results_folder, write

_ON_CUDA = ["-m", "gpu", "tests/gpu"]
_ON_CPU = ["tests/engine/test_exactness.py", "tests/engine/test_failures.py", "tests/engine/test_refusals.py"]


class Record:
    """A pytest plugin: keeps the outcome of every test, and begins none after the limit."""

    def __init__(self, known: dict[str, dict[str, Any]], limit_s: float | None) -> None:
        self.tests = known
        self._ends = None if limit_s is None else time.monotonic() + limit_s
        self.cut_short = False

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = [item for item in items if self.tests.get(item.nodeid, {}).get("outcome") == "passed"]
        config.hook.pytest_deselected(items=passed)
        items[:] = [item for item in items if item not in passed]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._ends is not None and time.monotonic() > self._ends:
            self.cut_short = True
            item.session.shouldstop = "out of time: --resume goes on"
            pytest.skip("out of time")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.cut_short or (report.passed and report.when != "call"):
            return
        found: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.failed:
            found["message"] = report.longreprtext[-2000:]
        self.tests[report.nodeid] = found
        self.save()

    def save(self) -> None:
        """Everything so far."""
        _progress().write_text(json.dumps(self.tests, indent=1) + "\n")

    @property
    def outcomes(self) -> dict[str, int]:
        """How many tests ended how."""
        outcomes = [test["outcome"] for test in self.tests.values()]
        return {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}


def main() -> int:
    """Pytest's exit status, or 2 if time ran out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--limit-s", type=float, help="begin no test later")
    options = parser.parse_args()
    known = json.loads(_progress().read_text()) if options.resume and _progress().is_file() else {}
    record = Record(known, options.limit_s)
    chosen = [
        str(ROOT / one) if one.startswith("tests/") else one for one in (_ON_CUDA if device() == "cuda" else _ON_CPU)
    ]
    status = int(pytest.main([f"--rootdir={ROOT}", "-q", "-rf", "--tb=short", *chosen], plugins=[record]))
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and record.tests:
        status = 0  # all have passed before
    print(record.outcomes)
    write(
        "correctness",
        {"exit_status": status, "cut_short": record.cut_short, "outcomes": record.outcomes, "tests": record.tests},
    )
    return 2 if record.cut_short else status


def _progress() -> Path:
    return results_folder() / "correctness.tests.json"


if __name__ == "__main__":
    sys.exit(main())
