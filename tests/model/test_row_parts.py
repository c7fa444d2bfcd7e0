"""Parts of a tensor along its rows: joined again without a copy, as long as nothing has changed them."""

from __future__ import annotations

import copy
import pickle

import torch

from harmony_ds.model.slices import whole_of


def test_what_was_joined_is_joined_once_until_a_part_changes() -> None:
    parts = [torch.zeros(1, 2), torch.ones(1, 2)]
    whole = whole_of(parts, 0)
    assert whole_of(parts, 0) is whole
    assert whole_of(parts[::-1], 0).tolist() == [[1.0, 1.0], [0.0, 0.0]]
    parts[0].add_(2.0)
    assert whole_of(parts, 0).tolist() == [[2.0, 2.0], [1.0, 1.0]]


def test_copies_of_parts_are_parts_of_nothing() -> None:
    parts = [torch.zeros(1, 2), torch.ones(1, 2)]
    whole = whole_of(parts, 0)
    for made in ([copy.deepcopy(part) for part in parts], pickle.loads(pickle.dumps(parts))):
        assert torch.equal(whole_of(made, 0), whole)
