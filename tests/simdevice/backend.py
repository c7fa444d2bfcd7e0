"""What ``torch.simdev`` is: the module that torch and libraries look for beside a device type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Event, Stream  # noqa: F401 - torch.simdev.Event

_Device = torch.device | str | int | None

# Devices: there is one.


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: _Device) -> Iterator[None]:
    """Nothing to switch: there is one device."""
    _index(device)
    yield


def get_device_name(device: _Device = None) -> str:
    return "simdev"


def get_device_properties(device: _Device = None) -> SimpleNamespace:
    return SimpleNamespace(name="simdev", total_memory=mem_get_info()[1])


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


# Streams: names only, everything is done when the call that asks for it returns.


def current_stream(device: _Device = None) -> Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> Stream:
    return Stream(
        stream_id=0,
        device_index=0,
        device_type=torch._C._autograd.DeviceType.PrivateUse1.value,
    )


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """As torch.cuda.stream: None changes nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


# Memory.


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    pass


# Random numbers: the device draws from the CPU's generator, so seeding the CPU has seeded it.


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Called by torch.manual_seed, which seeds the shared generator itself."""


def initial_seed() -> int:
    return int(torch.default_generator.initial_seed())


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for state in new_states:
        set_rng_state(state)


# Autocast.


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(*args: Any, **kwargs: Any) -> bool:
    return True


def _index(device: _Device) -> int:
    index = device if isinstance(device, int) else None
    if device is not None and index is None:
        index = torch.device(device).index
    if index not in (None, -1, 0):
        raise ValueError(f"simdev has one device, not index {index}")
    return 0
