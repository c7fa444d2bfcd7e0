"""How many rows of a micro-batch go through a layer at a time, forward and backward.

Fewer rows need less working memory, so that packs may be larger or more may stay on the device; more rows keep the
device busier. Both are known from cost tables of the same micro-batch in slices of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from harmony_ds.errors import DoesNotFitError
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.profile import Profile
from harmony_ds.scheduler.search import Choice, smallest_failure, time_rank

_GAIN = 0.99
"""A larger size is tried only if its time is below this share of the time of the smaller ones."""


@dataclass(frozen=True, slots=True, order=True)
class Sizes:
    """How many rows a layer call takes.

    Attributes:
        forward, backward: rows of a slice in the forward packs, and in the backward pass; 0: all rows of the set.
        joined_count: how many micro-batches are one set, whose rows go through a layer at a time.
        from_host: whether they take them from the host in backward, see `Policy.slices_from_host`.
    """

    forward: int = 0
    backward: int = 0
    joined_count: int = 1
    from_host: bool = False

    @staticmethod
    def from_policy(policy: Policy) -> Sizes:
        """Return the sizes of a plan."""
        return Sizes(policy.forward_rows, policy.backward_rows, policy.joined_count, policy.slices_from_host)

    @staticmethod
    def from_config(micro_batch: str | tuple[int, int]) -> Sizes | None:
        """Return the sizes that harmony.micro_batch names; None: the search decides."""
        if isinstance(micro_batch, tuple):
            return Sizes(*micro_batch)
        return WHOLE if micro_batch == "config" else None

    @property
    def cut(self) -> bool:
        """Whether layers take slices."""
        return bool(self.forward or self.backward)

    def __str__(self) -> str:
        return f"{self.forward or 'all'} rows forward and {self.backward or 'all'} backward"


WHOLE = Sizes()


@dataclass(frozen=True, slots=True)
class SizedCosts:
    """Costs of a micro-batch, or of a set of several whose calls are joined and of one of those `alone`."""

    sizes: Sizes
    table: CostTable
    alone: CostTable | None = None

    def after(self, before: SizedCosts) -> SizedCosts:
        """Return costs that also cover what was measured `before`; calls that were measured only then keep their costs."""
        alone, known = self.alone, before.alone
        if alone is not None and known is not None:
            alone = known.worst(alone)
        if before.sizes.joined_count == self.sizes.joined_count:
            known = before.table
        table = self.table if known is None else known.worst(self.table)
        return SizedCosts(self.sizes, table.including(before.table), alone)

    def with_margin(self, nbytes: int) -> SizedCosts:
        """Return the costs with so much more margin."""
        table = replace(self.table, margin_bytes=self.table.margin_bytes + nbytes)
        alone = None if self.alone is None else replace(self.alone, margin_bytes=table.margin_bytes)
        return replace(self, table=table, alone=alone)


def doubling(rows: int, smallest: int = 1) -> Iterator[int]:
    """Yield the sizes to measure: `smallest`, twice that, four times that, ... and `rows`."""
    size = smallest
    while size < rows:
        yield size
        size *= 2
    yield rows


def combined(profile: Profile, sizes: Sizes, rows: int) -> CostTable:
    """Return the costs of a micro-batch of `rows` rows in slices of `sizes`.

    Args:
        profile: tables of that micro-batch by the size of its slices, the same in both passes.
    """
    there, back = profile.at(sizes.forward or rows), profile.at(sizes.backward or rows)
    in_slices = there.in_slices or back.in_slices or min(sizes.forward or rows, sizes.backward or rows) < rows
    pairs = zip(there.costs, back.costs, strict=True)
    costs = [
        replace(b, forward=replace(b.forward, peak_bytes=f.forward.peak_bytes), forward_ms=f.forward_ms)
        for f, b in pairs
    ]
    if in_slices:
        costs = [replace(cost, fused_ms=cost.forward_ms + cost.backward_ms) for cost in costs]
    return replace(back, costs=tuple(costs), in_slices=in_slices)


def rank_sizes(profile: Profile, rows: int, choose: Callable[[CostTable, Sizes], Choice]) -> list[Sizes]:
    """Return the sizes that fit, those of the fastest plan first.

    Args:
        choose: returns the best plan with given costs in slices of these sizes; raises DoesNotFitError if none fits.

    Raises:
        DoesNotFitError: none fits.
    """
    found: list[tuple[tuple[int, int, Sizes], Sizes]] = []
    best_ms = float("inf")
    failures: list[DoesNotFitError] = []
    for bound_ms, sizes in _promising(profile, rows):
        if bound_ms > best_ms:
            break
        try:
            prediction = choose(combined(profile, sizes, rows), sizes).prediction
            best_ms = min(best_ms, prediction.step_ms)
            found.append(((time_rank(prediction.step_ms), prediction.swaps.total, sizes), sizes))
        except DoesNotFitError as error:
            failures.append(error.with_traceback(None))  # which holds this frame
    if not found:
        raise smallest_failure(failures)
    return [sizes for _, sizes in sorted(found)]


def _promising(profile: Profile, rows: int) -> list[tuple[float, Sizes]]:
    """Pairs of sizes with the least time that one micro-batch's layers take in them, ascending."""
    measured = [size for size, _ in profile.tables]
    every = sorted({*measured, *(3 * size // 2 for size in measured if size > 1 and 3 * size // 2 < measured[-1])})
    tables = {size: profile.at(size) for size in every}
    there = _front((size, sum(c.forward_ms for c in table.costs)) for size, table in tables.items())
    back = _front((size, sum(c.backward_ms for c in table.costs)) for size, table in tables.items())
    pairs = []
    for f in there:
        for b in back:
            costs = combined(profile, Sizes(f, b), rows).costs
            pairs.append((sum(min(c.fused_ms, c.forward_ms + c.backward_ms) for c in costs), Sizes(f, b)))
    return sorted(pairs)


def _front(times: Iterable[tuple[int, float]]) -> list[int]:
    """Return the sizes that are faster than every smaller one."""
    chosen: list[int] = []
    best_ms = float("inf")
    for size, ms in times:
        if ms < best_ms * _GAIN or not chosen:
            chosen.append(size)
            best_ms = ms
    return chosen
