"""Four torch devices for tests, "simdev:0" to "simdev:3", that live in host memory and count every byte. Two switches make
the engine's device of them: a hard limit (`device.py`), and streams that are as late as events allow (`late.py`).

    from tests import simdevice

    if (reason := simdevice.unavailable_reason()) is not None:
        pytest.skip(reason)
    simdevice.load()
    x = torch.ones(8, device="simdev")
    simdevice.allocated_bytes()  # 32

Operators refuse operands that lie on different devices; copies alone go from one to another.
Loading is for the life of the process and is seen by all of torch: from then on
``torch.accelerator`` is simdev, also for code that has nothing to do with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

DEVICE = "simdev"

_SOURCE = Path(__file__).with_name("simdevice.cpp")

_loaded: list[ModuleType] = []  # empty until load() has built and registered the device


def unavailable_reason() -> str | None:
    """Why simdev cannot be used here, or None. Builds nothing."""
    if _loaded:
        return None
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} is not on PATH"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"no Python headers: {header} does not exist"
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE):
        return f"torch's one slot for other devices is taken by {name}"
    return None


def load() -> ModuleType:
    """Return the compiled module; the first call builds it (once per machine) and registers the device."""
    if _loaded:
        return _loaded[0]
    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(reason)
    from torch.utils import backend_registration

    from tests.simdevice import backend

    module = _build()
    backend_registration.rename_privateuse1_backend(DEVICE)
    module.init()
    torch._register_device_module(DEVICE, backend)
    backend_registration.generate_methods_for_privateuse1_backend()
    _loaded.append(module)
    return module


def stats(index: int = 0) -> dict[str, int]:
    """All counters, by name: those of memory of device `index`, the others of all devices together."""
    values: dict[str, int] = load().stats(index)
    return values


def allocated_bytes(index: int = 0) -> int:
    """Bytes that device `index` holds now."""
    return stats(index)["allocated"]


def peak_bytes(index: int = 0) -> int:
    """Return the most bytes that device `index` held at once since the last `reset_peak`."""
    return stats(index)["peak"]


def reset_peak(index: int = 0) -> None:
    """Let the peak start again from what is held now."""
    load().reset_peak(index)


def set_limit(limit: int | None, index: int = 0) -> None:
    """Raise torch.OutOfMemoryError where device `index` would hold more than `limit` bytes; None: no limit."""
    if limit is not None and limit < 0:
        raise ValueError(f"a limit of {limit} bytes is not possible; None means no limit")
    load().set_limit(-1 if limit is None else limit, index)


def traffic() -> tuple[int, int]:
    """Bytes copied (from host to device, from device to host) since the devices were loaded, by all of them."""
    values = stats()
    return values["host_to_device"], values["device_to_host"]


def peer_traffic() -> dict[tuple[int, int], int]:
    """Bytes copied between devices since they were loaded, by (source, target), for all pairs."""
    values: dict[tuple[int, int], int] = load().peer_traffic()
    return values


def _build() -> ModuleType:
    from torch.utils import cpp_extension

    from harmony_ds.offload.native import compiling

    # The kernels are the CPU's, so there is nothing here worth optimizing further.
    with compiling("simdev"):
        return cpp_extension.load("simdev", [str(_SOURCE)], extra_cflags=["-O1", "-g0"])
