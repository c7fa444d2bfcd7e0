"""Pages, docstrings, comments and messages have no sentence that a reader has to decode: see `english`."""

from __future__ import annotations

import pytest

from tests.docs.english import CHECKED, in_python, in_text, offences


def test_nothing_has_to_be_decoded() -> None:
    found = list(offences(CHECKED))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ['"""What it is."""\n', '"""A."""\n\n\ndef f() -> None:\n    """Those that wait."""\n']
)
def test_an_opening_is_found(text: str) -> None:
    assert len(list(in_python(text))) == 1


def test_a_place_for_a_time_is_found() -> None:
    assert len(list(in_text("one thing behind another\nand one after it"))) == 1
