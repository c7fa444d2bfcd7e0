"""What the suite's commands share: where results go, and which device there is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from harmony_ds.bench.results import environment

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def device() -> str:
    """Without CUDA every command runs on the CPU device, at a small size."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def results_folder() -> Path:
    """`benchmarks/results/gpu`, or `.../gpu-dry-run` without a GPU; $OUT instead of `benchmarks/results` if it is set."""
    folder = Path(os.environ.get("OUT") or RESULTS) / ("gpu" if device() == "cuda" else "gpu-dry-run")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(name: str, content: dict[str, Any]) -> Path:
    """JSON with the environment it was measured in."""
    path = results_folder() / f"{name}.json"
    script = " ".join(["python", *sys.argv])
    found = {**environment(device()), "command": script}
    path.write_text(json.dumps({"environment": found, **content}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return path
