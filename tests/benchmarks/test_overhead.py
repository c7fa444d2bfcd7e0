"""The overhead benchmark knows the package's files."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "benchmarks" / "overhead" / "profile_parts.py"


def named(table: str) -> list[str]:
    """The keys of one of its tables."""
    tree = ast.parse(PARTS.read_text())
    (found,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == table]
    assert isinstance(found, ast.Dict)
    return [ast.literal_eval(key) for key in found.keys if key is not None]


def test_every_file_that_time_is_counted_to_is_there() -> None:
    rooms = {folder.name for folder in (ROOT / "harmony_ds").iterdir() if folder.is_dir()}
    ours = [key for key in (*named("_MODULES"), *named("_FUNCTIONS")) if key.partition("/")[0] in rooms]
    assert len(ours) > 20
    assert [key for key in ours if not (ROOT / "harmony_ds" / key).exists()] == []
