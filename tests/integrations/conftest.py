"""Fixtures of several tests of clients."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.trainer import tiny


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.tokenizer()
