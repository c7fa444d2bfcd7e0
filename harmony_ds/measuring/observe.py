"""Measures the bytes of a model until nothing about it comes as a surprise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from harmony_ds.calls.recorded_call import InputChangedError
from harmony_ds.decomposer.find import Layer
from harmony_ds.measuring.measure import Measurement
from harmony_ds.measuring.rehearsal import Rehearsal
from harmony_ds.measuring.sample import Sample
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.profiler.costs import CostTable
from harmony_ds.runtime.parts import Parts

_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Observed:
    """What was found out about a model.

    Attributes:
        costs: bytes, without times.
        unlayered: the unlayered parameters.
        sequential: why forward passes must run one after another; None: they need not.
    """

    costs: CostTable
    unlayered: tuple[str, ...]
    sequential: str | None = None


def observe(
    parts: Parts, layers: tuple[Layer, ...], sample: Sample, unlayered: tuple[str, ...], rehearse: bool
) -> Observed:
    """Bytes of the forward pass of `sample` and of propagating its objective.

    Parameters that turn out to be used between layers join the unlayered ones, and the model is measured again; so it is
    when a layer turns out to change its input.

    Args:
        rehearse: whether to find out first what the forward pass changes.

    Raises:
        RecomputeError: a layer gives something else when it is run again.
        BaseException: whatever the model or the objective raised.
    """
    for _ in range(_ATTEMPTS):
        try:
            with _fetching(parts):  # so that one run finds all that is used between the layers
                sequential = Rehearsal(parts, layers, unlayered).run(sample.forward, sample.seed) if rehearse else None
                measurement = Measurement(parts, layers)
                costs = measurement.run(sample.forward, sample.objective, sample.seed, unlayered)
            return Observed(costs, unlayered, sequential)
        except InputChangedError:
            pass  # it is remembered; the next run keeps a copy
        except Exception:
            found = parts.installation.touched - set(unlayered)
            if not found:
                raise
            unlayered = (*unlayered, *sorted(found))
    raise AssertionError("the model shows something new each time it is measured")


@contextmanager
def _fetching(parts: Parts) -> Iterator[None]:
    """Brings parameters that are used between the layers, as they are used."""
    fetched: dict[str, DeviceCopy] = {}

    def fetch(name: str) -> Tensor:
        if name not in fetched:
            fetched[name] = parts.residency.swap_in((name,))
            fetched[name].wait(parts.device)
        return fetched[name].leaves[name].detach()

    parts.installation.fetch = fetch
    try:
        yield
    finally:
        parts.installation.fetch = None
        for copy in fetched.values():
            parts.residency.evict(copy)
