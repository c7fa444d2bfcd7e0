"""The line of the program that has called the engine: the innermost one that is neither ours nor torch's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_OURS = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


def calling_line() -> tuple[str, int, int]:
    """Return the file, the number of its line, and how many frames of the stack are below it, this function's included."""
    level, frame = 0, sys._getframe()
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, level
