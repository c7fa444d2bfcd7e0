"""Keep a profile in a file: times measured once are used again for the same model on the same machine.

Bytes are measured anew by every engine; what is kept are the times and the machine's rates, which take
longer to measure and decide the plan. A file that was measured on something else is noticed, named, and replaced.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harmony_ds.decomposer.graph import LayerGraph, positions_of
from harmony_ds.device.base import Device
from harmony_ds.errors import ProfileError
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.profile import Profile

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """File that profiles of one model on one device are kept in; without a path, none are."""

    path: Path | None
    graph: LayerGraph
    dtypes: str
    device: Device

    def key(self, calls: tuple[int, ...], shapes: object) -> dict[str, str]:
        """Return what a profile depends on: model structure, shapes, dtypes, versions, hardware."""
        graph = self.graph
        structure: list[tuple[str, list[object]]] = []
        for layer in graph.layers:
            specs = [graph.parameter(name) for name in layer.parameters]
            # Of a packed parameter, the shape does not tell how much is moved.
            structure.append((layer.name, [spec.stored_bytes or spec.shape for spec in specs]))
        digest = hashlib.sha256(repr((structure, calls)).encode()).hexdigest()[:16]
        device = self.device.torch_device
        return {
            "model": f"{len(structure)} layers of {sum(one.numel for one in graph.parameters):,} parameters, {digest}",
            "shapes": repr(shapes),
            "dtypes": self.dtypes,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else self.device.name,
            "host": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "threads": str(torch.get_num_threads()),
        }

    def load(self, key: Mapping[str, str]) -> Profile | None:
        """Return the profile, if it was measured on what `key` says; None, with a warning, if on something else."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            profile = Profile.from_json(self.path.read_text(encoding="utf-8"))
            profile.check(key)
        except ProfileError as error:
            _logger.warning("%s is not used, and will be replaced: %s", self.path, error)
            return None
        return profile

    def save(self, profile: Profile) -> None:
        """Write beside the path and rename, so that no reader sees half a file, even if others write it meanwhile."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
            beside.write_text(profile.to_json(), encoding="utf-8")
            beside.replace(self.path)


def with_times(table: CostTable, timed: CostTable) -> CostTable:
    """Return `table`, whose bytes were just measured, with the times of `timed`, which has all of its calls."""
    costs = []
    for cost, position in zip(table.costs, positions_of(table.calls, timed.calls), strict=True):
        known = timed.costs[position]
        costs.append(
            replace(
                cost,
                forward_ms=known.forward_ms,
                backward_ms=known.backward_ms,
                fused_ms=known.fused_ms,
                propagate_ms=known.propagate_ms,
            )
        )
    return replace(table, costs=tuple(costs), head_ms=timed.head_ms, tail_ms=timed.tail_ms)
