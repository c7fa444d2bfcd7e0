"""Run examples in this process: importing transformers in another takes longer than they do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def main_of(
    topic: str, monkeypatch: pytest.MonkeyPatch, script: str = "train.py", beside: Sequence[str] = ()
) -> Callable[[list[str]], Any]:
    """Return `main` of examples/<topic>/<script>; `beside` names the modules that it imports from its folder."""
    file = EXAMPLES / topic / script
    monkeypatch.syspath_prepend(str(file.parent))
    for name in beside:
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location(f"example_{topic}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    main: Callable[[list[str]], Any] = module.main
    return main


def missing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide `package` from the search for modules."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
