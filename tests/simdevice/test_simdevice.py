"""What the test device "simdev" promises to the tests that use it."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import simdevice
from tests.simdevice import DEVICE

REASON = simdevice.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    simdevice.load()
    torch.manual_seed(0)
    yield
    simdevice.set_limit(None)


class Held:
    """Bytes held, peak and traffic since this was made."""

    def __init__(self) -> None:
        gc.collect()  # what an earlier test left in a cycle must not be freed later
        self._held = simdevice.allocated_bytes()
        self._traffic = simdevice.traffic()
        simdevice.reset_peak()

    @property
    def bytes(self) -> int:
        return simdevice.allocated_bytes() - self._held

    @property
    def peak(self) -> int:
        return simdevice.peak_bytes() - self._held

    @property
    def traffic(self) -> tuple[int, int]:
        now = simdevice.traffic()
        return now[0] - self._traffic[0], now[1] - self._traffic[1]


def on_device(value: Any) -> Any:
    """The value with every tensor in it copied to the device; leaves stay leaves."""
    if isinstance(value, Tensor):
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item) for item in value)
    return value


def assert_same(actual: Any, expected: Any) -> None:
    """The device's result lies on the device and is bitwise the CPU's, layout included."""
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert actual.device.type == DEVICE
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=0, atol=0, equal_nan=True)
    else:
        assert actual == expected


def assert_as_on_cpu(function: Callable[..., Any], *arguments: Any) -> None:
    """Results, what became of the arguments, and gradients are bitwise those of the CPU."""
    copies = on_device(arguments)
    torch.manual_seed(1)
    expected = function(*arguments)
    torch.manual_seed(1)
    actual = function(*copies)
    assert_same(actual, expected)
    first, second = (r[0] if isinstance(r, tuple) else r for r in (expected, actual))
    if isinstance(first, Tensor) and first.requires_grad:
        seed = torch.randn_like(first)
        first.backward(seed)
        second.backward(seed.to(DEVICE))
    for argument, copied in zip(arguments, copies, strict=True):
        if isinstance(argument, Tensor):
            assert_same(copied, argument)
            assert (copied.grad is None) == (argument.grad is None)
            if argument.grad is not None:
                assert_same(copied.grad, argument.grad)


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


# Memory


def test_a_tensor_counts_its_bytes_until_it_is_freed() -> None:
    held = Held()
    x = torch.empty(1000, device=DEVICE)
    assert held.bytes == 4000
    y = torch.empty(10, 10, dtype=torch.bfloat16, device=DEVICE)
    assert held.bytes == 4200
    del x
    assert held.bytes == 200
    del y
    assert held.bytes == 0


def test_results_of_kernels_are_counted() -> None:
    x = torch.ones(1000, device=DEVICE)
    held = Held()
    y = x * 2
    assert held.bytes == 4000
    values, indices = y.view(10, 100).max(dim=1)
    assert held.bytes == 4000 + 40 + 80
    parts = torch.ops.aten.split_with_sizes_copy(x, [400, 600])
    assert held.bytes == 8000 + 40 + 80
    del y, values, indices, parts
    assert held.bytes == 0


def test_a_view_counts_nothing_and_keeps_its_storage() -> None:
    held = Held()
    x = torch.ones(10, 100, device=DEVICE)
    row = x[3]
    assert held.bytes == 4000
    del x
    assert held.bytes == 4000
    del row
    assert held.bytes == 0


def test_the_peak_is_the_most_held_at_once() -> None:
    held = Held()
    x = torch.empty(1000, device=DEVICE)
    y = torch.empty(500, device=DEVICE)
    del x
    z = torch.empty(100, device=DEVICE)
    assert held.peak == 6000
    simdevice.reset_peak()
    assert held.peak == held.bytes == 2400
    del y, z
    assert held.peak == 2400


def test_chained_operations_hold_what_they_hold_on_a_real_device() -> None:
    x = torch.ones(1000, device=DEVICE)
    held = Held()
    y = (x + 1).mul(2).sub_(3)
    assert (held.peak, held.bytes) == (8000, 4000)
    del y


def test_in_place_operations_allocate_nothing() -> None:
    x = torch.ones(1000, device=DEVICE)
    allocations = simdevice.stats()["allocations"]
    x.add_(1).mul_(2).zero_().fill_(3).clamp_(0, 1).normal_()
    torch.add(x, x, out=x)
    assert simdevice.stats()["allocations"] == allocations


def test_resizing_a_storage_to_nothing_frees_its_bytes() -> None:
    held = Held()
    x = torch.arange(1000.0, device=DEVICE)
    x.untyped_storage().resize_(0)
    assert held.bytes == 0
    x.untyped_storage().resize_(4000)
    assert held.bytes == 4000
    x.copy_(torch.arange(1000.0))
    assert torch.equal(x.cpu(), torch.arange(1000.0))


def test_using_freed_storage_raises_instead_of_reading_it() -> None:
    x = torch.ones(1000, device=DEVICE)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was it freed"):
        x + 1
    with pytest.raises(RuntimeError, match="was it freed"):
        x.cpu()


def test_replacing_a_parameters_data_frees_the_old() -> None:
    held = Held()
    p = nn.Parameter(torch.ones(1000, device=DEVICE))
    p.data = torch.empty(0, device=DEVICE)
    assert held.bytes == 0
    p.data = torch.ones(1000, device=DEVICE)
    assert held.bytes == 4000


def test_growing_a_tensor_keeps_what_was_in_it() -> None:
    held = Held()
    x = torch.arange(4.0, device=DEVICE)
    x.resize_(8)
    assert held.bytes == 32
    assert x[:4].tolist() == [0, 1, 2, 3]


def test_an_out_argument_is_resized_on_the_device() -> None:
    x = torch.ones(1000, device=DEVICE)
    out = torch.empty(0, device=DEVICE)
    held = Held()
    result = torch.add(x, x, out=out)
    assert result is out
    assert held.bytes == 4000
    assert out.shape == (1000,)
    assert torch.equal(out.cpu(), torch.full((1000,), 2.0))


def test_nothing_is_lost_in_training_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(5, 8).to(DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    gc.collect()
    held = Held()
    for _ in range(3):
        step()
    gc.collect()
    assert held.bytes == 0


def test_counts_are_right_under_threads() -> None:
    held = Held()

    def work() -> None:
        for _ in range(200):
            (torch.ones(100, device=DEVICE) + 1).sum()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held.bytes == 0


def test_torch_accelerator_reports_the_same_numbers() -> None:
    x = torch.empty(1000, device=DEVICE)
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert torch.accelerator.memory_allocated() == simdevice.allocated_bytes()
    assert torch.accelerator.max_memory_allocated() == simdevice.peak_bytes()
    module = torch.get_device_module(DEVICE)
    assert module.memory_allocated() == simdevice.allocated_bytes()
    simdevice.set_limit(simdevice.allocated_bytes() + 100)
    assert module.mem_get_info() == (100, simdevice.allocated_bytes() + 100)
    del x
    torch.accelerator.reset_peak_memory_stats()
    assert simdevice.peak_bytes() == simdevice.allocated_bytes()


# The limit


def test_the_limit_raises_out_of_memory_and_says_how_much() -> None:
    x = torch.empty(1000, device=DEVICE)
    used = simdevice.allocated_bytes()
    simdevice.set_limit(used + 100)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=f"asked for 404 bytes, in use {used} bytes, limit {used + 100} bytes",
    ):
        torch.empty(101, device=DEVICE)
    y = torch.empty(25, device=DEVICE)
    assert simdevice.allocated_bytes() == used + 100
    del x, y


@pytest.mark.parametrize(
    "attempt",
    [
        lambda x: x + 1,
        lambda x: x.max(dim=0),
        lambda x: x.to(torch.float64),
        lambda x: x.cpu().to(DEVICE),
        lambda x: x.resize_(20, 100),
        lambda x: x.untyped_storage().resize_(8000),
        lambda x: torch.add(x, x, out=torch.empty(0, device=DEVICE)),
        lambda x: nn.functional.conv2d(x.view(1, 1, 10, 100), x[:1, :1].view(1, 1, 1, 1)),
        nn.functional.dropout,
        lambda x: torch.zeros(1000, device=DEVICE),
        lambda x: torch.randn(1000, device=DEVICE),
        lambda x: torch.arange(1000, device=DEVICE),
    ],
)
def test_a_refused_allocation_holds_nothing_and_leaves_its_argument(
    attempt: Callable[[Tensor], Any],
) -> None:
    x = torch.ones(10, 100, device=DEVICE)
    held = Held()
    simdevice.set_limit(simdevice.allocated_bytes() + 10)
    with pytest.raises(torch.OutOfMemoryError, match="simdev out of memory"):
        attempt(x)
    gc.collect()
    assert held.bytes == 0
    assert held.peak <= 10
    simdevice.set_limit(None)
    assert torch.equal(x.cpu(), torch.ones(10, 100))


def test_a_step_runs_at_its_peak_and_not_one_byte_below() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(DEVICE)
    x = torch.randn(8, 16).to(DEVICE)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    model.zero_grad()
    simdevice.reset_peak()
    step()
    peak = simdevice.peak_bytes()
    simdevice.set_limit(peak)
    step()
    simdevice.set_limit(peak - 1)
    with pytest.raises(torch.OutOfMemoryError):
        step()
    gc.collect()
    simdevice.set_limit(peak)
    step()


def test_running_out_of_memory_in_backward_raises_the_same_error() -> None:
    x = torch.randn(100, device=DEVICE, requires_grad=True)
    y = x.exp().sum()
    held = Held()
    simdevice.set_limit(simdevice.allocated_bytes())
    with pytest.raises(torch.OutOfMemoryError, match="simdev out of memory"):
        y.backward()
    del y
    assert held.bytes <= 0
    assert x.grad is None


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="None means no limit"):
        simdevice.set_limit(-1)


# Traffic


def test_copies_between_host_and_device_are_counted_by_direction() -> None:
    x = torch.randn(1000)
    held = Held()
    y = x.to(DEVICE)
    assert held.traffic == (4000, 0)
    y.cpu()
    assert held.traffic == (4000, 4000)
    x[:10].copy_(y[:10])
    y[:5].copy_(x[:5])
    assert held.traffic == (4020, 4040)
    y[0].item()
    assert held.traffic == (4020, 4044)


def test_dtypes_change_on_the_host_going_in_and_after_the_copy_coming_out() -> None:
    held = Held()
    x = torch.randn(1000).to(DEVICE, torch.bfloat16)
    assert held.traffic == (2000, 0)
    out = torch.empty(1000)
    out.copy_(x)
    assert held.traffic == (2000, 2000)


def test_work_on_the_device_counts_no_traffic() -> None:
    x = torch.randn(16, 16).to(DEVICE)
    weight = torch.randn(16, 16).to(DEVICE).requires_grad_()
    target = torch.arange(16).to(DEVICE)
    convolution = nn.Conv2d(1, 2, 3).to(DEVICE)
    held = Held()
    h = F.dropout(F.layer_norm(F.linear(x, weight), (16,)), 0.5)
    F.cross_entropy(h, target).backward()
    convolution(x.view(1, 1, 16, 16)).sum().backward()
    y = x.clone()
    y.copy_(x)
    y[target] = 1.0
    y.index_add_(0, target, x)
    torch.cat([x, y]).sort()
    F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
    torch.zeros(4, device=DEVICE).uniform_()
    assert held.traffic == (0, 0)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_activations_saved_on_the_host_are_traffic_and_not_held(pin_memory: bool) -> None:
    x = torch.randn(1000).to(DEVICE).requires_grad_()
    held = Held()
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        y = x.exp().sum()
    assert held.bytes == 4
    assert held.traffic == (0, 4000)
    y.backward()
    assert held.traffic == (4000, 4000)


def test_cpu_indices_into_a_device_tensor_are_traffic() -> None:
    x = torch.arange(10.0).to(DEVICE)
    held = Held()
    assert x[torch.tensor([1, 3])].shape == (2,)
    assert held.traffic == (16, 0)


def test_pinned_memory_is_known_as_such() -> None:
    before = simdevice.stats()["pinned"]
    x = torch.randn(100)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    other = torch.empty(100, pin_memory=True)
    assert all(t.is_pinned() for t in (pinned, other, other[50:]))
    assert torch.equal(pinned, x)
    assert simdevice.stats()["pinned"] - before == 800
    held = Held()
    pinned.to(DEVICE, non_blocking=True)
    assert held.traffic == (400, 0)
    del pinned, other
    assert simdevice.stats()["pinned"] == before


# A device that is not the host


def test_mixing_a_cpu_tensor_in_is_refused_as_on_a_real_device() -> None:
    x = torch.ones(3, device=DEVICE)
    attempts: list[Callable[[], Tensor]] = [
        lambda: x + torch.ones(3),
        lambda: torch.ones(3) + x,
        lambda: torch.ones(3).add_(x),
        lambda: F.linear(x, torch.ones(2, 3)),
        lambda: torch.cat([x, torch.ones(3)]),
        lambda: F.embedding(torch.tensor([0]), x.view(3, 1)),
        lambda: F.conv1d(x.view(1, 1, 3), torch.ones(1, 1, 1)),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="same device"):
            attempt()


def test_a_single_number_on_the_cpu_may_be_mixed_in() -> None:
    x = torch.ones(3, device=DEVICE)
    assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert torch.where(x > 0, x, torch.tensor(0.0)).tolist() == [1, 1, 1]
    assert (torch.tensor(2.0) * x).tolist() == [2, 2, 2]


def test_there_is_one_device() -> None:
    assert torch.accelerator.device_count() == 1
    assert torch.get_device_module(DEVICE).device_count() == 1
    with pytest.raises(RuntimeError):
        torch.empty(1, device=f"{DEVICE}:1")


def test_streams_and_events_can_be_used() -> None:
    module = torch.get_device_module(DEVICE)
    side = module.Stream()
    assert side != module.current_stream() == module.default_stream()
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    with module.stream(side):
        assert module.current_stream() == side
        x = torch.ones(3, device=DEVICE)
        end.record(side)
    assert module.current_stream() == module.default_stream()
    module.current_stream().wait_event(end)
    module.current_stream().wait_stream(side)
    x.record_stream(side)
    end.synchronize()
    assert end.query()
    assert side.query()
    assert start.elapsed_time(end) >= 0
    with module.stream(None):
        module.synchronize()
    torch.accelerator.synchronize()


# Results


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch.matmul, (leaf(5, 7), leaf(7, 3))),
        (torch.matmul, (leaf(2, 5, 7), leaf(2, 7, 3))),
        (F.linear, (leaf(2, 5, 7), leaf(3, 7), leaf(3))),
        (lambda x: x.t() @ x, (leaf(5, 7),)),
        (lambda x, w, b: F.layer_norm(x, (7,), w, b), (leaf(5, 7), leaf(7), leaf(7))),
        (lambda x, w: F.rms_norm(x, (7,), w), (leaf(5, 7), leaf(7))),
        (lambda x, w, b: F.group_norm(x, 2, w, b), (leaf(2, 4, 3), leaf(4), leaf(4))),
        (F.gelu, (leaf(5, 7),)),
        (F.silu, (leaf(5, 7),)),
        (lambda x: F.softmax(x, -1), (leaf(5, 7),)),
        (lambda w: F.embedding(torch.tensor([[1, 2], [2, 0]], device=w.device), w), (leaf(4, 3),)),
        (
            lambda w: F.embedding(torch.tensor([1, 2, 0], device=w.device), w, padding_idx=0),
            (leaf(4, 3),),
        ),
        (
            lambda x: F.cross_entropy(x, torch.tensor([1, -100, 3], device=x.device)),
            (leaf(3, 5),),
        ),
        (
            lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
            (leaf(2, 4, 9, 9), leaf(6, 4, 3, 3), leaf(6)),
        ),
        (lambda x, w: F.conv2d(x, w, groups=2), (leaf(2, 4, 9, 9), leaf(6, 2, 3, 3))),
        (
            lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w),
            (leaf(2, 4, 9, 9), leaf(6, 4, 3, 3)),
        ),
        (F.conv1d, (leaf(2, 4, 9), leaf(6, 4, 3), leaf(6))),
        (F.conv_transpose2d, (leaf(2, 4, 5, 5), leaf(4, 6, 3, 3), leaf(6))),
        (lambda x: F.max_pool2d(x, 2), (leaf(2, 4, 8, 8),)),
        (lambda x: F.adaptive_avg_pool2d(x, 2), (leaf(2, 4, 9, 9),)),
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (leaf(1, 2, 4, 4),)),
        (
            lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, training=True),
            (leaf(6, 4, 5, 5), leaf(4), leaf(4), torch.zeros(4), torch.ones(4)),
        ),
        (
            lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
            (leaf(6, 4), leaf(4), leaf(4), torch.zeros(4), torch.ones(4)),
        ),
        (lambda x: x[torch.tensor([1, 1, 0], device=x.device)], (leaf(4, 3),)),
        (lambda x: x[x > 0], (leaf(4, 3),)),
        (lambda x: torch.where(x > 0, x, 0.0), (leaf(4, 3),)),
        (lambda x, y: torch.cat([x, y], 1), (leaf(4, 3), leaf(4, 2))),
        (lambda x, y: torch.stack([x, y]), (leaf(4), leaf(4))),
        (lambda x: torch.einsum("bij,bkj->bik", x, x), (leaf(2, 3, 4),)),
        (lambda x: x.sort(descending=True), (leaf(4, 9),)),
        (lambda x: x.topk(3), (leaf(4, 9),)),
        (lambda x: x.split([2, 3], 1), (leaf(4, 5),)),
        (lambda x: x.unbind(1), (leaf(4, 5),)),
        (lambda x: x.chunk(2, -1)[1].sin(), (leaf(4, 6),)),
        (lambda x: x.unfold(1, 3, 2), (leaf(4, 9),)),
        (lambda x: x.expand(3, 4).contiguous(), (leaf(1, 4),)),
        (lambda x: x.permute(2, 0, 1).reshape(4, -1), (leaf(2, 3, 4),)),
        (lambda x: x.to(torch.bfloat16).float(), (leaf(4),)),
        (lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1]], device=x.device)), (leaf(2, 3),)),
        (lambda x: torch.fft.fft(x).conj() * 1j, (torch.randn(8),)),
        (lambda x: torch.view_as_real(torch.fft.fft(x).conj().resolve_conj()), (leaf(8),)),
        (torch.linalg.vector_norm, (leaf(8),)),
        (lambda x: torch.cumsum(x, 0), (leaf(8),)),
        (lambda x: x.norm(dim=1), (leaf(3, 8),)),
        (lambda x: torch.nonzero(x > 0), (torch.randn(8),)),
        (lambda x: torch.equal(x, x), (torch.randn(8),)),
        (lambda x: x.unique(return_counts=True), (torch.tensor([3, 1, 3]),)),
        (lambda x: F.one_hot(x, 4), (torch.tensor([3, 1, 3]),)),
        (torch.bincount, (torch.tensor([3, 1, 3]),)),
        (lambda x: torch.tril(torch.ones(3, 3, device=x.device)), (torch.ones(1),)),
        (lambda x: torch.tril_indices(3, 3, device=x.device), (torch.ones(1),)),
        (lambda x: torch.arange(1, 9, 2, device=x.device), (torch.ones(1),)),
        (lambda x: torch.randn(5, device=x.device), (torch.ones(1),)),
        (lambda x: torch.randperm(50, device=x.device), (torch.ones(1),)),
        (lambda x: torch.multinomial(x.softmax(-1), 3), (torch.randn(9),)),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.5)), (torch.randn(9),)),
        (F.gumbel_softmax, (leaf(3, 4),)),
        (copy.deepcopy, (torch.randn(9),)),
    ],
)
def test_an_operation_gives_what_it_gives_on_the_cpu(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    assert_as_on_cpu(function, *arguments)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[1].add_(1),
        lambda x: x.t()[2].mul_(3),
        lambda x: x[::2, 1:].copy_(x[1::2, :-1]),
        lambda x: x.view(-1)[3:7].zero_(),
        lambda x: x.diagonal().fill_(5),
        lambda x: x[1:].sub_(x[:-1].clone()),
        lambda x: x.index_put_((torch.tensor([0, 2], device=x.device),), torch.tensor(9.0)),
        lambda x: x.index_put_((torch.tensor([0, 0], device=x.device),), x[:2].clone(), accumulate=True),
        lambda x: x.__setitem__(x > 0, 1.0),
        lambda x: x.scatter_(1, torch.tensor([[1], [0]], device=x.device), 7.0),
        lambda x: x.scatter_add_(0, torch.tensor([[1, 1, 0, 1]], device=x.device), x[3:].clone()),
        lambda x: x.masked_fill_(x < 0, 0),
        lambda x: x.t_().neg_(),
        lambda x: torch.mul(x[0], 2, out=x[1]),
        lambda x: torch._foreach_add_([x[0], x[2]], 1.0),
        lambda x: torch.sort(x[0], out=(x[1], torch.empty(4, dtype=torch.long, device=x.device))),
    ],
)
def test_a_change_through_a_view_changes_the_base(change: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 4)
    y = x.to(DEVICE)
    version = y._version
    change(x)
    change(y)
    assert_same(y, x)
    assert y._version > version


def test_views_that_kernels_return_share_memory() -> None:
    x = torch.randn(4, 6, device=DEVICE)
    held = Held()
    views = [
        x.t(),
        x[1],
        x.view(6, 4),
        x.reshape(2, 12),
        x.unfold(1, 2, 1),
        x.detach(),
        x.expand(2, 4, 6),
        x.diagonal(),
        *x.split(2),
        *x.unbind(),
        x.view_as(x),
        x.view(torch.int32),
        x.movedim(0, 1),
        torch.view_as_complex(x.view(4, 3, 2)),
        x.real,
        x.narrow(0, 1, 2),
        x.squeeze(),
    ]
    assert held.bytes == 0
    assert all(v.untyped_storage()._cdata == x.untyped_storage()._cdata for v in views)


def test_an_in_place_operation_returns_the_very_tensor() -> None:
    x = torch.ones(3, device=DEVICE)
    assert x.add_(1) is x
    assert torch.add(x, 1, out=x) is x


def test_zeros_without_memory_behind_them_can_be_used() -> None:
    x = leaf(3)
    assert_as_on_cpu(torch.sgn, x)
    held = Held()
    zeros = torch._efficientzerotensor((3,), device=DEVICE)
    assert held.bytes == 0
    assert (zeros + 1).tolist() == [1, 1, 1]


def test_swapping_storages_with_set() -> None:
    held = Held()
    x, y = torch.zeros(3, device=DEVICE), torch.ones(5, device=DEVICE)
    x.set_(y)  # type: ignore[call-overload]
    assert held.bytes == 20
    assert x.tolist() == [1] * 5
    x.set_(y.untyped_storage(), 4, (1,), (1,))
    y.set_()  # type: ignore[call-overload]
    assert x.data_ptr() != y.data_ptr()
    del x
    assert held.bytes == 0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_follows_manual_seed_as_on_the_cpu(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(40, 50).to(dtype).requires_grad_()
    assert_as_on_cpu(lambda x: F.dropout(x, p), x)
    assert_as_on_cpu(lambda x: F.dropout(F.dropout(x, p), p), x.detach().requires_grad_())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(8, 8) > 0.3},
        {"attn_mask": torch.randn(2, 1, 8, 8)},
        {"attn_mask": leaf(1, 4, 8, 8)},
        {"dropout_p": 0.2},
        {"scale": 0.3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_and_its_gradients_are_the_cpus(options: dict[str, Any]) -> None:
    names = list(options)

    def attention(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **dict(zip(names, values, strict=True)))

    sizes = (2, 4, 8, 16)
    assert_as_on_cpu(attention, leaf(*sizes), leaf(*sizes), leaf(*sizes), *options.values())


def test_attention_with_fewer_key_heads_is_the_cpus() -> None:
    assert_as_on_cpu(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        leaf(2, 4, 8, 16),
        leaf(2, 2, 8, 16),
        leaf(2, 2, 8, 16),
    )


def test_attention_keeps_no_matrix_of_scores_where_the_cpu_keeps_none() -> None:
    q = torch.randn(1, 1, 256, 8).to(DEVICE).requires_grad_()
    held = Held()
    out = F.scaled_dot_product_attention(q, q, q)
    assert held.peak < 256 * 256 * 4
    del out


def test_histogram_of_integers() -> None:
    x = torch.tensor([0, 3, 3, 1], device=DEVICE)
    counts = torch.histc(x.int(), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
def test_adamw_steps_are_the_cpus(kind: str) -> None:
    parameters = [leaf(5, 7), leaf(3)]
    copies = on_device(parameters)
    for group in (parameters, copies):
        optimizer = torch.optim.AdamW(group, fused=kind == "fused", foreach=kind == "foreach")
        for step in range(3):
            torch.manual_seed(step)
            for p in group:
                p.grad = torch.randn(p.shape).to(p.device)
            optimizer.step()
    assert_same(copies, parameters)


def test_inference_mode_gives_the_cpus_results() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 4)
        assert_same(on_device(x).matmul(on_device(x)).relu_(), x.matmul(x).relu_())


def test_clipping_gradients_gives_the_cpus_norm() -> None:
    parameters = [leaf(5, 7), leaf(3)]
    copies = on_device(parameters)
    for p, q in zip(parameters, copies, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.to(DEVICE)
    assert_same(nn.utils.clip_grad_norm_(copies, 0.1), nn.utils.clip_grad_norm_(parameters, 0.1))
    assert_same([q.grad for q in copies], [p.grad for p in parameters])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_same_dropout(reentrant: bool) -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.5).exp()

    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x = torch.ones(100, device=DEVICE, requires_grad=True)
        run(x).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_works(enabled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(DEVICE)
    x = torch.randn(2, 4).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=enabled):
        y = model(x)
        y = checkpoint(model, y.float().fill_(1.0).requires_grad_(), use_reentrant=False)
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        z = torch.zeros(3, device=DEVICE).fill_(1).add_(1)
        assert z.dtype == torch.float32
    y.float().sum().backward()
    assert [p.grad is not None and p.grad.dtype for p in model.parameters()] == [torch.float32] * 6


def test_random_state_can_be_saved_and_restored() -> None:
    module = torch.get_device_module(DEVICE)
    state = module.get_rng_state()
    first = torch.randn(5, device=DEVICE)
    module.set_rng_state(state)
    assert torch.equal(first, torch.randn(5, device=DEVICE))
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.randn(5, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(3)
    again = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(
        torch.randn(5, device=DEVICE, generator=generator),
        torch.randn(5, device=DEVICE, generator=again),
    )


# Loading


def test_asking_whether_it_is_available_never_raises() -> None:
    code = """
