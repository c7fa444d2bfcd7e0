"""The module ``torch.simdev``, which torch and libraries expect for a device type."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from tests import simdevice

_Device = torch.device | str | int | None

# Devices.


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    count: int = simdevice.load().devices
    return count


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: _Device) -> AbstractContextManager[object]:
    """Return a context in which `device` is current."""
    return torch.accelerator.device_index(_index(device))


# Random numbers: every device draws from the CPU's generator, so seeding the CPU has seeded it.


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Do nothing: torch.manual_seed, which calls this, seeds the shared generator itself."""


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()] * device_count()


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for state in new_states:
        set_rng_state(state)


# Autocast.


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def _index(device: _Device) -> int:
    """Return the index of `device`, or the current one."""
    if not isinstance(device, int):
        device = None if device is None else torch.device(device).index
    return current_device() if device in (None, -1) else device
