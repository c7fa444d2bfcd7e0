"""The recorder of allocations sees what operations make, how large it is, and when its last reference goes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

from harmony_ds.device.allocation_trace import AllocationTrace
from harmony_ds.device.live_bytes import LiveBytes
from tests import quantized

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


def test_copies_of_host_tensors_are_uploads() -> None:
    events: Pairs = []
    trace = AllocationTrace("meta")
    with trace, trace.recording(events):
        inputs = torch.ones(4)
        uploaded = inputs.to("meta")
        also = torch.empty_like(inputs, device="meta").copy_(inputs)
        computed = uploaded + also
        assert trace.uploads == [*trace.numbers([uploaded, also])]
    assert len(events) == 3 and computed.is_meta


def test_what_a_kernel_takes_for_itself_ends_at_once() -> None:
    """The backward pass of an embedding of many indices, on a GPU."""
    events: Pairs = []
    trace = AllocationTrace("meta")
    with trace, trace.recording(events):
        gradient, indices = torch.ones(4096, 8, device="meta"), torch.ones(4096, dtype=torch.long, device="meta")
        torch.ops.aten.embedding_dense_backward(gradient, indices, 10, -1, False)
    (number, nbytes), end = events[-3:-1] if events[-1][1] == 0 and events[-1][0] < events[-2][0] else events[-2:]
    assert nbytes == 4096 * (4 * 8 + 6 * 8) and end == (number, 0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_an_operator_of_functions_is_one_operation() -> None:
    events: Pairs = []
    trace, counter = AllocationTrace("cpu"), LiveBytes(counts_scratch=True)
    queries = torch.ones(1, 2, 128, 16)
    with counter, trace, trace.recording(events):
        attended = flex_attention(queries, queries, queries)
    assert sorted(nbytes for _, nbytes in events if nbytes)[-1] == attended.nbytes  # type: ignore[union-attr]
    assert counter.peak_bytes() >= attended.nbytes  # type: ignore[union-attr]


def most_bytes(changes: list[int]) -> int:
    """The most bytes in use at once, of requests and frees (negative)."""
    now = most = 0
    for nbytes in changes:
        now += nbytes
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "kind",
    [
        "hand-written wrapper",
        "integer parameter, read in backward",
        "bitsandbytes NF4, double",
        "torchao int8",
        "torchao NF4",
    ],
)
def test_layers_of_quantized_weights_are_recorded_as_the_allocator_sees_them(kind: str) -> None:
    """Dequantized weights, too, of whatever class the packed ones are."""
    layer = quantized.build(kind, layers=1).model.layers[0].mlp.down_proj

    def run() -> None:
        inputs = torch.ones(2, 3, 2 * quantized.WIDTH, requires_grad=True)
        layer(inputs).sum().backward()
        layer.zero_grad()

    run()
    events: Pairs = []
    trace = AllocationTrace("cpu")
    with trace, trace.recording(events):
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    in_use: dict[int, int] = dict(event for event in events if event[1])
    recorded = [nbytes or -in_use[number] for number, nbytes in events]
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    allocated = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    assert most_bytes(recorded) == pytest.approx(most_bytes(allocated), rel=0.02)
