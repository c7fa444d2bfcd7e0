"""Which line of the program errors and warnings name."""

from __future__ import annotations

from pathlib import Path

import torch

from harmony_ds.step import calling_line as module
from harmony_ds.step.calling_line import calling_line


def called_by(file: Path, *callers: Path) -> tuple[str, int, int]:
    """Return the calling line where code of `file` asks for it, which code of each of the `callers` has called in turn."""
    function = calling_line
    for path in (file, *callers):
        scope: dict[str, object] = {"call": function}
        exec(compile("def next_call():\n    return call()\n", str(path), "exec"), scope)
        function = scope["next_call"]  # type: ignore[assignment]
    return function()


SITE = Path(torch.__file__).parent.parent
ENGINE = Path(module.__file__).parent.parent / "engine.py"


def test_the_line_is_the_users_own_where_a_library_calls_the_engine_for_it() -> None:
    found = called_by(ENGINE, SITE / "transformers" / "trainer.py", Path("/home/me/train.py"))
    assert found[:2] == ("/home/me/train.py", 2)


def test_the_innermost_of_the_users_lines_is_named() -> None:
    loss, loop = Path("/home/me/loss.py"), Path("/home/me/train.py")
    assert called_by(ENGINE, loss, SITE / "transformers" / "trainer.py", loop)[:2] == (str(loss), 2)
