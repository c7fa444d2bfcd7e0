"""Measures a model on its device: what a micro-batch costs, whole or with its layer calls cut into slices.

Times and the machine's rates may come from a file that an earlier run left (`profile_cache`); bytes are always
measured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harmony_ds.calls.module_places import undone
from harmony_ds.calls.trees import tensors_in
from harmony_ds.decomposer.find import Layer
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.measuring.observe import observe
from harmony_ds.measuring.profile_cache import load_profile, profile_key, save_profile, with_times
from harmony_ds.measuring.rates import measure_rates
from harmony_ds.measuring.row_probe import Found, RowProbe
from harmony_ds.measuring.sample import Sample
from harmony_ds.measuring.timing import Timing
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine, Profile
from harmony_ds.runtime.parts import Parts
from harmony_ds.scheduler.sizes import WHOLE, Sizes, combined, doubling

_logger = logging.getLogger(__name__)

SEVERAL = "of several sizes"
"""In the key of a profile: its tables are of one micro-batch in slices of different sizes."""
Shapes = tuple[tuple[int, ...], ...]


_MOST_COUNTED = 8


class Measuring:
    """Measures one model. What it finds out about it (its unlayered set, rates, rows) it keeps."""

    def __init__(
        self, parts: Parts, layers: tuple[Layer, ...], graph: LayerGraph, path: Path | None, gradient_bytes: int
    ) -> None:
        """`path`: of a file for times and rates; `gradient_bytes`: per element on the link."""
        self._parts = parts
        self._layers = layers
        self._graph = graph
        self._path = path
        self._dtypes = f"{parts.residency.dtype}, gradients of {gradient_bytes} bytes"
        self._found: Found | None = None
        self._probed_calls: tuple[int, ...] = ()
        # The inputs, and what they were called in, with which it is known what forward passes change.
        self._rehearsed: set[tuple[Shapes, bytes]] = set()
        self.sequential: str | None = None
        """Why forward passes must run one after another, in the order of their calls; None: they need not."""
        self.unlayered = graph.unlayered
        self.machine: Machine | None = None

    def table(self, sample: Sample, sizes: Sizes = WHOLE) -> CostTable:
        """Bytes and times of `sample` in slices of `sizes`; the machine's rates too, if they are not known yet.

        Raises:
            BaseException: whatever the model or the objective raised.
        """
        self.cut(sample, sizes)
        table = self._observe(sample)
        key = self.key(table.calls, sample.inputs, sizes)
        known = self._load(key)
        if known is not None:
            return with_times(table, known.tables[0][1])
        table = self._time(table, sample)
        self._save(((sample.rows, table),), key)
        return table

    def profile(self, sample: Sample) -> Profile:
        """Bytes and times of `sample` in slices of 1, 2, 4, ... rows and whole, as far as the device holds them.

        Raises:
            torch.OutOfMemoryError: it does not hold single rows.
        """
        self._probe(sample)
        key = self.key(self._probed_calls, sample.inputs, None)
        known = self._load(key)
        if known is not None:
            return known
        tables: list[tuple[int, CostTable]] = []
        # On a device that only counts, every slice takes the host as long as a whole micro-batch.
        smallest = 1 if self._parts.device.has_values else max(1, sample.rows // _MOST_COUNTED)
        for size in doubling(sample.rows, smallest):
            try:
                self.cut(sample, Sizes(size, size))
                table = self._observe(sample)
                tables.append((size, self._time(table, sample)))
            except torch.OutOfMemoryError:
                self._parts.stash.abandon()
                if not tables:
                    raise
                _logger.info("slices of %d rows do not fit on the device; larger ones are not tried", size)
                break
        return self._save(tuple(tables), key)

    def in_slices(self, sample: Sample, profile: Profile, sizes: Sizes) -> CostTable:
        """Bytes of `sample` in slices of `sizes`, measured, with the times that `profile` knows of them."""
        self.cut(sample, sizes)
        return with_times(self._observe(sample), combined(profile, sizes, sample.rows))

    def cut(self, sample: Sample, sizes: Sizes) -> None:
        """From now on, layer calls are cut into slices of `sizes`."""
        if sizes != WHOLE:
            found = self._probe(sample)
            self._parts.layer_calls.rows = found.rows(sizes.forward, sizes.backward)

    def _probe(self, sample: Sample) -> Found:
        """Which layers can be cut; found out once, and said."""
        if self._found is None:
            # What the first look at a model finds (parameters between layers, inputs that are changed) comes first.
            rows = (2, 3) if sample.rows > 2 else (1, 2)
            self._probed_calls = self._observe(replace(sample, forward=sample.few(rows[1]))).calls
            probe = RowProbe(self._parts, self._layers, self.unlayered)
            with self._undone():
                self._found = probe.run(sample.few(rows[0]), sample.few(rows[1]), rows, sample.seed)
            for layer, reason in self._found.refused.items():
                if not reason:
                    continue
                _logger.warning("layer %s runs with whole micro-batches: %s", self._layers[layer].name, reason)
        return self._found

    def _observe(self, sample: Sample) -> CostTable:
        situation = shapes_of(sample.inputs), sample.modes
        rehearse = situation not in self._rehearsed and self._parts.device.has_values
        with self._undone():
            observed = observe(self._parts, self._layers, sample, self.unlayered, rehearse)
        self.unlayered = observed.unlayered
        self.sequential = self.sequential or observed.sequential
        self._rehearsed.add(situation)
        return observed.costs

    def _time(self, table: CostTable, sample: Sample) -> CostTable:
        parts = self._parts
        timing = Timing(parts, self._layers)
        with self._undone():
            timed = timing.run(table, sample.forward, sample.objective, sample.seed, self.unlayered)
        if self.machine is None:
            self.machine = measure_rates(parts.device, parts.optimizer, parts.residency.dtype, timing.swaps)
        return timed

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What forward passes do to attributes and generators while the context is open is undone in the end."""
        self._parts.random.look_for_generators(self._parts.installation.modules)
        with undone(self._parts.installation.modules), self._parts.random.others_kept():
            yield

    # ---- the file

    def key(self, calls: tuple[int, ...], inputs: Any, sizes: Sizes | None) -> dict[str, str]:
        """What a profile of a micro-batch of `inputs` depends on; `sizes` of its slices, None: several."""
        key = profile_key(self._graph, calls, shapes_of(inputs), self._dtypes, self._parts.device)
        return key if sizes == WHOLE else {**key, "pieces": SEVERAL if sizes is None else str(sizes)}

    def _load(self, key: dict[str, str]) -> Profile | None:
        known = None if self._path is None else load_profile(self._path, key)
        if known is not None:
            self.machine = known.machine
        return known

    def _save(self, tables: tuple[tuple[int, CostTable], ...], key: dict[str, str]) -> Profile:
        assert self.machine is not None
        profile = Profile(self.machine, tables, key)
        if self._path is not None:
            save_profile(self._path, profile)
        return profile


def shapes_of(inputs: Any) -> Shapes:
    """The shape of every tensor of `inputs`."""
    return tuple(tuple(t.shape) for t in tensors_in(inputs))
