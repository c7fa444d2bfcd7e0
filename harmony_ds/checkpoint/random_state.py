"""The generators that a training process draws from: Python's, NumPy's, torch's, and the device's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from harmony_ds.device.base import Device


def capture_random(device: Device) -> dict[str, Any]:
    """The states of all generators, as plain data and tensors."""
    states: dict[str, Any] = {"python": random.getstate(), "device": list(device.random_state())}
    numpy: Any = sys.modules.get("numpy")  # who has not imported it has drawn nothing from it
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def random_of(states: dict[str, Any] | None, rank: int, size: int) -> dict[str, Any] | None:
    """What process `rank` of `size` goes on from; None: from where it is, since another number of processes saved it."""
    if states is None or rank == 0:
        return states
    others = states.get("others", ())
    found: dict[str, Any] | None = others[rank - 1] if len(others) == size - 1 else None
    return found


def restore_random(states: dict[str, Any], device: Device) -> None:
    """Sets the generators. Those of a device of another kind than the one that was saved are left alone."""
    random.setstate(states["python"])
    saved, present = states["device"], device.random_state()
    fits = [a.shape == b.shape and a.dtype == b.dtype for a, b in zip(saved, present, strict=False)]
    kept = [old if ok else now for old, now, ok in zip(saved, present, fits, strict=False)]
    device.set_random_state((*kept, *present[len(kept) :]))
    if "numpy" in states:
        import numpy as np

        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
