"""The map of the code in docs/architecture.md is the code's: `python -m tests.docs.test_architecture` draws it anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "harmony_ds"


def first_sentence(file: Path) -> str:
    """What a file says of itself: its docstring up to the first full stop or blank line."""
    text = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def rooms() -> Iterator[tuple[str, list[Path]]]:
    yield "the package itself", sorted(PACKAGE.glob("*.py"))
    for folder in sorted({file.parent for file in PACKAGE.rglob("*.py")} - {PACKAGE}):
        yield f"`{folder.relative_to(PACKAGE)}/`", sorted(folder.glob("*.py"))


def files() -> str:
    """Every file under its room."""
    lines: list[str] = []
    for room, inside in rooms():
        about = next((first_sentence(file) for file in inside if file.name == "__init__.py"), "")
        lines += [f"**{room}**: {about}", "", "| file | |", "|---|---|"]
        lines += [f"| `{file.name}` | {first_sentence(file)} |" for file in inside if file.name != "__init__.py"]
        lines.append("")
    return "\n".join(lines)


def layers() -> str:
    """The contract of imports, the lowest room first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    plain = [re.sub(r"[()]", "", name).replace(" | ", ", ") for name in reversed(names)]
    return "    " + "\n    < ".join(plain)


def drawn(page: str) -> str:
    for mark, text in (("layers", layers()), ("files", files())):
        between = f"<!-- {mark} -->\n\n{text}\n\n<!-- /{mark} -->"
        page = re.sub(rf"<!-- {mark} -->.*?<!-- /{mark} -->", lambda _, new=between: new, page, flags=re.S)
    return page


def test_the_map_is_the_code() -> None:
    assert drawn(PAGE.read_text()) == PAGE.read_text(), "python -m tests.docs.test_architecture draws the map anew"


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE.read_text()))
    there = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")}
    assert {name for name in named if not any(file == name or file.endswith("/" + name) for file in there)} == set()


def test_no_two_files_import_each_other() -> None:
    """While they are loaded: what is only for types, or imported in a function, is not counted."""
    names = {name_of(file) for file in PACKAGE.rglob("*.py")}
    imports = {name_of(file): set(imported_by(file, names)) for file in PACKAGE.rglob("*.py")}
    both = {(a, b) for a, found in imports.items() for b in found if a < b and a in imports.get(b, ())}
    assert both == set()


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_by(file: Path, names: set[str]) -> Iterator[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module in names:
            files = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (file if file in names else node.module for file in files)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
