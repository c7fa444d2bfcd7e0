"""Loads the test device before anything runs backward: torch starts its backward threads once, for the devices it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import simdevice

_REASON = simdevice.unavailable_reason()
if _REASON is None:
    simdevice.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _REASON is None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=_REASON))
