"""(a) Is it right? The GPU tests: exactness, delayed streams, sync-debug mode, peaks against plans, out of memory.

    python benchmarks/gpu/correctness.py

Without a GPU the same properties are tested on the CPU device. Writes what every test did to `correctness.json`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from suite import ROOT, device, write

_ON_CUDA = ["-m", "gpu", "tests/gpu"]
_ON_CPU = ["tests/engine/test_exactness.py", "tests/engine/test_failures.py", "tests/engine/test_refusals.py"]


def main() -> int:
    """Pytest's exit status."""
    chosen = _ON_CUDA if device() == "cuda" else _ON_CPU
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = int(pytest.main([f"--rootdir={ROOT}", f"--junitxml={report}", "-q", *_below(chosen)]))
        cases = [case.attrib | {"outcome": _outcome(case)} for case in ElementTree.parse(report).iter("testcase")]
    outcomes = [case["outcome"] for case in cases]
    counts = {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}
    print(counts)
    write("correctness", {"exit_status": status, "outcomes": counts, "tests": cases})
    return status


def _below(chosen: list[str]) -> list[str]:
    return [str(ROOT / one) if one.startswith("tests/") else one for one in chosen]


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return f"{kind}: {(found.get('message') or '').splitlines()[0][:300]}" if kind != "skipped" else "skipped"
    return "passed"


if __name__ == "__main__":
    sys.exit(main())
