"""What all tests share.

One thread: the models are tiny, and torch's threads wait for each other by spinning, thirty times longer when other
programs run. The same examples at every run: hypothesis draws them from the tests' own names, and none is late.
"""

import gc

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("tests", derandomize=True, deadline=None, max_examples=50, database=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_is_not_garbage() -> None:
    """torch and transformers are half a million objects: looking through them takes a fifth of an engine's test."""
    gc.collect()
    gc.freeze()
