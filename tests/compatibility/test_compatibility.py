"""Both engines are asked every row; what differs is known: docs/compatibility.md says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.record import brief
from tests.compatibility.report import PAGE, WHY, document, left_out, split
from tests.compatibility.run import ask_both

Outcomes = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, Outcomes]:
    both = ask_both(Path(tmp_path_factory.mktemp("outcomes")))
    return both["deepspeed"], both["harmony_ds"]


def test_rows_are_the_same_unless_the_page_gives_a_reason(outcomes: tuple[Outcomes, Outcomes]) -> None:
    theirs, ours = outcomes
    equal, different = split(theirs, ours)
    told = {name: (brief(theirs.get(name)), brief(ours.get(name))) for name in set(different) ^ WHY.keys()}

    assert not told
    assert f"the same {len(equal) + len(different)} questions" in PAGE.read_text()
    assert f"answer {len(equal)} alike" in PAGE.read_text()


def test_the_page_of_every_answer_has_every_row(outcomes: tuple[Outcomes, Outcomes]) -> None:
    equal, different = split(*outcomes)
    text = document(*outcomes)

    assert all(f"| {name} | " in text for name in (*equal, *different))
    assert all(line in text for line in left_out(*outcomes))
    assert "unexplained" not in text
