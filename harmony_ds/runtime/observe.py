"""Measures bytes and times of a model, until nothing about it comes as a surprise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harmony_ds.decomposer.find import Layer
from harmony_ds.errors import ParameterOutsideLayerError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.runtime.executor import Parts
from harmony_ds.runtime.layer_call import InputChangedError
from harmony_ds.runtime.measure import Measurement
from harmony_ds.runtime.micro_batch import Objective
from harmony_ds.runtime.timing import Timing

_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """What one micro-batch showed.

    Attributes:
        resident: the parameters that no layer call covers, those found on the way among them.
        swaps: bytes and milliseconds of every swap-in.
    """

    costs: CostTable
    resident: tuple[str, ...]
    swaps: Sequence[tuple[int, float]]


def observe(
    parts: Parts,
    layers: tuple[Layer, ...],
    forward: Callable[[], Any],
    objective: Objective,
    seed: int,
    resident: tuple[str, ...],
) -> Observation:
    """Bytes, then times, of `forward` and of propagating `objective` of its outputs.

    Parameters that turn out to be used between layers join the resident set, and the model is measured again; so it is
    when a layer turns out to change its input.

    Raises:
        BaseException: whatever the model or the objective raised.
    """
    tools = (parts.device, layers, parts.residency, parts.lending, parts.layer_calls, parts.random)
    for _ in range(_ATTEMPTS):
        try:
            costs = Measurement(*tools).run(forward, objective, seed, resident)
            timing = Timing(*tools)
            return Observation(timing.run(costs, forward, objective, seed, resident), resident, timing.swaps)
        except ParameterOutsideLayerError:
            found = parts.lending.touched - set(resident)
            if not found:
                raise
            resident = (*resident, *sorted(found))
        except InputChangedError:
            pass  # it is remembered; the next run keeps a copy
    raise AssertionError("the model shows something new each time it is measured")
