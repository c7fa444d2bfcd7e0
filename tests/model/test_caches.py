"""Caches among a layer's arguments: those that can be emptied again are passed on, others left out."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from harmony_ds.model.caches import extract_caches, restore_caches, snapshot_caches
from harmony_ds.model.intercept import Request


class SlotlessCache:
    """A cache like Reformer's, without slots that could be emptied."""

    __module__ = "transformers.models.another"


class ProgramCache:
    """A class of the program that only shares the name."""

    def __init__(self) -> None:
        self.table = torch.ones(3)


def request(*args: Any, **kwargs: Any) -> Request:
    return Request(0, nn.Identity(), args, kwargs, contextvars.copy_context(), True, None)


def test_a_cache_of_another_kind_is_left_out_under_any_argument_name() -> None:
    cache, hidden = SlotlessCache(), torch.ones(2)
    for call in (request(hidden, cache), request(hidden, past_key_values=cache), request(hidden, buckets=cache)):
        values, empty = extract_caches(call)
        assert values[0] is hidden
        assert values[1:] == [None]
        assert empty == {}


@pytest.mark.parametrize(
    "given", [ProgramCache(), ((torch.ones(2), torch.ones(2)),), None], ids=["object", "trained prefix", "nothing"]
)
def test_a_class_of_the_program_is_an_ordinary_argument(given: Any) -> None:
    for call in (request(torch.ones(2), given), request(torch.ones(2), past_key_values=given)):
        values, empty = extract_caches(call)
        assert values[1] is given
        assert empty == {}


def test_a_cache_with_slots_is_passed_and_emptied_after_the_call() -> None:
    cache = DynamicCache()
    values, empty = extract_caches(request(torch.ones(2), past_key_values=cache, use_cache=True))
    assert values[1:] == [cache, False]
    assert empty == {1: cache}
    held = snapshot_caches(empty.values())
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert cache.get_seq_length() == 2
    restore_caches(held)
    assert cache.get_seq_length() == 0
