"""mkdocs builds the site without a warning, with every page and every public name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import harmony_ds
from tests.docs.pages import DOCUMENTS, ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed")


def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    from tests.docs.site import TRAINERS, methods

    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    pages = [page.relative_to(ROOT).with_suffix(".html") for page in DOCUMENTS if page.parent != ROOT]
    made = [Path(f"docs/{name}.html") for name in ("files", "keys", "answers")]
    assert [page for page in [Path("index.html"), *pages, *made] if not (tmp_path / page).is_file()] == []
    reference = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "docs" / "api").glob("*.html"))
    names = {
        *(f"harmony_ds.{name}" for name in harmony_ds.__all__ if name != "__version__"),
        *(f"harmony_ds.HarmonyEngine.{name}" for name in methods()),
        *(f"harmony_ds.integrations.transformers.{name}" for name in TRAINERS),
    }
    assert {name for name in names if f'id="{name}"' not in reference} == set()
