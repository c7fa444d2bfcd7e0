"""Loading of the test device before any backward pass: torch starts backward threads once, for the devices it knows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import simdevice

_REASON = simdevice.unavailable_reason()
if _REASON is None:
    simdevice.load()


@pytest.fixture(autouse=True)
def _no_limit_left_over() -> Iterator[None]:
    yield
    limited = [index for index in range(4) if simdevice.stats(index)["limit"] >= 0]
    for index in limited:
        simdevice.set_limit(None, index)
    if limited:
        gc.collect()  # what errors held


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _REASON is None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=_REASON))
