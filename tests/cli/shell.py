"""The command line as a shell sees it, in this process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

from harmony_ds.cli.app import run as run_app


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(*arguments: str) -> Result:
    """Run `harmony-ds` with `arguments`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run_app(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Result(code, out.getvalue(), err.getvalue())
