"""docs/architecture.md and the code agree: its rooms, its files, its order of imports."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.docs.house import PACKAGE, ROOT

PAGE = ROOT / "docs" / "architecture.md"


def test_the_drawing_is_the_order_of_imports() -> None:
    lines = [line[:32] for line in PAGE.read_text().splitlines() if line.startswith("    ")]
    drawn = [sorted(re.findall("[a-z]+", line)) for line in lines if not line.startswith("    --")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert drawn == [sorted(re.findall("[a-z]+", layer)) for layer in layers]


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE.read_text()))
    there = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")}
    assert {name for name in named if not any(file == name or file.endswith("/" + name) for file in there)} == set()


def test_no_two_files_import_each_other() -> None:
    """Imports for types alone, and imports in functions, are not counted."""
    names = {name_of(file) for file in PACKAGE.rglob("*.py")}
    imports = {name_of(file): set(imported_by(file, names)) for file in PACKAGE.rglob("*.py")}
    both = {(a, b) for a, found in imports.items() for b in found if a < b and a in imports.get(b, ())}
    assert both == set()


def name_of(file: Path) -> str:
    """Return the dotted name of a module."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_by(file: Path, names: set[str]) -> Iterator[str]:
    """Yield the modules among `names` that a file imports at its top level."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module in names:
            files = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (file if file in names else node.module for file in files)
