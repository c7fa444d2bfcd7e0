"""Gradients are added to sums of another dtype layer by layer, to the bits of adding them one by one."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device import CpuDevice, Event, Stream
from harmony_ds.offload.device_copies import DeviceCopies, DeviceCopy, Leaves
from harmony_ds.offload.ledger import Ledger, TrafficKind
from tests.offload.examples import stored


class Operators(TorchDispatchMode):
    """Records the operators of a block of code that write into their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def copies_in_bf16() -> tuple[DeviceCopies, DeviceCopy]:
    device = CpuDevice()
    store: Any = SimpleNamespace(dtype=torch.bfloat16)
    leaves = Leaves({f"p{i}": nn.Parameter(torch.zeros(3, i + 1, dtype=torch.bfloat16)) for i in range(6)})
    copy = DeviceCopy(torch.empty(0), leaves, {}, device.record(Stream.SWAP_IN))
    return DeviceCopies(device, store, Ledger(), torch.float32), copy


def test_a_layers_sums_are_one_operator_with_the_bits_of_single_additions() -> None:
    device_copies, copy = copies_in_bf16()
    generator = torch.Generator().manual_seed(1)
    expected: dict[str, Tensor] = {}
    with Operators() as operators:
        for micro_batch in range(3):
            for number, (name, leaf) in enumerate(copy.leaves.items()):
                if number == micro_batch:  # takes no part in every one
                    continue
                leaf.grad = torch.randn(leaf.shape, generator=generator).bfloat16()
                single = leaf.grad.float()
                expected[name] = single if name not in expected else torch.add(expected[name], single)
            operators.seen.clear()
            device_copies.accumulate(copy)
            assert sorted(operators.seen) in (
                ["aten::_foreach_copy_"],
                ["aten::_foreach_add_", "aten::_foreach_copy_"],
                ["aten::_foreach_add_"],
            )
    assert all(leaf.grad is None for leaf in copy.leaves.values())
    assert device_copies.gradients(copy).keys() == expected.keys()
    assert all(torch.equal(device_copies.gradients(copy)[name], expected[name]) for name in expected)


def test_strides_of_a_gradient_are_kept() -> None:
    device_copies, copy = copies_in_bf16()
    with Operators() as operators:
        device_copies.accumulate(copy)
    assert not operators.seen and not copy.gradients  # no gradient came
    copy.leaves["p3"].grad = torch.ones(4, 3, dtype=torch.bfloat16).t()
    device_copies.accumulate(copy)
    assert list(copy.gradients) == ["p3"]
    assert copy.gradients["p3"].stride() == (1, 3)


def test_no_gradient_is_added_twice_where_memory_runs_out_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device_copies, copy = copies_in_bf16()
    copy.leaves["p0"].grad = torch.ones(3, 1, dtype=torch.bfloat16)
    device_copies.accumulate(copy)
    for name in ("p0", "p1"):  # a sum that is there, and one that is new
        copy.leaves[name].grad = torch.ones_like(copy.leaves[name])
    with monkeypatch.context() as without_memory:
        without_memory.setattr(torch, "empty_like", raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            device_copies.accumulate(copy)
    device_copies.accumulate(copy)
    assert torch.equal(copy.gradients["p0"], torch.full((3, 1), 2.0))
    assert torch.equal(copy.gradients["p1"], torch.ones(3, 2))


def raise_out_of_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError("there is none")


def test_each_of_several_devices_swaps_in_its_share_and_the_rest_that_makes_no_whole_share() -> None:
    one, ledger = stored(nn.Sequential(nn.Linear(20, 30))), Ledger()
    names, device_copies = list(one.store.parameters), DeviceCopies(one.device, one.store, ledger, torch.float32)
    whole = device_copies.swap_in(names).buffer
    for rank, share in enumerate((slice(256), slice(256, 512))):
        ledger.drain()
        buffer = device_copies.swap_in(names, rank=rank, devices=2).buffer
        assert torch.equal(buffer[share], whole[share]) and torch.equal(buffer[512:], whole[512:])
        assert ledger.drain().host_to_device[TrafficKind.WEIGHTS] == 4 * (256 + 128)


class Interrupted(Future[Event]):
    """Its first wait is interrupted by Ctrl-C, before the disk's thread is done."""

    waits = 0

    def _wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt

    def result(self, timeout: float | None = None) -> Event:
        self._wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait()
        return super().exception(timeout)


def test_copies_from_a_disk_whose_wait_was_interrupted_are_waited_for_again() -> None:
    device = CpuDevice()
    device_copies, _ = copies_in_bf16()
    for wait in (lambda copy: copy.wait(device), lambda _: device_copies.finish_reads()):
        arrival = Interrupted()
        arrival.set_result(device.record(Stream.DISK))
        copy = DeviceCopy(torch.empty(0), Leaves({}), {}, arrival)
        device_copies._last_swap_in[0] = arrival
        with pytest.raises(KeyboardInterrupt):
            wait(copy)
        wait(copy)
        assert arrival.waits > 1
        device_copies._last_swap_in.clear()
