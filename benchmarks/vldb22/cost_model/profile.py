"""The costs of a model's layers, and what a pack of them costs. Knows neither devices nor tasks.

A pack is the layers from a first one to before a last one, as between two bounds of `harmony_ds.scheduler.partition`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The costs of one layer whatever the micro-batch: bytes, input bytes per sample, and ms of its update on the host."""

    weight_bytes: int
    buffer_bytes: int
    input_bytes: int
    update_ms: float


@dataclass(frozen=True, slots=True)
class PassCosts:
    """One pass through each layer at each measured micro-batch size.

    Attributes:
        sizes: micro-batch sizes, ascending; at least two.
        times_ms: for each size, of each layer.
        peaks_bytes: for each size, device memory of each layer with its input, output and temporaries.
    """

    sizes: tuple[int, ...]
    times_ms: tuple[tuple[float, ...], ...]
    peaks_bytes: tuple[tuple[int, ...], ...]

    def at(self, micro_batch: int) -> tuple[list[float], list[int]]:
        """Return times and peaks of the layers at one size: linear between the sizes measured.

        Beyond the last size, on the line through it and the size half as large.
        """
        return _line(self.sizes, self.times_ms, micro_batch), [
            int(peak) for peak in _line(self.sizes, self.peaks_bytes, micro_batch)
        ]


@dataclass(frozen=True)
class LayerProfile:
    """A model's layers in call order; the last holds the loss. `backward` contains the recomputation."""

    layers: tuple[LayerCost, ...]
    forward: PassCosts
    backward: PassCosts

    @staticmethod
    def from_json(text: str) -> LayerProfile:
        """Read the format of benchmarks/vldb22/data, which counts in seconds."""
        data = json.loads(text)
        columns = zip(*(data[name] for name in ("W_bytes", "B_bytes", "X_bytes_per_sample", "upd_cpu_s")), strict=True)
        return LayerProfile(
            tuple(LayerCost(weight, buffer, taken, 1000 * update_s) for weight, buffer, taken, update_s in columns),
            _pass_costs(data["fwd_s"], data["fwd_peak_bytes"]),
            _pass_costs(data["bwd_with_recompute_s"], data["bwd_peak_bytes"]),
        )


def _pass_costs(times_s: dict[str, list[float]], peaks: dict[str, list[int]]) -> PassCosts:
    sizes = sorted(map(int, times_s))
    return PassCosts(
        tuple(sizes),
        tuple(tuple(1000 * seconds for seconds in times_s[str(size)]) for size in sizes),
        tuple(tuple(peaks[str(size)]) for size in sizes),
    )


def _line(sizes: Sequence[int], rows: Sequence[Sequence[float]], size: int) -> list[float]:
    if size in sizes:
        return list(rows[sizes.index(size)])
    if size > sizes[-1]:  # neighbours are too near to each other to show where the line leads
        right = len(sizes) - 1
        left = min(bisect_left(sizes, sizes[-1] / 2), right - 1)
    else:
        right = max(1, bisect_left(sizes, size))
        left = right - 1
    part = (size - sizes[left]) / (sizes[right] - sizes[left])
    return [low + part * (high - low) for low, high in zip(rows[left], rows[right], strict=True)]


class _Sums:
    """Sums over the layers from one to before another."""

    def __init__(self, values: Iterable[float]) -> None:
        self._before = (0, *accumulate(values))

    def __call__(self, first: int, last: int) -> float:
        return self._before[last] - self._before[first]


class PackCosts:
    """The costs of a model's packs. Times are in ms; `micro_batch` is the number of samples in one."""

    def __init__(self, profile: LayerProfile) -> None:
        layers = profile.layers
        self.count = len(layers)
        self._profile = profile
        self._inputs = [layer.input_bytes for layer in layers]
        self._state = _Sums(layer.weight_bytes + layer.buffer_bytes for layer in layers)
        self.update_ms = _Sums(layer.update_ms for layer in layers)
        self._sums = cache(self._summed)

    def input_bytes(self, layer: int, samples: int = 1) -> int:
        """Return the input bytes of a layer; the number of layers stands for the output of the last, which is nothing."""
        return self._inputs[layer] * samples if layer < self.count else 0

    def state_bytes(self, first: int, last: int) -> int:
        """Weights and buffers."""
        return int(self._state(first, last))

    def forward_ms(self, micro_batch: int, first: int, last: int) -> float:
        return self._sums(False, micro_batch)[0](first, last)

    def backward_ms(self, micro_batch: int, first: int, last: int) -> float:
        """With the recomputation."""
        return self._sums(True, micro_batch)[0](first, last)

    def memory_bytes(self, backward: bool, micro_batch: int, first: int, last: int) -> float:
        """Bytes of a pack in one pass, by Harmony's capacity formula (VLDB'22):

        sum over layers of (peak - input) + input of the first layer.
        """
        return self._sums(backward, micro_batch)[1](first, last) + self._inputs[first] * micro_batch

    def _summed(self, backward: bool, micro_batch: int) -> tuple[_Sums, _Sums]:
        times, peaks = (self._profile.backward if backward else self._profile.forward).at(micro_batch)
        # A layer's input is its predecessor's output: within a pack it is counted already.
        alone = (peak - own * micro_batch for peak, own in zip(peaks, self._inputs, strict=True))
        return _Sums(times), _Sums(alone)
