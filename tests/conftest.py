"""Fixtures of all tests.

One thread: the models are tiny, and torch's threads wait for each other by spinning, thirty times longer when other
programs run. The same examples at every run: hypothesis draws them from the tests' own names, and none is late.
"""

import gc
import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests import depth, patches
from tests.processor import ask_it_once

torch.set_num_threads(1)
ask_it_once()
settings.register_profile("tests", derandomize=True, deadline=None, max_examples=50, database=None)
settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    depth.mark_deep(items, config.rootpath)


@pytest.fixture(autouse=True)
def _patched_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    patches.check_every_step(monkeypatch.setattr)
    if request.node.get_closest_marker("real_collections") is None:
        patches.leave_collections(monkeypatch.setattr)
    if request.node.get_closest_marker("real_rates") is None:
        patches.fix_rates(monkeypatch.setattr)
    if request.node.get_closest_marker("fixed_times") is not None:
        patches.fix_times(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Programs that run in this process set what is logged: a ds_config's "log_level", a benchmark's `logging.disable`."""
    package, root = logging.getLogger("harmony_ds"), logging.getLogger().manager
    level, disabled = package.level, root.disable
    yield
    package.setLevel(level)
    root.disable = disabled


SET_ASIDE = [0]
"""How many modules were there when the collector was last told to leave them alone."""


@pytest.fixture(autouse=True)
def _what_is_imported_is_not_garbage() -> None:
    """torch and transformers are half a million objects: looking through them takes a fifth of an engine's test.

    They come one by one, in the middle of tests: transformers imports a model's code when it is asked for, torch its
    compiler when it makes the first optimizer.
    """
    if len(sys.modules) > SET_ASIDE[-1]:
        gc.collect()
        gc.freeze()
        SET_ASIDE.append(len(sys.modules))
