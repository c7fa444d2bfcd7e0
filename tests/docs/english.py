"""Find sentences that a reader has to decode: `python -m tests.docs.english [PATH ...]`.

Two rules that a program can check. A docstring begins with a verb in the imperative or a noun phrase (ruff's D401 checks
the verb), never with one of `OPENINGS`; and nothing is "behind" or "in front of" something else, on a page, in a docstring,
a comment or a message: it comes after or before it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKED = [
    ROOT / name
    for name in "harmony_ds benchmarks examples docs ds_configs README.md CONTRIBUTING.md CHANGELOG.md".split()
]
OPENINGS = {"what", "of", "where", "as", "those", "whatever", "whoever"}
_PLACES = re.compile(r"\bbehind\b|\bin front of\b", re.IGNORECASE)


def offences(paths: Sequence[Path]) -> Iterator[str]:
    """Yield `file:line: reason: text` for every offence in Python files and pages under `paths`."""
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix == ".py":
                yield from (f"{file}:{line}: {what}" for line, what in sorted(in_python(file.read_text())))
            elif file.suffix == ".md" and "results" not in file.parts:
                yield from (f"{file}:{line}: {what}" for line, what in in_text(file.read_text()))


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and reason of every offence in a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip("`*,").lower() in OPENINGS:
                yield node.body[0].lineno, f"begins with {words[0]}: {' '.join(words[:12])}"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield from ((token.start[0] + line - 1, what) for line, what in in_text(token.string))


def in_text(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and reason of every offence in running text."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _PLACES.search(line):
            yield number, f'"{found[0]}": {line.strip()[:120]}'


def main() -> None:
    """Print all offences, and exit with 1 if there is any."""
    found = list(offences([Path(path) for path in sys.argv[1:]] or CHECKED))
    print(*found, f"{len(found)} offences", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
