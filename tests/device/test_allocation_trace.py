"""The recorder of allocations sees what operations make, how large it is, and when its last reference goes."""

from __future__ import annotations

import torch

from harmony_ds.device.allocation_trace import AllocationTrace

Pairs = list[tuple[int, int]]


def test_requests_and_ends_are_in_their_order() -> None:
    events: Pairs = []
    trace = AllocationTrace("cpu")
    with trace, trace.recording(events):
        first = torch.ones(4)
        second = first + 1
        view = second[:2].add_(1)  # makes nothing
        del first
        third = second.double()
        del second, view
    assert events == [(1, 16), (2, 16), (1, 0), (3, 32), (2, 0)]
    del third
    assert len(events) == 5  # what ends outside is no part of it


def test_parts_share_numbers_and_a_pause_notes_ends_alone() -> None:
    forward: Pairs = []
    backward: Pairs = []
    trace = AllocationTrace("cpu")
    with trace:
        trace.begin(forward)
        kept = torch.ones(4)
        with trace.recording(backward):
            also = kept * 2
        trace.pause()
        unseen = kept * 3
        del also, unseen
        with trace.recording(backward):
            assert trace.numbers([kept, kept.view(2, 2), None]) == (1,)
            del kept
    assert forward == [(1, 16), (2, 0)]
    assert backward == [(2, 16), (1, 0)]


def test_only_one_type_of_device_is_recorded() -> None:
    events: Pairs = []
    trace = AllocationTrace("meta")
    with trace, trace.recording(events):
        made = torch.ones(4), torch.ones(4, device="meta")
        assert trace.numbers(made) == (1,)
    assert events == [(1, 16)]


def test_what_a_kernel_takes_for_itself_ends_at_once() -> None:
    """The backward pass of an embedding of many indices, on a GPU."""
    events: Pairs = []
    trace = AllocationTrace("meta")
    with trace, trace.recording(events):
        gradient, indices = torch.ones(4096, 8, device="meta"), torch.ones(4096, dtype=torch.long, device="meta")
        torch.ops.aten.embedding_dense_backward(gradient, indices, 10, -1, False)
    (number, nbytes), end = events[-3:-1] if events[-1][1] == 0 and events[-1][0] < events[-2][0] else events[-2:]
    assert nbytes == 4096 * (4 * 8 + 6 * 8) and end == (number, 0)
