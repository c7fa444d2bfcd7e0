"""Format text and tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

_WIDTH = 80


def wrapped(text: str, indent: str = "") -> str:
    return fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without the columns that are empty: the first to the left, the others to the right."""
    padded = []
    for number, column in enumerate(column for column in zip(head, *rows, strict=True) if any(column[1:])):
        width, align = max(map(len, column)), ">" if number else "<"
        rule = f"{'-' * (width - 1)}:" if number else "-" * width
        padded.append([f"{column[0]:{align}{width}}", rule, *(f"{cell:{align}{width}}" for cell in column[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*padded, strict=True))
