"""Where the work runs: one interface (`base`), a CUDA device and a CPU device."""

from __future__ import annotations

import torch

from harmony_ds.device.base import Device, Event, MemoryProbe, Stream
from harmony_ds.device.cpu import CpuDevice
from harmony_ds.device.cuda import CudaDevice
from harmony_ds.device.group import DeviceGroup
from harmony_ds.device.host_streams import HostStreamDevice
from harmony_ds.errors import ConfigError, ContradictionError

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceGroup",
    "Event",
    "HostStreamDevice",
    "MemoryProbe",
    "Stream",
    "device_of_process",
    "make_device",
    "make_devices",
]


def device_of_process(name: str, local_rank: int, processes: int) -> str | None:
    """The CUDA device of one of several processes, its current one from now on; None: it is to have none.

    Raises:
        ContradictionError: all `processes` were given the same one.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return None
    if name not in ("auto", "cuda"):
        raise ContradictionError(
            f'harmony.device is "{name}" for all {processes} processes: leave it to the launcher, which gives each a '
            'device of its own ("auto").'
        )
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def make_devices(name: str, devices: int | str | tuple[str, ...], budget_bytes: int | None, pin: bool = True) -> Device:
    """The devices that one process drives, one of which is called `name`: so many, "all" there are, or these.

    Raises:
        ConfigError: there are not so many.
    """
    if devices == 1:
        return make_device(name, budget_bytes, pin)
    on_cpu = name == "cpu" or (name == "auto" and not torch.cuda.is_available())
    if devices == "all":
        devices = 1 if on_cpu else torch.cuda.device_count()
    if isinstance(devices, int):
        devices = ("cpu",) * devices if on_cpu else tuple(f"cuda:{index}" for index in range(devices))
    assert not isinstance(devices, str)
    made = [make_device(one, budget_bytes, pin) for one in devices]
    return made[0] if len(made) == 1 else DeviceGroup(made)


def make_device(name: str, budget_bytes: int | None, pin: bool = True) -> Device:
    """The device called `name`: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: there is no such device on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(budget_bytes)
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f'harmony.device is "{name}": it must be "auto", "cpu", "cuda" or "cuda:N".')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = int(index) if index else (torch.cuda.current_device() if count else 0)
    if wanted >= count:
        raise ConfigError(f'harmony.device is "{name}" but this machine has {count} CUDA devices: use "cpu" or "auto".')
    return CudaDevice(wanted, budget_bytes, pin)
