"""Many policies over the same packs as arrays, so that bounds are computed for all of them at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harmony_ds.scheduler.plan import Policy

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies that differ in what the search decides.

    Attributes:
        base: the rest.
        resident, kept: by pack of the backward pass, then by policy: shape (packs, policies).
        away: how many forward packs have their stash on the host: shape (policies,).
        prefetch: shape (policies,).
        graphs: of how many micro-batches graphs are kept: shape (packs, policies).
    """

    base: Policy
    resident: Flags
    kept: Flags
    away: NDArray[np.int_]
    prefetch: Flags
    graphs: NDArray[np.int_]

    def __len__(self) -> int:
        return len(self.away)

    def __getitem__(self, place: int) -> Policy:
        resident, kept = (tuple(np.flatnonzero(flags[:, place]).tolist()) for flags in (self.resident, self.kept))
        away, prefetch = int(self.away[place]), bool(self.prefetch[place])
        counts = tuple(self.graphs[:, place].tolist())
        graphs = counts if any(counts) else ()
        return replace(self.base, resident=resident, kept=kept, graphs=graphs, stash_on_host=away, prefetch=prefetch)

    def only(self, chosen: Flags | NDArray[np.int_]) -> Policies:
        """Return the policies that are chosen."""
        resident, kept = self.resident[:, chosen], self.kept[:, chosen]
        return Policies(self.base, resident, kept, self.away[chosen], self.prefetch[chosen], self.graphs[:, chosen])
