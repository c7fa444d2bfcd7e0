"""Call orders are merged so that both are kept; sizes are those of aligned slabs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.decomposer.graph import ParameterSpec, merge_calls, positions_of, slab_bytes

CALLS = st.lists(st.integers(0, 6), max_size=12).map(tuple)


def is_subsequence(part: Iterable[int], whole: Iterable[int]) -> bool:
    rest = iter(whole)
    return all(element in rest for element in part)


@given(CALLS, CALLS)
def test_both_orders_are_subsequences_of_their_merge(known: tuple[int, ...], seen: tuple[int, ...]) -> None:
    merged = merge_calls(known, seen)

    assert is_subsequence(known, merged)
    assert is_subsequence(seen, merged)
    assert len(merged) <= len(known) + len(seen)


@given(CALLS)
def test_merging_an_order_with_itself_or_with_nothing_changes_nothing(calls: tuple[int, ...]) -> None:
    assert merge_calls(calls, calls) == merge_calls(calls, ()) == merge_calls((), calls) == calls


@given(CALLS, st.data())
def test_an_order_that_skips_calls_adds_none(calls: tuple[int, ...], data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.integers(0, max(len(calls) - 1, 0))))
    distinct = tuple(dict.fromkeys(calls))
    skipping = tuple(layer for place, layer in enumerate(distinct) if place in kept)

    assert merge_calls(distinct, skipping) == distinct


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_orders_that_follow_the_indices_stay_so(known: set[int], seen: set[int]) -> None:
    assert merge_calls(tuple(sorted(known)), tuple(sorted(seen))) == tuple(sorted(known | seen))


@pytest.mark.parametrize(
    ("known", "seen", "merged"),
    [
        ((0, 1, 3), (0, 2, 3), (0, 1, 2, 3)),
        ((0, 2, 3), (0, 1, 3), (0, 1, 2, 3)),
        ((0, 0), (0, 0, 0), (0, 0, 0)),
        ((2, 1), (3, 0), (2, 1, 3, 0)),
        ((0, 1), (1, 0), (1, 0, 1)),
    ],
)
def test_merge_by_hand(known: tuple[int, ...], seen: tuple[int, ...], merged: tuple[int, ...]) -> None:
    assert merge_calls(known, seen) == merged


@given(CALLS, CALLS)
def test_positions_lead_back_to_the_calls(known: tuple[int, ...], seen: tuple[int, ...]) -> None:
    merged = merge_calls(known, seen)
    for calls in (known, seen):
        positions = positions_of(calls, merged)
        assert tuple(merged[p] for p in positions) == calls
        assert list(positions) == sorted(set(positions))


def test_positions_are_the_earliest() -> None:
    assert positions_of((1, 1, 2), (0, 1, 2, 1, 2, 2)) == (1, 3, 4)


@pytest.mark.parametrize("calls", [(3,), (1, 0), (0, 0)])
def test_positions_of_calls_that_are_no_subsequence_are_an_error(calls: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        positions_of(calls, (0, 1, 2))


@pytest.mark.parametrize(
    ("numel", "itemsize", "nbytes"),
    [(0, 4, 0), (1, 4, 64), (16, 4, 64), (17, 4, 128), (32, 2, 64), (33, 2, 128), (1, 8, 64)],
)
def test_slab_bytes_by_hand(numel: int, itemsize: int, nbytes: int) -> None:
    assert slab_bytes(numel, itemsize) == nbytes


def test_a_packed_parameter_takes_the_bytes_that_it_is_stored_in():
    plain = ParameterSpec("w", (3, 7), trainable=False)
    packed = replace(plain, stored_bytes=192)
    assert (plain.weight_bytes(2), plain.weight_bytes(4)) == (64, 128)
    assert (packed.weight_bytes(2), packed.weight_bytes(4)) == (192, 192)
