"""ds_configs as they are found in the wild load, or are refused by what to do about them."""

from __future__ import annotations

import pytest

from harmony_ds.config import load_config
from harmony_ds.errors import ConfigError
from tests.wild import LOADED, REFUSED


@pytest.mark.parametrize("name", LOADED)
def test_it_loads(name: str) -> None:
    load_config(LOADED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_what_to_do(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        load_config(config)
