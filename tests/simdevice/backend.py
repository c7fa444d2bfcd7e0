"""What ``torch.simdev`` is: the module that torch and libraries look for beside a device type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

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


# Random numbers: the device draws from the CPU's generator, so seeding the CPU has seeded it.


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Called by torch.manual_seed, which seeds the shared generator itself."""


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


def _index(device: _Device) -> int:
    index = device if isinstance(device, int) else None
    if device is not None and index is None:
        index = torch.device(device).index
    if index not in (None, -1, 0):
        raise ValueError(f"simdev has one device, not index {index}")
    return 0
