"""Devices that a model is trained on: one interface (`base`), and CUDA, CPU and meta devices, which implement it."""

from __future__ import annotations

import os
from collections import Counter

import torch

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.device.cpu import CpuDevice
from harmony_ds.device.cuda import CudaDevice
from harmony_ds.device.group import DeviceGroup
from harmony_ds.errors import ConfigError

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceGroup",
    "Event",
    "Stream",
    "devices_of_process",
    "make_device",
    "make_devices",
]


Devices = int | str | tuple[str, ...]
"""Value of harmony.devices: a number, "all", or names."""


def devices_of_process(name: str, devices: Devices, local_rank: int, processes: int) -> tuple[str, ...]:
    """Return the CUDA devices of one of several processes, and make the first its current one; (): it has none.

    Process `r` of a server drives devices `r * N` to `r * N + N - 1`.

    Raises:
        ConfigError: all `processes` were given the same devices, or there are not enough.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return ()
    if name not in ("auto", "cuda"):
        raise ConfigError(
            f'harmony.device is "{name}" for all {processes} processes: leave it to the launcher, which gives each a '
            'device of its own ("auto").'
        )
    if isinstance(devices, tuple):
        raise ConfigError(
            f"harmony.devices names {', '.join(devices)} for all {processes} processes: say how many each drives."
        )
    there = torch.cuda.device_count()
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or processes)
    each = max(1, there // beside) if isinstance(devices, str) else devices
    first = local_rank * each
    if first + each > there:
        raise ConfigError(
            f"{beside} processes of {each} devices each (harmony.devices) need {beside * each} CUDA devices, and this "
            f"machine has {there}: start {there // each} processes, or let each drive fewer."
        )
    torch.cuda.set_device(first)
    return tuple(f"cuda:{first + index}" for index in range(each))


def make_devices(name: str, devices: Devices, budget_bytes: int | None, pin: bool = True) -> Device:
    """Return the device or the group of devices that one process drives.

    Args:
        name: of the device, if `devices` is a number or "all".
        devices: see `Devices`; a name that occurs twice makes two logical devices of one GPU.

    Raises:
        ConfigError: there are not enough, or they are of different models.
    """
    if devices == 1:
        return make_device(name, budget_bytes, pin)
    on_cpu = name == "cpu" or (name == "auto" and not torch.cuda.is_available())
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == "all":
        devices = 1 if on_cpu else max(1, there)
    if isinstance(devices, int):
        if not on_cpu and devices > there:
            names = ", ".join(f"cuda:{index}" for index in range(there)) or "none"
            raise ConfigError(
                f"harmony.devices asks for {devices} CUDA devices, and this process sees {there} ({names}): ask for "
                "fewer, or let it see more (CUDA_VISIBLE_DEVICES, --num_gpus of a launcher)."
            )
        devices = ("cpu",) * devices if on_cpu else tuple(f"cuda:{index}" for index in range(devices))
    assert not isinstance(devices, str)
    if len(devices) == 1:
        return make_device(devices[0], budget_bytes, pin)
    counts = Counter(devices)
    made = [make_device(each, budget_bytes, pin, counts[each]) for each in devices]
    models = {f"{each} is a {device.model}" for each, device in zip(devices, made, strict=True)}
    if len({device.model for device in made}) > 1:
        raise ConfigError(
            f"harmony.devices differ ({', '.join(sorted(models))}): one plan is made for all, by the times of the first. "
            "Name devices of one model."
        )
    return DeviceGroup(made)


def make_device(name: str, budget_bytes: int | None, pin: bool = True, logical: int = 1) -> Device:
    """Return the device `name`, or one of `logical` on it; raise ConfigError if this machine has no such device."""
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
    return CudaDevice(wanted, budget_bytes, pin, logical)
