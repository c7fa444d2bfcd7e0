"""How many tokens of a micro-batch run at a time, where all of them at once do not fit: in the head, and inside layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Policy


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of tiles of tokens.

    Attributes:
        head: tokens that go through the last layer and the loss at a time; 0: all.
        layers: tokens that go at a time through those parts of layers that treat each token by itself; 0: all.
    """

    head: int = 0
    layers: int = 0

    @staticmethod
    def from_policy(policy: Policy | Mapping[str, Any]) -> Tiles:
        """Return the tiles of a plan, or of a policy as plans are saved (by earlier versions, too)."""
        if isinstance(policy, Policy):
            return Tiles(policy.tile_tokens, policy.layer_tile_tokens)
        return Tiles(policy.get("tile_tokens", 0), policy.get("layer_tile_tokens", 0))

    @staticmethod
    def from_config(tokens: str | int | tuple[int, int]) -> Tiles:
        """Return the tiles that harmony.tokens names; "auto" begins with none."""
        if isinstance(tokens, str):
            return UNCUT
        return Tiles(tokens) if isinstance(tokens, int) else Tiles(*tokens)

    @property
    def cut(self) -> bool:
        """Whether anything runs in tiles."""
        return bool(self.head or self.layers)

    def __str__(self) -> str:
        if not self.head:
            return f"parts of layers take {self.layers:,} tokens at a time" if self.layers else "none"
        head = f"the last layer and the loss take {self.head:,} tokens at a time"
        return f"{head}, parts of layers {self.layers:,}" if self.layers else head


UNCUT = Tiles()


def head_takes_most(costs: CostTable, parameter_bytes: Sequence[int]) -> bool:
    """Return whether the last layer and the loss take more device memory than any other layer call.

    Args:
        parameter_bytes: of each call, the weights and the sums of their gradients.
    """
    *others, last = [
        held + max(cost.forward.peak_bytes, cost.backward.peak_bytes)
        for held, cost in zip(parameter_bytes, costs.costs, strict=True)
    ]
    return costs.tail_bytes + last > max(others, default=0)
