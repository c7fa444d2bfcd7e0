"""Rows that a layer call takes, below and above the micro-batch: slices of one, or sets of several joined; their costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce

from harmony_ds.config import Config
from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiling.profiler import Profiler
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.profile import Profile
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.sizes import WHOLE, SizedCosts, Sizes, combined, doubling, rank_sizes

_GAIN = 0.99
"""A larger set of micro-batches is tried further only if it is at least this much faster."""
Choose = Callable[[CostTable, Sizes], Choice]


class CallSizes:
    """Measurer of one model with layer calls of several sizes: slices of a micro-batch, and sets of joined ones.

    Attributes:
        wanted: sizes as configured; None: as the search finds best.
    """

    def __init__(
        self, runtime: Runtime, config: Config, profiler: Profiler, choose: Choose, saved: Plan | None
    ) -> None:
        """Run with the sizes of `saved`, if given.

        `choose` returns the best plan with given costs, and raises DoesNotFitError if none fits.
        """
        wanted, self._group_size = Sizes.from_config(config.harmony.micro_batch), config.gradient_accumulation_steps
        self.wanted = wanted if saved is None else replace(Sizes.from_policy(saved.policy), joined_count=1)
        self._may_join = config.harmony.grouping and self._group_size > 1
        self._world, self._joins = runtime.world, runtime.joins
        self._profiler = profiler
        self._choose = choose

    def measured(self, sample: Sample, current: Sizes) -> Iterator[SizedCosts]:
        """Yield costs in the wanted size, or as `ranked` does; before them in the `current` sizes, if they join."""
        if current.joined_count > 1 and not self._world.any("stop joining", self._joins.are_off):
            alone = self._alone(sample)
            found = self._set_that_fits(sample, current, alone) if sample.trains else SizedCosts(current, alone, alone)
            if found is not None:
                yield found
            if self.wanted is not None:
                self._joins.refuse("there is no room for them together")
        if sample.trains and (joined := self.joined(sample)) is not None:
            yield joined[0]
            return
        if self.wanted is not None:
            yield SizedCosts(self.wanted, self._profiler.profile(sample, self.wanted).tables[0][1])
            return
        rows = self._world.max("rows", sample.rows)
        sample = sample if rows == sample.rows else sample.few(rows)
        yield from self.ranked(sample, self._agreed(self._profiler.profile(sample, None)))

    def _agreed(self, profile: Profile) -> Profile:
        """Return the costs that cover all processes' micro-batches, in slices that fit all of their devices."""
        found = [dict(tables) for tables in self._world.gather_values("slices", profile.tables)]
        sizes = [size for size, _ in profile.tables if all(size in tables for tables in found)]
        return replace(profile, tables=tuple((s, reduce(CostTable.worst, (one[s] for one in found))) for s in sizes))

    def ranked(self, sample: Sample, profile: Profile) -> Iterator[SizedCosts]:
        """Yield costs in sizes above and below the micro-batch, those of the fastest plan first.

        Args:
            profile: of `sample` in slices of several sizes.

        Raises:
            DoesNotFitError: none fits.
        """
        in_slices = rank_sizes(profile, sample.rows, self._choose)
        if self.may_join:
            alone = self._alone(sample)
            one_by_one = self._choose(combined(profile, in_slices[0], sample.rows), in_slices[0])
            if not self._world.any("join nothing", not self._joins.dims):
                yield from self._faster_sets(sample, alone, one_by_one.prediction.step_ms)
        for sizes in in_slices:
            yield SizedCosts(sizes, self._profiler.in_slices(sample, profile, sizes))

    def joined(self, sample: Sample) -> tuple[SizedCosts, Profile] | None:
        """Return costs of as many micro-batches as make the larger of the configured sizes; None: of one."""
        wanted = self.wanted
        if wanted is None or not self.may_join:
            return None
        asked, rows = (wanted.forward, wanted.backward), self._world.max("rows to join", sample.rows)
        if max(asked) <= rows:
            return None
        joined_count = min(-(-max(asked) // rows), self._group_size)
        forward, backward = (size if size < joined_count * rows else 0 for size in asked)
        alone = self._alone(sample)
        # Nothing, if the model does not take repeated rows, or no layer can.
        nothing = self._world.any("join nothing", not self._joins.dims)
        return None if nothing else self._of_set(sample, Sizes(forward, backward, joined_count), alone)

    @property
    def may_join(self) -> bool:
        """Whether layer calls may take the rows of several micro-batches at once."""
        return self._may_join and not self._world.any("join calls", self._joins.are_off)

    def _alone(self, sample: Sample) -> CostTable:
        """Return what a micro-batch costs by itself, where several may be one; note where its calls hold the rows."""
        single = self._profiler.profile(sample, WHOLE).tables[0][1]
        found = self._profiler.found_rows(sample)
        self._joins.dims = found.dims
        self._joins.are_random = bool(found.drawing)
        self._joins.code_between_draws |= found.code_between_draws
        return single

    def _of_set(self, sample: Sample, sizes: Sizes, alone: CostTable) -> tuple[SizedCosts, Profile]:
        """Return costs of a set of micro-batches like `sample`, which costs so much `alone`."""
        profile = self._profiler.profile(sample.few(sizes.joined_count * sample.rows), sizes)
        table = profile.tables[0][1]
        table = replace(table, flow=table.flow.of_set(alone.flow, sizes.joined_count))
        return SizedCosts(sizes, table, alone), profile

    def _set_that_fits(self, sample: Sample, sizes: Sizes, alone: CostTable) -> SizedCosts | None:
        """Return what `_of_set` does; None: a device does not hold them."""
        sized = None
        with suppress(DoesNotFitError):
            sized, _ = self._of_set(sample, sizes, alone)
        return None if self._world.any("join fewer", sized is None) else sized

    def _faster_sets(self, sample: Sample, alone: CostTable, best_ms: float) -> Iterator[SizedCosts]:
        """Yield costs of sets whose plans take less than `best_ms`, those of the fastest first."""
        found: list[SizedCosts] = []
        for joined_count in tuple(doubling(self._group_size))[1:]:
            ms, sized = float("inf"), self._set_that_fits(sample, Sizes(joined_count=joined_count), alone)
            if sized is None:
                break
            with suppress(DoesNotFitError):
                ms = self._choose(sized.table, sized.sizes).prediction.step_ms
            if ms > _GAIN * best_ms:  # larger ones are not tried: they take more memory
                break
            best_ms = ms
            found.append(sized)
        yield from reversed(found)
