"""(a) Is it right? The GPU tests: exactness, delayed streams, sync-debug mode, peaks against plans, out of memory.

    python benchmarks/gpu/correctness.py

Every outcome is printed as it comes, and written to `correctness.xml` (JUnit's format) at the end. Without a GPU some tests
of the same properties run on the CPU device.
"""

from __future__ import annotations

import sys

import pytest
from suite import ROOT, device, results_folder

_ON_CUDA = ["-m", "gpu", "tests/gpu"]
_ON_CPU = ["-m", "not deep and not gpu", "tests/engine/test_exactness.py", "tests/engine/test_refusals.py"]


def main() -> int:
    """Return pytest's exit status."""
    chosen = _ON_CUDA if device() == "cuda" else _ON_CPU
    paths = [str(ROOT / one) if one.startswith("tests/") else one for one in chosen]
    report = f"--junitxml={results_folder() / 'correctness.xml'}"
    return int(pytest.main([f"--rootdir={ROOT}", "-v", "-rf", "--tb=short", report, *paths]))


if __name__ == "__main__":
    sys.exit(main())
