"""Measures a model on its device: what a micro-batch costs, whole or with its layer calls cut into slices.

Times and the machine's rates may come from a file that an earlier run left (`profile_cache`); bytes are always
measured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.trees import tensors_in
from harmony_ds.calls.unseen import UnseenError
from harmony_ds.decomposer.find import Layer
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import HarmonyError
from harmony_ds.measuring.alone import Alone
from harmony_ds.measuring.budget import measured_within_budget
from harmony_ds.measuring.measure import Measurement
from harmony_ds.measuring.passes import Setup
from harmony_ds.measuring.profile_cache import ProfileFile, with_times
from harmony_ds.measuring.rates import measure_rates
from harmony_ds.measuring.row_probe import Found, RowProbe
from harmony_ds.measuring.sample import Sample
from harmony_ds.measuring.timing import Timing
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine, Profile
from harmony_ds.profiler.rows import WHOLE_CALLS, Rows
from harmony_ds.runtime.parts import Parts
from harmony_ds.scheduler.sizes import WHOLE, Sizes, combined, doubling

_logger = logging.getLogger(__name__)

SEVERAL = "of several sizes"
"""In the key of a profile: its tables are of one micro-batch in slices of different sizes."""
Shapes = tuple[tuple[int, ...], ...]

_ATTEMPTS = 16
_MOST_COUNTED = 8


class Measuring:
    """Measures one model. What it finds out about it (its unlayered set, rates, rows) it keeps."""

    def __init__(self, parts: Parts, layers: tuple[Layer, ...], graph: LayerGraph, file: ProfileFile) -> None:
        """`file`: for times and rates."""
        self._parts = parts
        self._file = file
        self._setup = Setup(parts, layers, graph.unlayered)
        self._found: Found | None = None
        self._probed_calls: tuple[int, ...] = ()
        self.machine: Machine | None = None

    @property
    def unlayered(self) -> tuple[str, ...]:
        """The parameters that no layer owns, those that are used between layers included."""
        return self._setup.unlayered

    def join_unlayered(self, names: Iterable[str]) -> None:
        """Parameters that other processes have found to be used between layers are unlayered here, too."""
        self._setup = replace(self._setup, unlayered=tuple(dict.fromkeys((*names, *self.unlayered))))

    def rows(self, sizes: Sizes) -> Rows:
        """How layer calls are cut into slices of `sizes`, once a micro-batch has been measured in such."""
        if sizes == WHOLE:
            return WHOLE_CALLS
        assert self._found is not None
        return self._found.rows(sizes.forward, sizes.backward)

    def profile(self, sample: Sample, sizes: Sizes | None) -> Profile:
        """Bytes and times of `sample` in slices of `sizes`; None: of 1, 2, 4, ... rows and whole, as far as the device
        holds them. The machine's rates too, if they are not known yet.

        Raises:
            DoesNotFitError: it does not hold one layer with `sample` in slices of `sizes`, or of single rows.
            BaseException: whatever the model or the objective raised.
        """
        with self._within_budget():
            return self._of_several_sizes(sample) if sizes is None else self._of_one_size(sample, sizes)

    def _of_one_size(self, sample: Sample, sizes: Sizes) -> Profile:
        table = self._observe(sample, sizes)
        key = self._key(table.calls, sample, sizes)
        known = self._load(key)
        # Whoever has other processes may wait for them within the model: all make as many forward passes.
        if not self._parts.world.any("measure the model", known is None):
            assert known is not None
            return replace(known, tables=((sample.rows, with_times(table, known.tables[0][1])),))
        return self._save(((sample.rows, self._time(table, sample, sizes)),), key)

    def _of_several_sizes(self, sample: Sample) -> Profile:
        self._probe(sample)
        key = self._key(self._probed_calls, sample, None)
        known = self._load(key)
        if known is not None:
            return known
        tables: list[tuple[int, CostTable]] = []
        # On a device that only counts, every slice takes the host as long as a whole micro-batch.
        smallest = 1 if self._parts.device.has_values else max(1, sample.rows // _MOST_COUNTED)
        for size in doubling(sample.rows, smallest):
            sizes = Sizes(size, size)
            try:
                tables.append((size, self._time(self._observe(sample, sizes), sample, sizes)))
            except torch.OutOfMemoryError:
                self._parts.stash.abandon()
                if not tables:
                    raise
                _logger.info("slices of %d rows do not fit on the device; larger ones are not tried", size)
                break
        return self._save(tuple(tables), key)

    def in_slices(self, sample: Sample, profile: Profile, sizes: Sizes) -> CostTable:
        """Bytes of `sample` in slices of `sizes`, measured, with the times that `profile` knows of them.

        Raises: as `profile`.
        """
        with self._within_budget():
            return with_times(self._observe(sample, sizes), combined(profile, sizes, sample.rows))

    def alone(self, rows: Rows) -> AbstractContextManager[Callable[[Sample], Tensor | None]]:
        """See `Alone.open`; layer calls are cut into `rows`."""
        return Alone(replace(self._setup, rows=rows)).open()

    @contextmanager
    def _within_budget(self) -> Iterator[None]:
        with measured_within_budget(self._parts.device):
            try:
                yield
            except torch.OutOfMemoryError:
                self._parts.stash.abandon()
                raise

    def _probe(self, sample: Sample) -> None:
        """Which layers can be cut; found out once, and said."""
        if self._found is not None:
            return
        # What the first look at a model finds (parameters between layers, inputs that are changed) comes first.
        few, more = (2, 3) if sample.rows > 2 else (1, 2)
        try:
            self._probed_calls = self._observe(replace(sample, forward=sample.few(more)), WHOLE).calls
            with self._parts.contract.undone():
                self._found = RowProbe(self._setup).probe(sample, (few, more))
        except (HarmonyError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - if the model raises it with all rows, too, it surfaces here
            self._probed_calls = self._observe(sample, WHOLE).calls
            self._found = Found()
            _logger.warning(
                "all layers run with whole micro-batches: the model does not take %d of a micro-batch's rows (%r)",
                more,
                error,
            )
        for layer, reason in self._found.refused.items():
            if reason:
                _logger.warning("layer %s runs with whole micro-batches: %s", self._setup.layers[layer].name, reason)

    def _observe(self, sample: Sample, sizes: Sizes) -> CostTable:
        """Bytes, measured until nothing about the model comes as a surprise.

        Parameters that turn out to be used between layers join the unlayered ones, and the model is measured again; so it
        is when a layer turns out to change its input.
        """
        if sizes != WHOLE:
            self._probe(sample)
        setup = replace(self._setup, rows=self.rows(sizes))
        with self._parts.contract.undone():
            for _ in range(_ATTEMPTS):
                try:
                    costs = Measurement(setup).measure(sample)
                    break
                except UnseenError:
                    pass  # it is remembered
                except Exception:
                    found = self._parts.installation.touched - set(setup.unlayered)
                    if not found:
                        raise
                    setup = replace(setup, unlayered=(*setup.unlayered, *sorted(found)))
            else:
                raise AssertionError("the model shows something new each time it is measured")
        self._setup = replace(setup, rows=WHOLE_CALLS)
        return costs

    def _time(self, table: CostTable, sample: Sample, sizes: Sizes) -> CostTable:
        parts = self._parts
        timing = Timing(replace(self._setup, rows=self.rows(sizes)))
        with self._parts.contract.undone():
            timed = timing.time(table, sample)
        if self.machine is None:
            threads = None if parts.updater is None else parts.updater.threads
            self.machine = measure_rates(parts.device, parts.optimizer, parts.residency.dtype, timing.swaps, threads)
        return timed

    # ---- the file

    def _key(self, calls: tuple[int, ...], sample: Sample, sizes: Sizes | None) -> dict[str, str]:
        """What a profile depends on; `sizes`: of its slices, None: several."""
        key = self._file.key(calls, shapes_of(sample.inputs))
        return key if sizes == WHOLE else {**key, "pieces": SEVERAL if sizes is None else str(sizes)}

    def _load(self, key: dict[str, str]) -> Profile | None:
        known = self._file.load(key)
        if known is not None:
            self.machine = known.machine
        return known

    def _save(self, tables: tuple[tuple[int, CostTable], ...], key: dict[str, str]) -> Profile:
        assert self.machine is not None
        profile = Profile(self.machine, tables, key)
        self._file.save(profile)
        return profile


def shapes_of(inputs: Any) -> Shapes:
    """The shape of every tensor of `inputs`."""
    return tuple(tuple(t.shape) for t in tensors_in(inputs))
