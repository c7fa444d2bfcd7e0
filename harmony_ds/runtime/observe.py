"""Measures the bytes of a model until nothing about it comes as a surprise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harmony_ds.decomposer.find import Layer
from harmony_ds.errors import ParameterOutsideLayerError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.runtime.executor import Parts
from harmony_ds.runtime.layer_call import InputChangedError
from harmony_ds.runtime.measure import Measurement
from harmony_ds.runtime.micro_batch import Objective

_ATTEMPTS = 16


def observe(
    parts: Parts,
    layers: tuple[Layer, ...],
    forward: Callable[[], Any],
    objective: Objective,
    seed: int,
    resident: tuple[str, ...],
) -> tuple[CostTable, tuple[str, ...]]:
    """Bytes of `forward` and of propagating `objective` of its outputs, and the resident set.

    Parameters that turn out to be used between layers join the resident set, and the model is measured again; so it is
    when a layer turns out to change its input.

    Raises:
        BaseException: whatever the model or the objective raised.
    """
    for _ in range(_ATTEMPTS):
        try:
            measurement = Measurement(
                parts.device, layers, parts.residency, parts.lending, parts.layer_calls, parts.random
            )
            return measurement.run(forward, objective, seed, resident), resident
        except ParameterOutsideLayerError:
            found = parts.lending.touched - set(resident)
            if not found:
                raise
            resident = (*resident, *sorted(found))
        except InputChangedError:
            pass  # it is remembered; the next run keeps a copy
    raise AssertionError("the model shows something new each time it is measured")
