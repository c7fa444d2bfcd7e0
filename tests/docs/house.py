"""The map of the code: every file under its room, with the first sentence of its docstring. `make docs` writes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "harmony_ds"


def first_sentence(file: Path) -> str:
    """Return the first paragraph of a file's docstring on one line."""
    text = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def rooms() -> Iterator[tuple[str, list[Path]]]:
    """Yield the name and the files of every folder of the package."""
    yield "the package itself", sorted(PACKAGE.glob("*.py"))
    for folder in sorted({file.parent for file in PACKAGE.rglob("*.py")} - {PACKAGE}):
        yield f"`{folder.relative_to(PACKAGE)}/`", sorted(folder.glob("*.py"))


def page() -> str:
    """Return a page with one table for each room."""
    lines = ["# Every file", ""]
    for room, inside in rooms():
        about = next((first_sentence(file) for file in inside if file.name == "__init__.py"), "")
        lines += [f"## {room}", "", about, "", "| file | |", "|---|---|"]
        lines += [f"| `{file.name}` | {first_sentence(file)} |" for file in inside if file.name != "__init__.py"]
        lines.append("")
    return "\n".join(lines)
