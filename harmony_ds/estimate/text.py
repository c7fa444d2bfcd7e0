"""Text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill, wrap

_WIDTH, _LABEL = 80, 13


def labelled(label: str, text: str) -> str:
    """Return `text` beside its label."""
    return fill(f"{label:<{_LABEL}}{text}", _WIDTH, subsequent_indent=" " * _LABEL, break_on_hyphens=False)


def wrapped(text: str, indent: str = "") -> str:
    return fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: the first column to the left, and wrapped where it must be; the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    widths[0] = min(widths[0], _WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
    return "\n".join(line for row in (head, *rows) for line in _lines(row, widths))


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    first, *below = wrap(row[0], widths[0]) or [""]
    cells = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
    yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()
    yield from (f"  {line}" for line in below)
