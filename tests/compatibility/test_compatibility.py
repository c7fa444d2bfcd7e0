"""Both engines are asked every row; what differs is known, and the document says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.record import brief, same
from tests.compatibility.report import NOT_THERE, WHY, left_out, split
from tests.compatibility.run import DOCUMENT, ask_both

Outcomes = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, Outcomes]:
    both = ask_both(Path(tmp_path_factory.mktemp("outcomes")))
    return both["deepspeed"], both["harmony_ds"]


def test_rows_are_the_same_unless_a_reason_is_given(outcomes: tuple[Outcomes, Outcomes]) -> None:
    theirs, ours = outcomes
    equal, different, missing = split(theirs, ours)
    told = {name: (brief(theirs[name]), brief(ours[name])) for name in {*different, *missing} ^ {*WHY, *NOT_THERE}}

    assert not told
    assert len(theirs) >= 80
    assert len(equal) >= 70


def test_the_document_is_up_to_date(outcomes: tuple[Outcomes, Outcomes]) -> None:
    equal, different, missing = split(*outcomes)
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [name.strip() for name in re.findall(r"^\| (.*?) \| ", text, re.MULTILINE) if name.strip() != "row"]

    for line in left_out(*outcomes):
        assert line in text, "python -m tests.compatibility.run"
    assert rows == [*different, *missing, *equal], "python -m tests.compatibility.run"


def test_what_is_the_same() -> None:
    assert same(1.0, 1.000001)
    assert not same(1.0, 1.001)
    assert not same(True, 1)
    assert same([1, {"a": "x"}], [1, {"a": "x"}])
    assert not same([1], [1, 2])
    assert not same({"a": 1}, {"b": 1})
    assert not same(None, 0)
    theirs = {"error": "AssertionError", "caught_as": ["AssertionError"], "says": True, "text": "no"}
    assert same(theirs, {**theirs, "error": "Own", "caught_as": ["AssertionError", "ValueError"]})
    assert not same(theirs, {**theirs, "caught_as": ["ValueError"]})
    assert not same(theirs, {**theirs, "says": False})
    assert not same(theirs, 1)
