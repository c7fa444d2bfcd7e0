"""Mechanisms of the schedule, and the keys of the "harmony" block that switch each off: to see what it is worth.

Every switch changes when and where things happen, on the CPU device never the bits of a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ablation:
    """A mechanism that is switched off, or done in another way.

    Attributes:
        name: in tables.
        harmony: keys of the "harmony" block.
        device: the kind of device on which it can make a difference ("": any).
        rounds_on_cuda: results are not the same bits there.
    """

    name: str
    harmony: Mapping[str, object]
    device: str = ""
    rounds_on_cuda: bool = False

    def applied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the ds_config `config` with the mechanism switched off; other keys stay as they are."""
        return {**config, "harmony": {**(config.get("harmony") or {}), **self.harmony}}


ABLATIONS = (
    Ablation("stash on device", {"stash": "device"}),
    Ablation("stash on host", {"stash": "host"}),
    Ablation("without residency", {"residency": "off"}, rounds_on_cuda=True),
    Ablation("without pinned memory", {"pin_memory": False}, device="cuda"),
    Ablation("without grouping", {"grouping": False}),
    Ablation("without prefetch", {"prefetch": False}),
    Ablation("without everything", {"residency": "off", "grouping": False, "prefetch": False}, rounds_on_cuda=True),
)
"""In the order in which a table shows them."""
