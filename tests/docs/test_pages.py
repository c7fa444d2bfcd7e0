"""Every link leads to a file that is there and a heading that is on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCUMENTS, EXAMPLES, FURTHER, ROOT

PAGES = [*DOCUMENTS, *EXAMPLES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
INDEX = ROOT / "docs" / "index.md"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[str]:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    yield from (link for link in _LINK.findall(text) if not re.match(r"https?:|mailto:", link))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_the_index_leads_to_every_page() -> None:
    reached = {(INDEX.parent / link.partition("#")[0]).resolve() for link in links(INDEX)}

    assert {page for page in DOCUMENTS if page.parent == INDEX.parent} - {INDEX} <= reached


def test_the_sidebar_of_the_site_has_every_page() -> None:
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))

    assert {str(page.relative_to(ROOT)) for page in (*DOCUMENTS, *EXAMPLES, *FURTHER)} - listed == set()
