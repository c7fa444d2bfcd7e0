"""examples/causal_lm, small: three scripts, one training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "causal_lm"


def losses(script: str, folder: Path) -> list[float]:
    text = folder / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40, encoding="utf-8")
    size = ["--steps", "4", "--layers", "2", "--hidden", "16", "--tokens", "32", "--text", str(text)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *size],
        capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(value) for value in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, re.MULTILINE)]


def test_the_three_ways_train_alike(tmp_path: Path) -> None:
    loop, trainer, accelerate = (losses(f"train_{way}.py", tmp_path) for way in ("loop", "trainer", "accelerate"))
    assert len(loop) == 4 and loop[-1] < loop[0]
    assert accelerate == loop
    assert trainer == pytest.approx(loop, rel=1e-4)
