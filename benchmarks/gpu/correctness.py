"""(a) Is it right? The GPU tests: exactness, delayed streams, sync-debug mode, peaks against plans, out of memory.

    python benchmarks/gpu/correctness.py [--part engine|bases]

`bases` is quantized bases, tiles of tokens and Liger's kernels; `engine` is everything else. Every outcome is printed as it
comes, and written to `correctness.xml` or `correctness-bases.xml` (JUnit's format) at the end. Without a GPU some tests of
the same properties run on the CPU device.
"""

from __future__ import annotations

import argparse
import sys

import pytest
from suite import ROOT, device, results_folder

_HUNG_S, _LOOKED_AT_S = 150, 120
"""A test of a GPU that takes so long hangs, and fails, so that the others run; shortly before, all stacks are printed."""
_ON_CUDA = {
    "engine": ["-m", "gpu", "tests/gpu/test_cuda.py"],
    "bases": ["-m", "gpu", "tests/gpu/test_quantized.py", "tests/gpu/test_long_rows.py"],
}
_ON_CPU = {
    "engine": ["-m", "not deep and not gpu", "tests/engine/test_exactness.py", "tests/engine/test_refusals.py"],
    "bases": ["-m", "not deep and not gpu", "-k", "fp32_adapters", "tests/engine/test_quantized.py"],
}


def main() -> int:
    """Return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=_ON_CUDA, default="engine")
    part = parser.parse_args().part
    chosen = (_ON_CUDA if device() == "cuda" else _ON_CPU)[part]
    paths = [str(ROOT / one) if one.startswith("tests/") else one for one in chosen]
    file = results_folder() / ("correctness.xml" if part == "engine" else f"correctness-{part}.xml")
    options = [f"--rootdir={ROOT}", "-v", "-rfs", "--tb=short", f"--junitxml={file}"]
    if device() == "cuda":
        options += [f"--timeout={_HUNG_S}", "-o", f"faulthandler_timeout={_LOOKED_AT_S}"]
    return int(pytest.main([*options, *paths]))


if __name__ == "__main__":
    sys.exit(main())
