"""Profile a model on its device: what the layer calls of a micro-batch cost, and how fast the machine is.

`Profiler.profile` runs, in this order:

1. `Measurement`: passes over the micro-batch, for the bytes of each layer call -> `CallMeasurement`s -> a `CostTable`.
   They are run again as long as they show something new about the model (a parameter used between layers, an input that
   is changed in place).
2. `Timing`: two passes over the same micro-batch, for the milliseconds of each call -> the same `CostTable` with times.
3. `measure_rates`, once for each process: the links, the host's memory and optimizer -> `Machine`.
4. `ProfileFile`: table and machine together are a `Profile`, which is saved. Times and rates may come from a file that an
   earlier run left, instead of 2 and 3; the bytes of a plan are measured anew (saved ones rank sizes of slices).

Where layer calls are to be cut into slices of rows, `RowProbe` runs before 1, once for each form of calls (modes of the
model, flags among its arguments): it finds where tensors hold the rows. 1 and 2 then run with the calls cut; for several
sizes, once with each.

The first micro-batch is profiled, and again any that is larger than all before it (`Planner` decides that).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from harmony_ds.decomposer.find import Layer
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.device.base import Device
from harmony_ds.errors import DoesNotFitError
from harmony_ds.model.contract import UnseenError
from harmony_ds.profiling.measurement import Measurement
from harmony_ds.profiling.profile_cache import ProfileFile, with_times
from harmony_ds.profiling.progress import Progress
from harmony_ds.profiling.rates import measure_rates
from harmony_ds.profiling.row_probe import RowProbe
from harmony_ds.profiling.sample import Sample, shapes_of
from harmony_ds.profiling.timing import Timing
from harmony_ds.runtime.garbage import release_frames
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.choose import way_to_smaller_micro_batches
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.grid import gib_number
from harmony_ds.scheduler.profile import Machine, Profile
from harmony_ds.scheduler.rows import WHOLE_CALLS, Rows
from harmony_ds.scheduler.sizes import WHOLE, Sizes, combined, doubling

_logger = logging.getLogger(__name__)

SEVERAL = "of several sizes"
"""In the key of a profile: its tables are of one micro-batch in slices of different sizes."""
TOKENS, IN_LAYERS = "tokens", ", inside layers "
"""In the key of a profile: the tokens of a tile of the last layer and the loss, and of parts of layers."""

_ATTEMPTS = 16
_MOST_COUNTED = 8
_REQUESTED = re.compile(r"(\d[\d.,]*) ([KMG]iB|bytes)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Profiler:
    """Profiles of one model, and what the passes find out about it: its unlayered parameters, the machine's rates, rows.

    Attributes:
        unlayered: names of the parameters that no layer owns, those that are used between layers included.
        machine: the machine's rates, once they have been measured or loaded.
    """

    def __init__(
        self, runtime: Runtime, layers: tuple[Layer, ...], graph: LayerGraph, file: ProfileFile, progress: Progress
    ) -> None:
        """Keep times and rates in `file`, and tell `progress` what is done."""
        self._runtime = runtime
        self._progress = progress
        self._file = file
        self._layers = layers
        self._row_probe = RowProbe(runtime, layers)
        self._probed: set[object] = set()  # forms of micro-batches
        self._probed_calls: tuple[int, ...] = ()  # layers in the order of their calls
        self.unlayered = graph.unlayered
        self.machine: Machine | None = None

    # ---- profiles

    def profile(
        self, sample: Sample, sizes: Sizes | None, check_bytes: Callable[[CostTable], None] | None = None
    ) -> Profile:
        """Return bytes and times of `sample` in slices of `sizes`, and the machine's rates.

        Args:
            sizes: None: of 1, 2, 4, ... rows and whole, as far as the device holds them.
            check_bytes: called with the bytes, where they are of one size, before times are measured; it may raise.

        Raises:
            DoesNotFitError: the device does not hold one layer with `sample` in slices of `sizes`, or of single rows.
        """
        with self._within_budget(sample):
            if sizes is None:
                profile = self._profile_several_sizes(sample)
            else:
                profile = self._profile_one_size(sample, sizes, check_bytes)
        self.machine = profile.machine
        return profile

    def _profile_one_size(
        self, sample: Sample, sizes: Sizes, check_bytes: Callable[[CostTable], None] | None
    ) -> Profile:
        with self._all_have_room():
            table = self._measure(sample, sizes)
        if check_bytes is not None:
            check_bytes(table)
        table = self._with_allocations(table, sample, sizes)
        key = self._key(table.calls, sample, sizes)
        if (known := self._load(key)) is not None:
            return replace(known, tables=((sample.rows, with_times(table, known.tables[0][1])),))
        with self._all_have_room():
            timed = self._time(table, sample, sizes)
        return self._save(((sample.rows, timed),), key)

    def _profile_several_sizes(self, sample: Sample) -> Profile:
        self._probe_rows(sample)
        key = self._key(self._probed_calls, sample, None)
        if (known := self._load(key)) is not None:
            return known
        tables: list[tuple[int, CostTable]] = []
        # On a device that only counts, every slice takes the host as long as a whole micro-batch.
        smallest = 1 if self._runtime.device.has_values else max(1, sample.rows // _MOST_COUNTED)
        for size in doubling(sample.rows, smallest):
            sizes = Sizes(size, size)
            try:
                tables.append((size, self._time(self._measure(sample, sizes), sample, sizes)))
            except torch.OutOfMemoryError:
                self._runtime.stash.order_streams()
                if not tables:
                    raise
                _logger.info("slices of %d rows do not fit on the device; larger ones are not tried", size)
                break
        return self._save(tuple(tables), key)

    def in_slices(self, sample: Sample, profile: Profile, sizes: Sizes) -> CostTable:
        """Return bytes of `sample` in slices of `sizes`, measured, with the times that `profile` knows of them."""
        with self._within_budget(sample):
            with self._all_have_room():
                table = self._measure(sample, sizes)
            table = self._with_allocations(table, sample, sizes)
            return with_times(table, combined(profile, sizes, sample.rows))

    # ---- passes

    def _measure(self, sample: Sample, sizes: Sizes) -> CostTable:
        """Return bytes of `sample`, measured in passes until one shows nothing new about the model.

        Parameters that turn out to be used between layers join the unlayered ones.
        """
        if sizes.cut:
            self._probe_rows(sample)
        for _ in range(_ATTEMPTS):
            try:
                rows, observers = self.rows(sizes), (self._progress,)
                return Measurement(
                    self._runtime, self._layers, self.unlayered, rows, observers, self._traces_at_once
                ).measure(sample)
            except Exception as error:
                found = self._runtime.installation.touched.difference(self.unlayered)
                if not found and not isinstance(error, UnseenError):
                    raise
                self.join_unlayered((*self.unlayered, *sorted(found)))
        raise AssertionError("the model shows something new each time it is measured")

    @property
    def _traces_at_once(self) -> bool:
        """Whether allocations are recorded while bytes are measured: they are counted by operations, too."""
        device = self._runtime.device
        return device.has_caching_allocator and not device.has_values

    def _with_allocations(self, table: CostTable, sample: Sample, sizes: Sizes) -> CostTable:
        """Return `table` with what its micro-batch allocates, where a caching allocator has to serve that."""
        device = self._runtime.device
        if not device.has_caching_allocator or self._traces_at_once:
            return table
        # In a pass of its own, whose bytes do not count: operations are watched one by one, and none is compiled.
        measurement = Measurement(self._runtime, self._layers, self.unlayered, self.rows(sizes), traces=True)
        try:
            traced = measurement.measure(sample)
        except (torch.OutOfMemoryError, UnseenError) as error:  # uncompiled, it may take more, or do something else
            self._runtime.stash.order_streams()
            release_frames(error)
            return table
        return replace(table, allocations=traced.allocations if traced.calls == table.calls else None)

    def _time(self, table: CostTable, sample: Sample, sizes: Sizes) -> CostTable:
        """Return `table` with the times of `sample`; measure the machine's rates, if that has not been done."""
        runtime = self._runtime
        timing = Timing(runtime, self._layers, self.unlayered, self.rows(sizes), (self._progress,))
        timed = timing.time(table, sample)
        if self.machine is None:
            threads, dtype = runtime.updater.threads, runtime.device_copies.dtype
            machine = measure_rates(runtime.device, runtime.optimizer, dtype, timing.swaps, threads)
            moved = 0.0 if runtime.optimizer is None else runtime.optimizer.moved_bytes
            rate, weight = runtime.device_copies.disk_bytes_per_ms, runtime.device_copies.disk_weight_bytes
            self.machine = machine.with_disk(rate, moved, weight)
        return timed

    # ---- rows

    def rows(self, sizes: Sizes) -> Rows:
        """Return how layer calls are cut into slices of `sizes`, once a micro-batch has been measured in such."""
        if not sizes.cut:
            return replace(WHOLE_CALLS, from_host=sizes.from_host)
        found = self._row_probe.found[0]
        return replace(found, forward=sizes.forward, backward=sizes.backward, from_host=sizes.from_host)

    def has_probed(self, form: object) -> bool:
        """Return whether it is known which layers can be cut in calls of the model of this form."""
        return form in self._probed

    def found_rows(self, sample: Sample) -> Rows:
        """Return where calls hold the rows of a micro-batch."""
        with self._within_budget(sample):
            self._probe_rows(sample)
        return self._row_probe.found[0]

    def _probe_rows(self, sample: Sample) -> None:
        """Find out, once for each form of its calls, which layers can be cut, and log the others."""
        if sample.form in self._probed:
            return
        pairs = ((2, 3), (1, 2)) if sample.rows > 2 else ((1, 2),)
        logged = self._row_probe.found[1]
        for alike in sample.masked_alike():
            if not self._probe_few(alike, pairs):
                self._probed_calls = self._measure(sample, WHOLE).calls
        for layer, reason in self._row_probe.found[1].items():
            if reason and layer not in logged:
                _logger.warning("layer %s runs with whole micro-batches: %s", self._layers[layer].name, reason)
        self._probed.add(sample.form)  # not where memory ran out: with smaller tiles the few rows may fit

    def _probe_few(self, sample: Sample, pairs: Sequence[tuple[int, int]]) -> bool:
        """Probe the first rows of `sample`, of `pairs` the first that the device holds; return whether the model takes so
        few.
        """
        for rows in pairs:
            with suppress(torch.OutOfMemoryError):
                return any(self._takes_few_rows(reading, rows) for reading in sample.readings())
            self._runtime.stash.order_streams()
        return False

    def _takes_few_rows(self, sample: Sample, rows: tuple[int, int]) -> bool:
        """Probe the first rows of `sample`; return whether the model takes so few.

        Raises:
            torch.OutOfMemoryError: the device does not hold them.
        """
        try:
            # What the first look at a model finds (parameters between layers, inputs that are changed) comes first.
            self._probed_calls = self._measure(sample.few(rows[1]), WHOLE).calls
            self._row_probe.probe(sample, rows, self.unlayered)
        except torch.OutOfMemoryError as error:
            release_frames(error)
            raise
        except Exception as error:  # noqa: BLE001 - if the model raises it with all rows, too, it surfaces later
            _logger.warning("the model does not take %d rows of a micro-batch, to find them: %r", rows[1], error)
            self._runtime.stash.order_streams()
            release_frames(error)
            return False
        return True

    # ---- what processes have found, and files

    def join_unlayered(self, names: Iterable[str]) -> None:
        """Make parameters unlayered that other processes have found to be used between layers."""
        self.unlayered = tuple(dict.fromkeys((*names, *self.unlayered)))

    def _key(self, calls: tuple[int, ...], sample: Sample, sizes: Sizes | None) -> dict[str, str]:
        """Return what a profile depends on; `sizes`: of its slices, None: several."""
        key = self._file.key(calls, shapes_of(sample.inputs))
        key["arguments"] = sample.inputs_form
        if sizes is None or sizes.cut or sizes.from_host:
            key["pieces"] = SEVERAL if sizes is None else str(sizes)
        layer_calls = self._runtime.layer_calls
        if layer_calls.head_tiles.size or layer_calls.layer_tiles.size:
            key[TOKENS] = f"{layer_calls.head_tiles.size}{IN_LAYERS}{layer_calls.layer_tiles.size}"
        return key

    def _load(self, key: dict[str, str]) -> Profile | None:
        """Return what an earlier run saved, in all processes or in none: forward passes may wait for one another."""
        known = self._file.load(key)
        return None if self._runtime.world.any("measure the model", known is None) else known

    def _save(self, tables: tuple[tuple[int, CostTable], ...], key: dict[str, str]) -> Profile:
        assert self.machine is not None
        profile = Profile(self.machine, tables, key)
        self._file.save(profile)
        return profile

    @contextmanager
    def _all_have_room(self) -> Iterator[None]:
        """Raise DoesNotFitError in the end if a device of another process has run out of memory within the context.

        So that all go on in the same way: each may have micro-batches of another size.
        """
        world, what = self._runtime.world, "measure on all devices"
        try:
            yield
        except torch.OutOfMemoryError:
            world.any(what, True)
            raise
        if world.any(what, False):
            raise DoesNotFitError(
                "one layer with one micro-batch, which measuring holds, does not fit the device of another process: the "
                "error there says what would help."
            )

    @contextmanager
    def _within_budget(self, sample: Sample) -> Iterator[None]:
        """Turn torch.OutOfMemoryError within the context into DoesNotFitError, which holds nothing on the device."""
        device = self._runtime.device
        before = device.allocated_bytes()
        device.reset_peak()
        try:
            with self._progress.measuring(len(self._layers)):
                yield
        except DoesNotFitError:  # it says already what does not fit
            self._runtime.stash.order_streams()
            raise
        except torch.OutOfMemoryError as error:
            self._runtime.stash.order_streams()
            message = _explanation(device, before, error, sample.rows)
            release_frames(error)
            raise DoesNotFitError(message) from error


def _explanation(device: Device, before: int, error: torch.OutOfMemoryError, rows: int) -> str:
    budget, reserve, peak = device.budget_bytes, device.reserve_bytes(), device.peak_bytes()
    limit = "there is no budget" if budget is None else f"the budget is {budget:,} bytes"
    limit += f", of which libraries' workspaces and the allocator's segments take {reserve:,}" if reserve else ""
    requested = _REQUESTED.search(str(error))  # the first number of torch's message
    more = 0.0 if requested is None else float(requested[1].replace(",", "")) * _UNITS[requested[2]]
    return (
        f"one layer with one micro-batch, which measuring holds, does not fit: {limit}. Up to {peak:,} bytes were "
        f"allocated ({before:,} before), and {requested[0] if requested else 'some'} more did not fit. Ways out: (1) raise "
        f"harmony.device_memory_gib to well above {gib_number(reserve + peak + int(more))} (GiB); (2) "
        f"{way_to_smaller_micro_batches(rows)}; (3) name smaller layers in harmony.layers."
    )
