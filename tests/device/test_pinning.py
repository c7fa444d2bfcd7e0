"""With `pin_memory` off, nothing that a CUDA device does page-locks host memory; tested without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device import CudaDevice, DeviceGroup


class Pinned(TorchDispatchMode):
    """Notes operations that ask for page-locked memory, and gives them ordinary memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False) or "pin" in func._schema.name:
            self.operations.append(func._schema.name)
        return func(*args, **kwargs)


class Registrations:
    """Stands for CUDA's runtime, and notes what is page-locked there."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.sizes.append(nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> Registrations:
    made = Registrations()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None, raising=False)
    return made


class NoStream:
    """Stands for a stream where there is no GPU."""

    def __init__(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_host_memory_is_page_locked_only_if_the_ds_config_says_so(
    pin: bool, grouped: bool, registrations: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    cuda = CudaDevice(0, 250, pin=pin)
    cuda.torch_device = torch.device("cpu")  # where copies to it end
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    for ordering in ("record", "wait", "record_use"):
        monkeypatch.setattr(cuda, ordering, lambda *_: None)
    device = DeviceGroup([cuda]) if grouped else cuda
    tensor = torch.arange(6.0).view(2, 3).t()
    with Pinned() as pinned:
        uploaded = device.upload(tensor)
        kept = device.host_copy(tensor, non_blocking=True)
        buffer = device.host_empty(16, torch.float32)
        device.host_lock(torch.empty(8))
    for copied in (uploaded, kept):
        assert torch.equal(copied, tensor)
        assert copied.stride() == tensor.stride()
        assert copied.data_ptr() != tensor.data_ptr()
    device.host_free(buffer)
    assert len(pinned.operations) == (2 if pin else 0)
    assert registrations.sizes == ([64, 32] if pin else [])
