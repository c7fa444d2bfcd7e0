"""Caches among a layer's arguments: those that can be emptied again are handed on, others left out."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from harmony_ds.calls.caches import extract_caches, restore_caches, snapshot_caches
from harmony_ds.calls.intercept import Request


class OfAnotherKindCache:
    """As some models have them (Reformer's buckets): no slots that could be emptied."""

    __module__ = "transformers.models.another"


class OwnCache:
    """The program's own, which only has the name in common."""

    def __init__(self) -> None:
        self.table = torch.ones(3)


def request(*args: Any, **kwargs: Any) -> Request:
    return Request(0, nn.Identity(), args, kwargs, contextvars.copy_context(), True, None)


def test_a_cache_of_another_kind_is_left_out_by_whatever_name_it_comes() -> None:
    cache, hidden = OfAnotherKindCache(), torch.ones(2)
    for call in (request(hidden, cache), request(hidden, past_key_values=cache), request(hidden, buckets=cache)):
        values, empty = extract_caches(call)
        assert values[0] is hidden
        assert values[1:] == [None]
        assert empty == {}


@pytest.mark.parametrize(
    "given", [OwnCache(), ((torch.ones(2), torch.ones(2)),), None], ids=["object", "trained prefix", "nothing"]
)
def test_what_the_program_made_itself_is_an_argument_like_any_other(given: Any) -> None:
    for call in (request(torch.ones(2), given), request(torch.ones(2), past_key_values=given)):
        values, empty = extract_caches(call)
        assert values[1] is given
        assert empty == {}


def test_a_cache_with_slots_stays_and_is_empty_again_behind_the_call() -> None:
    cache = DynamicCache()
    values, empty = extract_caches(request(torch.ones(2), past_key_values=cache, use_cache=True))
    assert values[1:] == [cache, False]
    assert empty == {1: cache}
    held = snapshot_caches(empty.values())
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert cache.get_seq_length() == 2
    restore_caches(held)
    assert cache.get_seq_length() == 0
