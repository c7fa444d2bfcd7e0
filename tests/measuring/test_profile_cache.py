"""A profile's file is whole whoever reads it, and whoever else writes it."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from harmony_ds.device import CpuDevice
from harmony_ds.measuring.profile_cache import ProfileFile
from harmony_ds.profiler.profile import Profile
from tests.scheduler.examples import CPU, costs_of, graph_of


def test_two_processes_that_write_at_once_both_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, path = graph_of([4, 4]), tmp_path / "profile.json"
    file = ProfileFile(path, graph, "float32", CpuDevice(None))
    profile = Profile(CPU, ((1, costs_of(graph.calls)),), file.key(graph.calls, ()))
    replaced, pids = Path.replace, count(100)
    monkeypatch.setattr(os, "getpid", lambda: next(pids))

    def in_between(beside: Path, target: Path) -> Path:
        """Another process has written, and renamed, since this one has written."""
        monkeypatch.setattr(Path, "replace", replaced)
        file.save(profile)
        return replaced(beside, target)

    monkeypatch.setattr(Path, "replace", in_between)
    file.save(profile)
    assert file.load(profile.key) == profile
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]
