"""Many policies over the same packs, as arrays: what is computed for all of them at once is computed in no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harmony_ds.scheduler.plan import Packing, Policy

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies that differ in what the search decides.

    Attributes:
        base: the rest.
        resident, kept: by pack of the backward pass, then by policy: shape (packs, policies).
        away: how many forward packs have their stash on the host: shape (policies,).
        prefetch: shape (policies,).
        graphs: of how many micro-batches graphs are kept: shape (packs, policies); None: of none.
    """

    base: Policy
    resident: Flags
    kept: Flags
    away: NDArray[np.int_]
    prefetch: Flags
    graphs: NDArray[np.int_] | None = None

    @staticmethod
    def of(packing: Packing, policies: Sequence[Policy]) -> Policies:
        """At least one policy."""
        count = len(packing.backward)
        resident, kept = (np.zeros((count, len(policies)), bool) for _ in range(2))
        for place, policy in enumerate(policies):
            resident[list(policy.resident), place] = True
            kept[[index for index in policy.kept if index < count], place] = True
        away = np.array([min(policy.stash_on_host, len(packing.forward)) for policy in policies])
        return Policies(policies[0], resident, kept, away, np.array([policy.prefetch for policy in policies]))

    def __len__(self) -> int:
        return len(self.away)

    def __getitem__(self, place: int) -> Policy:
        resident, kept = (tuple(np.flatnonzero(flags[:, place]).tolist()) for flags in (self.resident, self.kept))
        away, prefetch = int(self.away[place]), bool(self.prefetch[place])
        counts = () if self.graphs is None else tuple(self.graphs[:, place].tolist())
        graphs = counts if any(counts) else ()
        return replace(self.base, resident=resident, kept=kept, graphs=graphs, stash_on_host=away, prefetch=prefetch)

    def only(self, chosen: Flags | NDArray[np.int_]) -> Policies:
        """Return the policies that are chosen."""
        resident, kept = self.resident[:, chosen], self.kept[:, chosen]
        graphs = None if self.graphs is None else self.graphs[:, chosen]
        return Policies(self.base, resident, kept, self.away[chosen], self.prefetch[chosen], graphs)