import os, sys
from tests import simdevice
for os.environ["CXX"] in sys.argv[1:]:
    print(simdevice.unavailable_reason())
"""
    command = [sys.executable, "-c", code, "no-such-compiler", "'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    missing, unreadable = done.stdout.splitlines()
    assert "no C++ compiler" in missing
    assert "cannot be looked for" in unreadable


# Models of transformers, parameters on the host, copies of them on the device


def _gpt2(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    ids = torch.randint(0, 97, (2, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def _gpt2_dropout() -> tuple[nn.Module, dict[str, Tensor]]:
    return _gpt2(0.1)


def _llama() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(0, 97, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return transformers.LlamaForCausalLM(config), {
        "input_ids": ids, "labels": ids, "attention_mask": mask,
    }  # fmt: skip


def _t5() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.1, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": torch.randint(0, 97, (2, 16)),
        "labels": torch.randint(0, 97, (2, 9)),
    }


def _mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    )  # fmt: skip
    ids = torch.randint(0, 97, (2, 16))
    return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "make",
    [_gpt2, _gpt2_dropout, _llama, _t5, _mixtral],
    ids=["gpt2", "gpt2-dropout", "llama", "t5", "mixtral"],
)
def test_a_model_of_transformers_trains_bitwise_as_on_the_cpu(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    torch.manual_seed(5)
    expected = model(**inputs).loss
    expected.backward()

    parameters = {name: on_device(p) for name, p in model.named_parameters()}
    buffers = {name: on_device(b) for name, b in model.named_buffers()}
    torch.manual_seed(5)
    actual = torch.func.functional_call(
        model, {**parameters, **buffers}, (), {name: on_device(t) for name, t in inputs.items()}
    ).loss
    actual.backward()

    assert_same(actual, expected)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert_same(parameters[name].grad, p.grad)
