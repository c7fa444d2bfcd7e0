"""Rows that a layer call takes, below and above the micro-batch: slices of one, or sets of several joined; their costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce

from harmony_ds.config import Config
from harmony_ds.errors import DoesNotFitError
from harmony_ds.measuring.measuring import Measuring
from harmony_ds.measuring.sample import Sample
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Profile
from harmony_ds.runtime.parts import Parts
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.sizes import WHOLE, Sizes, combined, doubling, rank_sizes

_GAIN = 0.99
"""A larger set of micro-batches is tried further only if it is at least this much faster."""
Choose = Callable[[CostTable, Sizes], Choice]
SizedCosts = Iterator[tuple[Sizes, CostTable]]


class CallSizes:
    """Measures of one model by the sizes of its layer calls.

    Attributes:
        wanted: sizes as configured; None: as the search finds best.
        together: how many micro-batches' layer calls are joined.
        alone: costs of single micro-batches, where several may be joined.
    """

    def __init__(self, parts: Parts, config: Config, measuring: Measuring, choose: Choose, saved: Plan | None) -> None:
        """Run with the sizes of `saved`, if given.

        `choose` returns the best plan with given costs, and raises DoesNotFitError if none fits.
        """
        self.wanted = Sizes.wanted(config.harmony.micro_batch) if saved is None else Sizes.of(saved.policy)
        self.together = 1 if saved is None else saved.policy.together
        self.alone: CostTable | None = None
        self._world, self._joins = parts.world, parts.joins
        self._grouping, self._group_size = config.harmony.grouping, config.gradient_accumulation_steps
        self._measuring = measuring
        self._choose = choose

    @property
    def joins_calls(self) -> bool:
        """Whether layer calls of several micro-batches are made as one."""
        return self.together > 1 and not self._joins.are_off

    @property
    def joins_random_calls(self) -> bool:
        """Whether joined calls draw random numbers, which are not those of single ones."""
        return self.joins_calls and self._joins.are_random

    def stop_joining(self) -> CostTable | None:
        """Join no more; return the costs of single micro-batches."""
        self.together, alone, self.alone = 1, self.alone, None
        return alone

    def measured(self, sample: Sample, chosen: Sizes | None) -> SizedCosts:
        """Yield costs in the wanted size, or as `ranked` does; `chosen`: slices of the plan in force, if it joins calls."""
        if chosen is not None:
            single = self._see_alone(sample)
            table = self._set_that_fits(sample, self.together, chosen) if sample.trains else single
            if table is not None:
                yield chosen, table
            if self.wanted is not None:
                self._joins.refuse("there is no room for them together")
            self.together, self.alone = 1, None
        if sample.trains and (joined := self.joined(sample)) is not None:
            yield joined[0], joined[1].tables[0][1]
            return
        if self.wanted is not None:
            yield self.wanted, self._measuring.profile(sample, self.wanted).tables[0][1]
            return
        rows = self._world.max("rows", sample.rows)
        sample = sample if rows == sample.rows else sample.few(rows)
        yield from self.ranked(sample, self._agreed(self._measuring.profile(sample, None)))

    def _agreed(self, profile: Profile) -> Profile:
        """Return the costs that cover all processes' micro-batches, in slices that fit all of their devices."""
        found = [dict(tables) for tables in self._world.all("slices", profile.tables)]
        sizes = [size for size, _ in profile.tables if all(size in tables for tables in found)]
        return replace(profile, tables=tuple((s, reduce(CostTable.worst, (one[s] for one in found))) for s in sizes))

    def ranked(self, sample: Sample, profile: Profile) -> SizedCosts:
        """Yield sizes below and above the micro-batch with their costs, those of the fastest plan first.

        Args:
            profile: of `sample` in slices of several sizes.

        Raises:
            DoesNotFitError: none fits.
        """
        in_slices: list[Sizes] = []
        failure: DoesNotFitError | None = None
        try:
            in_slices = rank_sizes(profile, sample.rows, self._choose)
        except DoesNotFitError as error:
            failure = error.with_traceback(None)  # which holds this frame
        if in_slices and self.may_join:
            self._see_alone(sample)
            one_by_one = self._choose(combined(profile, in_slices[0], sample.rows), in_slices[0])
            if not self._world.any("join nothing", not self._joins.dims):
                for table in self._faster_sets(sample, one_by_one):
                    yield WHOLE, table
        self.together, self.alone = 1, None
        if failure is not None:
            raise failure
        for sizes in in_slices:
            yield sizes, self._measuring.in_slices(sample, profile, sizes)

    def joined(self, sample: Sample) -> tuple[Sizes, Profile] | None:
        """Return slices, and costs, of as many micro-batches as make the larger of the configured sizes; None: of one."""
        wanted = self.wanted
        if wanted is None or not self.may_join:
            return None
        asked, rows = (wanted.forward, wanted.backward), self._world.max("rows to join", sample.rows)
        if max(asked) <= rows:
            return None
        together = min(-(-max(asked) // rows), self._group_size)
        sizes = Sizes(*(size if size < together * rows else 0 for size in asked))
        self._see_alone(sample)
        # Nothing, if the model does not take repeated rows, or no layer can.
        nothing = self._world.any("join nothing", not self._joins.dims)
        return None if nothing else (sizes, self._of_set(sample, together, sizes))

    @property
    def may_join(self) -> bool:
        """Whether layer calls may take the rows of several micro-batches at once."""
        wanted = self._grouping and self._group_size > 1
        return wanted and not self._world.any("join calls", self._joins.are_off)

    def _see_alone(self, sample: Sample) -> CostTable:
        """Return what a micro-batch costs by itself, where several may be one; note where its calls hold the rows."""
        single = self._measuring.profile(sample, WHOLE).tables[0][1]
        self.alone = single if self.alone is None else self.alone.worst(single)
        found = self._measuring.found_rows(sample)
        self._joins.dims, self._joins.are_random = found.dims, bool(found.drawing)
        return single

    def _of_set(self, sample: Sample, together: int, sizes: Sizes) -> Profile:
        """Return costs of so many micro-batches like `sample` as one, in slices of `sizes`."""
        self.together = together
        profile = self._measuring.profile(sample.few(together * sample.rows), sizes)
        ((rows, table),) = profile.tables
        assert self.alone is not None
        table = replace(table, flow=table.flow.of_set(self.alone.flow, together))
        return replace(profile, tables=((rows, table),))

    def _set_that_fits(self, sample: Sample, together: int, sizes: Sizes) -> CostTable | None:
        """Return costs of so many micro-batches as one; None: a device does not hold them."""
        table = None
        with suppress(DoesNotFitError):
            table = self._of_set(sample, together, sizes).tables[0][1]
        return None if self._world.any("join fewer", table is None) else table

    def _faster_sets(self, sample: Sample, one_by_one: Choice) -> Iterator[CostTable]:
        """Yield costs of sets of micro-batches that are faster than single ones, those of the fastest plan first."""
        found: list[tuple[float, int, CostTable]] = []
        best_ms = one_by_one.prediction.step_ms
        for together in tuple(doubling(self._group_size))[1:]:
            ms, table = float("inf"), self._set_that_fits(sample, together, WHOLE)
            if table is None:
                break
            with suppress(DoesNotFitError):
                ms = self._choose(table, WHOLE).prediction.step_ms
            if ms > _GAIN * best_ms:  # larger ones are not tried: they take more memory
                break
            best_ms = ms
            found.append((ms, together, table))
        for _, self.together, table in sorted(found, key=lambda one: one[0]):
            yield table
