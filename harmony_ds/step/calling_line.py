"""The line of the program that has called the engine: the innermost one that is neither ours nor an installed library's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = str(Path(torch.__file__).parent.parent)


def calling_line() -> tuple[str, int, int]:
    """Return the file, the number of its line, and how many frames of the stack are below it, this function's included.

    Where installed libraries alone are on the stack, it is the innermost line of one that is not torch.
    """
    return _innermost((_OURS, _LIBRARIES)) or _innermost((_OURS, _TORCH)) or ("", 0, 1)


def _innermost(passed_over: tuple[str, ...]) -> tuple[str, int, int] | None:
    """Return the innermost line outside these folders, for the caller of `calling_line`."""
    level, frame = 0, sys._getframe(1)
    while frame.f_code.co_filename.startswith(passed_over):
        if frame.f_back is None:
            return None
        level, frame = level + 1, frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, level
