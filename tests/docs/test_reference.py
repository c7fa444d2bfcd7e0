"""The reference can be made, and is whole."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("pdoc") is None, reason="the extra docs is not installed")
def test_the_reference_has_every_public_name_and_no_dead_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.docs.reference", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "harmony_ds.html").is_file()
