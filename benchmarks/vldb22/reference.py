"""The published profiles and schedules of Harmony (VLDB'22)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.vldb22.cost_model.profile import LayerProfile, PackCosts
from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup
from benchmarks.vldb22.cost_model.volumes import volumes_of

_DATA = Path(__file__).parent / "data"
LARGEST = {
    "bert_large": (243, 78),
    "bert_96": (243, 78),
    "gpt2_medium": (18, 9),
    "gpt2_10b": (18, 9),
    "vgg416": (197, 173),
}
"""By model: the largest micro-batches that the original profiled, forward and backward."""

LAST_PROFILED = 40
"""The largest micro-batch of the BERT profiles in `data`; those of GPT-2 are complete."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """A schedule that the original ships, with what its own scheduler says of it.

    Attributes:
        model, name: of the schedule.
        setup, schedule: what is run, and how.
        time_s: estimates without and with overlap.
        volumes: (kind, GiB per step), the names as in the file.
    """

    model: str
    name: str
    setup: Setup
    schedule: Schedule
    time_s: tuple[float, float]
    volumes: tuple[tuple[str, float], ...]

    def differences(self) -> list[str]:
        """Return the kinds whose bytes are not those of the original; compared as whole bytes."""
        counted = volumes_of(self.setup, self.schedule, costs_of(self.model))
        return [kind for kind, gib in self.volumes if counted[kind] != gib * 2**30]


@cache
def costs_of(model: str) -> PackCosts:
    return PackCosts(profile_of(model))


def profile_of(model: str) -> LayerProfile:
    return LayerProfile.from_json((_DATA / f"prof_{model}.json").read_text(encoding="utf-8"))


def shipped(model: str) -> Iterator[Shipped]:
    layers = costs_of(model).count
    for entry in json.loads((_DATA / f"sched_{model}.json").read_text()):
        backward = (*(pack[0] for pack in entry["pack_bwd"]), layers)
        forward = (*(pack[0] for pack in entry["pack_fwd"]), backward[-2])
        yield Shipped(
            model,
            entry["name"],
            Setup(Mode(entry["mode"]), entry["N"], entry["D"]),
            Schedule(entry["u_fwd"], forward, entry["u_bwd"], backward),
            (entry["est_s_noprefetch"], entry["est_s_prefetch"]),
            tuple(entry["volumes_GiB"].items()),
        )
