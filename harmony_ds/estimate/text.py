"""Text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

_WIDTH, _LABEL = 80, 13


def labelled(label: str, text: str) -> str:
    """Return `text` beside its label."""
    return fill(f"{label:<{_LABEL}}{text}", _WIDTH, subsequent_indent=" " * _LABEL, break_on_hyphens=False)


def wrapped(text: str, indent: str = "") -> str:
    return fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: the first column to the left, the others to the right."""
    padded = []
    for number, column in enumerate(zip(head, *rows, strict=True)):
        width, align = max(map(len, column)), ">" if number else "<"
        padded.append([f"{cell:{align}{width}}" for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))
