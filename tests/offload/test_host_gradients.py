"""Gradients arrive on the host whole, in buffers that are reused; the program's own are told from those of an update."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harmony_ds.device import CpuDevice
from harmony_ds.offload.host_gradients import GradientTransfer, HostGradients
from harmony_ds.offload.ledger import Ledger, TrafficKind
from harmony_ds.optim.user_gradients import UserGradients


def host(limit: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[HostGradients, Ledger]:
    ledger = Ledger()
    return HostGradients(CpuDevice(), ledger, dtype, limit, lambda _: True), ledger


def send(gradients: HostGradients, *numels: int, extra: int | None = 0) -> GradientTransfer:
    return gradients.swap_out({f"p{i}": torch.full((n,), float(i + 1)) for i, n in enumerate(numels)}, extra)


def release(gradients: HostGradients, transfer: GradientTransfer) -> None:
    """Everything that it carries has been used."""
    gradients.add(transfer)
    gradients.clear_gradients()


def test_buffers_are_reserved_though_the_update_thread_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, _ = host(limit=1)
    limits = iter([1, None])
    monkeypatch.setattr(HostGradients, "_limit", property(lambda _: next(limits)), raising=False)
    gradients.reserve([64, 32], extra=0)
    assert gradients.host_bytes == 64


@pytest.mark.parametrize(
    ("packs", "reserved"),
    [([640, 64, 64, 64], 640 + 3 * 64), ([64] * 5, 3 * 64), ([320, 320, 64, 64, 64, 64], 2 * 320 + 4 * 64)],
    ids=["one large pack", "equal packs", "two large packs"],
)
def test_no_more_is_reserved_than_all_gradients(packs: list[int], reserved: int) -> None:
    gradients, _ = host(limit=3)
    gradients.reserve(packs, extra=0)
    assert gradients.host_bytes == reserved
    sent = [gradients.swap_out({"p": torch.ones(nbytes // 4)}, 0, pack_bytes=nbytes) for nbytes in packs[:3]]
    for transfer in sent:
        release(gradients, transfer)
    assert gradients.host_bytes == reserved


def test_few_gradients_of_a_large_pack_leave_a_small_packs_buffer_to_that() -> None:
    gradients, _ = host(limit=2)
    gradients.reserve([640, 64], extra=0)
    large = gradients.swap_out({"p": torch.ones(16)}, 0, pack_bytes=640)
    gradients.swap_out({"q": torch.ones(16)}, 0, pack_bytes=64)
    release(gradients, large)
    gradients.swap_out({"p": torch.ones(160)}, 0, pack_bytes=640)
    assert gradients.host_bytes == 640 + 64


class OverlappingDevice(CpuDevice):
    """A device whose copies overlap compute, so that norms are computed before gradients leave."""

    copies_overlap = True


def test_norms_travel_with_gradients_and_are_dropped_when_those_change() -> None:
    ledger = Ledger()
    gradients = HostGradients(OverlappingDevice(), ledger, torch.float32, None, lambda _: True)
    sent = {"w": torch.randn(3, 5), "b": torch.randn(7)}
    norms = gradients.norms_of(sent)
    assert norms is not None
    gradients.add(gradients.swap_out(sent, None, norms=norms * 2))  # so that they are told from the host's
    assert ledger.drain().device_to_host[TrafficKind.RESIDENT] == 8
    gradients.compute_norms(["w", "b"])
    assert all(torch.equal(gradients.norms[name], 2 * sent[name].norm()) for name in sent)
    gradients.compute_norms(["w"])  # of what somebody may have changed since
    assert torch.equal(gradients.norms["w"], sent["w"].norm())

    gradients.add(gradients.swap_out({"u": sent["b"]}, None, norms=torch.ones(1)))
    list(
        gradients.for_update(["u"], None, norms_known=False)
    )  # an update that waits for no norm takes what travelled, too
    assert torch.equal(gradients.norms["u"], torch.ones(()))

    for _ in range(2):
        gradients.add(gradients.swap_out({"in parts": sent["b"]}, None, norms=torch.zeros(1)))
    gradients.compute_norms(["in parts"])
    assert torch.equal(gradients.norms["in parts"], (2 * sent["b"]).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transfer_holds_copies_in_shape(dtype: torch.dtype) -> None:
    gradients, ledger = host(dtype=dtype)
    sent = {"w": torch.randn(3, 5), "b": torch.tensor(2.5), "transposed": torch.arange(6.0).view(2, 3).t()}
    assert gradients.norms_of(sent) is None  # copies are compute here: left to the thread of updates
    transfer = gradients.swap_out(sent, extra=0)

    assert transfer.gradients.keys() == sent.keys()
    for name, gradient in sent.items():
        assert torch.equal(transfer.gradients[name], gradient.to(dtype))
        assert transfer.gradients[name].data_ptr() % 64 == 0
        assert transfer.gradients[name].is_contiguous()
    assert ledger.drain().device_to_host[TrafficKind.GRADIENTS] == 3 * 64


def test_a_released_buffer_is_reused() -> None:
    gradients, _ = host()
    first, other = send(gradients, 100), send(gradients, 8)
    assert first.buffer is not other.buffer
    release(gradients, first)
    second = send(gradients, 60)

    assert second.buffer is first.buffer
    assert gradients.host_bytes == 4 * (112 + 16)


def test_at_the_limit_a_swap_out_waits_for_a_buffer_unless_it_waits_for_another_pack() -> None:
    gradients, _ = host(limit=2)
    first = send(gradients, 8)
    send(gradients, 8)
    third: list[GradientTransfer] = []
    thread = threading.Thread(target=lambda: third.append(send(gradients, 8)))
    thread.start()
    thread.join(0.2)
    assert not third
    release(gradients, first)
    thread.join(30)

    assert third[0].buffer is first.buffer
    # Beyond the limit nothing waits.
    assert send(gradients, 8, extra=1).gradients["p0"].numel() == 8
    assert send(gradients, 8, extra=None).gradients["p0"].numel() == 8


def test_a_buffer_that_cannot_be_allocated_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, _ = host(limit=1)
    with monkeypatch.context() as patched:
        patched.setattr(gradients._device, "host_empty", full)
        with pytest.raises(MemoryError):
            send(gradients, 8)
    sent: list[GradientTransfer] = []
    thread = threading.Thread(target=lambda: sent.append(send(gradients, 8)), daemon=True)
    thread.start()
    thread.join(30)

    assert sent and gradients.host_bytes == 64


def full(numel: int, dtype: torch.dtype) -> torch.Tensor:
    raise MemoryError


class Updating:
    """A parameter with a pending update, which the update thread ends right after somebody has read `.grad`."""

    def __init__(self) -> None:
        self.is_updating, self.value = True, torch.ones(2)

    @property
    def grad(self) -> Any:
        value, self.value, self.is_updating = self.value, None, False
        return value

    @grad.setter
    def grad(self, value: Any) -> None:
        self.value = value


def test_a_gradient_whose_update_ends_meanwhile_is_not_the_programs() -> None:
    for ask, answer in ((lambda own: own.exist(), False), (lambda own: own.pop(["w"]), {})):
        parameter = Updating()
        store = SimpleNamespace(parameters={"w": parameter})
        own = UserGradients(store, SimpleNamespace(is_updating=lambda _, p=parameter: p.is_updating))  # type: ignore[arg-type]
        assert ask(own) == answer
        assert own.popped == 0


def test_gradients_are_cast_as_many_at_a_time_as_the_buffer_holds() -> None:
    casts = torch.zeros(256)
    gradients = HostGradients(CpuDevice(), Ledger(), torch.bfloat16, None, lambda _: True, casts=casts)
    sent = {name: torch.randn(numel).bfloat16() for name, numel in {"a": 100, "b": 20, "c": 256, "d": 1}.items()}
    gradients.add(gradients.swap_out(sent, None))
    batches = []
    for batch in gradients.for_update(sent, torch.tensor(0.3), norms_known=True):
        batches.append(list(batch))
        for name, gradient in batch.items():
            assert gradient.untyped_storage().data_ptr() == casts.untyped_storage().data_ptr()
            assert torch.equal(gradient, sent[name].float() * 0.3)
    assert batches == [["a", "b"], ["c"], ["d"]]
