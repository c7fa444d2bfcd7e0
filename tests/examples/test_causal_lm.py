"""examples/causal_lm, small: three scripts, one training."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "causal_lm"


@pytest.fixture
def size(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40, encoding="utf-8")
    return ["--steps", "4", "--layers", "2", "--hidden", "16", "--tokens", "32", "--text", str(text)]


def losses_in(said: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+ loss ([\d.]+)$", said, re.MULTILINE)]


def test_the_three_ways_train_alike(
    size: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run two scripts in this process, and the one that replaces deepspeed in a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    here = []
    for way in ("loop", "trainer"):
        script = str(FOLDER / f"train_{way}.py")
        monkeypatch.setattr(sys, "argv", [script, *size])
        runpy.run_path(script, run_name="__main__")
        here.append(losses_in(capsys.readouterr().out))
    loop, trainer = here
    accelerate = apart("train_accelerate.py", size, tmp_path)
    assert len(loop) == 4 and loop[-1] < loop[0]
    assert accelerate == loop
    assert trainer == pytest.approx(loop, rel=1e-4)


def apart(script: str, size: list[str], folder: Path) -> list[float]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *size],
        capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return losses_in(done.stdout)
