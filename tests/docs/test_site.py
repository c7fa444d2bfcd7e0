"""The site can be built: every page, every file, every public name, and no dead link between them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import DOCUMENTS, ROOT


@pytest.mark.skipif(find_spec("pdoc") is None, reason="the extra docs is not installed")
def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    from tests.docs import site

    site.build(tmp_path, quick=True)  # `reference` asserts that the public names are there

    pages = [tmp_path / page.relative_to(ROOT).with_suffix(".html") for page in DOCUMENTS]
    assert all(
        page.is_file() for page in [*pages, tmp_path / "docs" / "files.html", tmp_path / "api" / "harmony_ds.html"]
    )
    for page in pages:
        for link in re.findall(r'href="([^"#:]+\.html)', page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file(), f"{page.name} links to {link}"
