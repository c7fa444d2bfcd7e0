"""Collections within a step go through what the step has made, and leave the process as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from harmony_ds.runtime.garbage import collection_within_steps, only_new_garbage


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """The tests' process has frozen what it began with (see conftest.py)."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_new_garbage_is_collected_and_old_garbage_waits() -> None:
    gc.collect()
    gc.disable()
    try:
        old = weakref.ref(Cycle())
        with only_new_garbage():
            new = weakref.ref(Cycle())
            gc.collect()
            assert new() is None
            assert old() is not None
        gc.collect()
        assert old() is None
    finally:
        gc.enable()


def test_what_was_frozen_is_thawed_also_after_an_error() -> None:
    seen = []

    @only_new_garbage()
    def fail() -> None:
        seen.append(gc.get_freeze_count())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen[0] and not gc.get_freeze_count()


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    assert collection_within_steps() is only_new_garbage
    gc.freeze()
    try:
        with collection_within_steps()():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
