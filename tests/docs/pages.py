"""The runnable parts of pages: Python and JSON in fences, and shell commands anywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))
FURTHER = [
    *sorted((ROOT / "benchmarks").glob("*/README.md")),
    *(
        ROOT / name
        for name in ("CONTRIBUTING.md", "CHANGELOG.md", "ds_configs/README.md", "tests/exactness/outcomes.md")
    ),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = "harmony-ds|python3?|make|pip|pytest"
_SHELL = re.compile(rf"^ *((?:{_PROGRAMS}) [^`\n]+?)(?:  +#.*| *\| .*)?$|`((?:{_PROGRAMS}) [^`]+)`", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A part of a page, and the line on which it begins."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fenced(page: Path, language: str) -> list[Snippet]:
    """Return the fences of a language on a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(page, text[: found.start()].count("\n") + 2, found[2])
        for found in _FENCE.finditer(text)
        if found[1] == language
    ]


def shell_lines(page: Path) -> list[Snippet]:
    """Return every command on a page, in a block or between backticks, without comments and pipes."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(page, text[: found.start()].count("\n") + 1, " ".join((found[1] or found[2]).split()))
        for found in _SHELL.finditer(text)
    ]
