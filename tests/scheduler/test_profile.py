"""A profile interpolates, survives JSON, and notices that it was made for something else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from harmony_ds import ProfileError
from harmony_ds.scheduler.costs import CallCost, CostTable, WaitingBytes
from harmony_ds.scheduler.profile import Profile
from tests.scheduler.examples import GPU

SMALL = CostTable(
    (0, 1),
    (CallCost(WaitingBytes(10), forward_ms=1.0, needs_backward=True), CallCost(WaitingBytes(20))),
    tail_bytes=5,
    tail_ms=0.5,
)
LARGE = CostTable(
    (0, 1),
    (CallCost(WaitingBytes(31), forward_ms=3.0, needs_backward=True), CallCost(WaitingBytes(40))),
    tail_bytes=9,
    tail_ms=1.5,
)
PROFILE = Profile(GPU, ((1, SMALL), (4, LARGE)), {"model": "m", "torch": "2"})


def test_sizes_that_were_measured_are_given_as_measured() -> None:
    assert PROFILE.at(1) == SMALL
    assert PROFILE.at(4) == LARGE
    assert PROFILE.calls == (0, 1)


def test_between_sizes_times_are_interpolated_and_bytes_rounded_up() -> None:
    between = PROFILE.at(2)

    assert between.costs[0].forward_ms == pytest.approx(1.0 + 2 / 3)
    assert between.costs[0].waiting.alive_bytes == 17
    assert between.costs[0].needs_backward is True
    assert between.tail_bytes == 7
    assert between.tail_ms == pytest.approx(0.5 + 1 / 3)
    assert between.calls == (0, 1)


def test_below_the_smallest_size_it_bounds_and_above_the_largest_is_an_error() -> None:
    assert replace(PROFILE, tables=((2, SMALL),)).at(1) == SMALL
    with pytest.raises(ProfileError, match="up to 4 rows were profiled, but the plan is wanted for 5"):
        PROFILE.at(5)


def test_it_survives_json() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE


def test_another_format_and_other_files_are_named() -> None:
    data = json.loads(PROFILE.to_json())
    with pytest.raises(ProfileError, match=f"has format 99, this version reads {data['format']}:"):
        Profile.from_json(json.dumps({**data, "format": 99}))
    for text in ("{}", "[]", "no json", json.dumps({**data, "machine": {"name": "x"}})):
        with pytest.raises(ProfileError, match="no profile of harmony_ds"):
            Profile.from_json(text)


def test_a_foreign_profile_says_what_differs() -> None:
    PROFILE.check({"model": "m", "torch": "2"})
    with pytest.raises(ProfileError, match=r"torch was '2' and is '3' now"):
        PROFILE.check({"model": "m", "torch": "3"})


def test_the_slower_of_two_machines_in_every_respect() -> None:
    a = replace(GPU, swap_in_bytes_per_ms=1.0, swap_ms=2.0, update_ms=0.0, device_bytes=None)
    b = replace(
        GPU, swap_in_bytes_per_ms=9.0, swap_ms=1.0, update_ms=5.0, device_bytes=7, name="b", copies_overlap=False
    )

    assert a.slower(a) == a
    assert a.slower(b) == replace(a, update_ms=5.0, device_bytes=7, copies_overlap=False)
    assert b.slower(a) == replace(a.slower(b), name="b")


@pytest.mark.parametrize(
    ("peer", "overlaps", "shared"), [(90.0, True, True), (300.0, True, False), (90.0, False, False)]
)
def test_peers_no_faster_than_the_link_are_taken_to_share_it(peer: float, overlaps: bool, shared: bool) -> None:
    machine = replace(GPU, swap_out_bytes_per_ms=100.0, copies_overlap=overlaps).with_peers(peer, 0.5)

    assert (machine.peer_bytes_per_ms, machine.peer_ms, machine.peers_share_link) == (peer, 0.5, shared)
