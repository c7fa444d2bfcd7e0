"""Which heads one engine calls in tiles of tokens, with the loss, because their outputs do not fit on the device whole."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class HeadTiles:
    """Heads whose output is computed a tile of tokens at a time. `Planner` sets the size, measuring finds the heads.

    Attributes:
        size: how many tokens a tile has; 0: nothing is cut.
        heads: by layer, whether its output is computed in tiles, with the loss; those not tried yet are missing.
    """

    size: int = 0
    heads: dict[int, bool] = field(default_factory=dict)
    _uses: set[tuple[int, str]] = field(default_factory=set)

    def has_head(self, layer: int) -> bool:
        """Return whether calls of `layer` are made in tiles of tokens, with the loss."""
        return self.size > 0 and self.heads.get(layer, False)

    def is_new_use(self, layer: int, function: str) -> bool:
        """Note that `function` needed all of a head's output at once; return whether that was not known."""
        is_new = self.heads.get(layer, False) and (layer, function) not in self._uses
        self._uses.add((layer, function))
        return is_new
