"""Harmony's published schedules, read as the benchmark reads them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _load() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "vldb22" / "reference.py"
    spec = importlib.util.spec_from_file_location("vldb22_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _load()
CASES = [case for model in reference.LARGEST for case in reference.shipped(model)]


def case_of(model: str, name: str) -> reference.Shipped:
    return next(case for case in CASES if (case.model, case.name) == (model, name))
