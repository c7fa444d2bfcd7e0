"""Everything the scheduler knows of a model on a machine: a `CostTable` per micro-batch size, and the machine's rates.

Pure data. It saves as JSON under a key that names what it was measured on, so that a profile of another model or
machine is noticed before it is used.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from harmony_ds.errors import ProfileError
from harmony_ds.scheduler.allocations import Allocations
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.crossing import CrossingValue
from harmony_ds.scheduler.flow import Flow

UPDATE_BYTES_PER_ELEMENT = 28.0
"""Adam in fp32: master, both moments read and written (24), the gradient read (4)."""

_FORMAT = 9
_SHOWN = 60  # characters of an entry in an error
_Costs = TypeVar("_Costs", CallCost, CostTable, WaitingBytes, StashBytes, ForwardBytes, BackwardBytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device and its host.

    Attributes:
        name: of the machine, for people.
        copies_overlap: whether copies run beside compute, on streams of their own (CUDA), or on the thread that
            computes (the CPU device).
        swap_in_bytes_per_ms, swap_out_bytes_per_ms: of the link, each direction alone.
        link_bytes_per_ms: of both directions at once.
        swap_ms: fixed cost of one swap.
        update_elements_per_ms: parameters that the host optimizer updates, alone.
        update_bytes_per_element: host memory that updating one parameter reads and writes.
        norm_elements_per_ms: gradient elements whose norm the host takes, where it does; see `host_norm_ms`.
        host_bytes_per_ms: host memory bandwidth, which updates and swaps share.
        update_ms: fixed cost of updating one pack.
        task_ms: the host's cost of issuing one task (Python, kernel launches that compute does not hide).
        beside_update: speed of compute, and of the update, while both run; 1.0 where they do not disturb each other.
        device_update_elements_per_ms: parameters that the device's optimizer updates.
        device_bytes: device memory.
        peer_bytes_per_ms: what one of several devices sends to the others while it receives as much; 0: there is one.
        peer_ms: fixed cost of reducing one pack's gradients, or gathering its weights, among them.
        peers_share_link: whether what they send each other takes the link to the host.
        disk_bytes_per_ms: what a disk reads or writes that weights come from; 0: they are in host memory.
        update_disk: share of a disk's time that updates take at full speed.
    """

    name: str
    copies_overlap: bool
    swap_in_bytes_per_ms: float
    swap_out_bytes_per_ms: float
    link_bytes_per_ms: float
    update_elements_per_ms: float
    norm_elements_per_ms: float
    host_bytes_per_ms: float
    device_update_elements_per_ms: float
    swap_ms: float = 0.0
    update_ms: float = 0.0
    update_bytes_per_element: float = UPDATE_BYTES_PER_ELEMENT
    task_ms: float = 0.0
    beside_update: float = 1.0
    device_bytes: int | None = None
    peer_bytes_per_ms: float = 0.0
    peer_ms: float = 0.0
    peers_share_link: bool = False
    disk_bytes_per_ms: float = 0.0
    update_disk: float = 0.0

    def swap_in_ms(self, nbytes: float) -> float:
        return self.swap_ms + nbytes / self.swap_in_bytes_per_ms

    def swap_out_ms(self, nbytes: float) -> float:
        return self.swap_ms + nbytes / self.swap_out_bytes_per_ms

    def host_update_ms(self, elements: int) -> float:
        return self.update_ms + elements / self.update_elements_per_ms

    def host_norm_ms(self, elements: int, whole: bool) -> float:
        """Return the time of a norm on the host; a device whose copies overlap takes that of `whole` gradients."""
        return 0.0 if self.copies_overlap and whole else elements / self.norm_elements_per_ms

    def host_sum_ms(self, elements: int, devices: int) -> float:
        """Return the time to add up so many gradients of each device, which the host reads to write their sum."""
        return (devices + 1) * elements / self.norm_elements_per_ms

    def peer_exchange_ms(self, sent_bytes: float) -> float:
        """Return the time to exchange gradients, or weights, of which this device sends so many bytes to the others."""
        return self.peer_ms + (sent_bytes / self.peer_bytes_per_ms if sent_bytes else 0.0)

    def among(self, devices: int) -> Machine:
        """Return what each of so many devices has, with a link of its own, on one host whose memory and cores they share.

        Where no rate between devices is known, they send through the link, both ways at once.
        """
        if devices == 1:
            return self
        return replace(
            self,
            name=f"{devices} x {self.name}",
            host_bytes_per_ms=self.host_bytes_per_ms / devices,
            update_elements_per_ms=self.update_elements_per_ms / devices,
            norm_elements_per_ms=self.norm_elements_per_ms / devices,
            disk_bytes_per_ms=self.disk_bytes_per_ms / devices,
            peer_bytes_per_ms=self.peer_bytes_per_ms or self.link_bytes_per_ms / 2,
            peers_share_link=not self.peer_bytes_per_ms,
        )

    def with_disk(self, bytes_per_ms: float, update_bytes: float, weight_bytes: int) -> Machine:
        """Return the machine with a disk (infinitely fast: without), to and from which updates move so many bytes an
        element, and a weight's, if weights come from it. An update that waits for it needs no core meanwhile.
        """
        moved, alone = update_bytes + weight_bytes, self.update_elements_per_ms
        updated = min(alone, bytes_per_ms / moved) if moved else alone
        return replace(
            self,
            update_elements_per_ms=updated,
            beside_update=1.0 - (1.0 - self.beside_update) * updated / alone,
            disk_bytes_per_ms=bytes_per_ms if weight_bytes else 0.0,
            update_disk=updated * moved / bytes_per_ms,
        )

    def with_peers(self, bytes_per_ms: float, fixed_ms: float) -> Machine:
        """Return the machine as one of several whose exchanges were measured.

        Their way cannot be seen. What is no faster than the link is taken to go through it: a bridge between devices is.
        """
        through_link = self.copies_overlap and bytes_per_ms <= self.swap_out_bytes_per_ms
        return replace(self, peer_bytes_per_ms=bytes_per_ms, peer_ms=fixed_ms, peers_share_link=through_link)

    def slower(self, other: Machine) -> Machine:
        """Return the machine that is in every respect as slow as the slower of the two."""
        costs = ("swap_ms", "update_ms", "update_bytes_per_element", "task_ms", "peer_ms", "peers_share_link")
        worst: dict[str, Any] = {}
        for one in fields(Machine):
            values = getattr(self, one.name), getattr(other, one.name)
            if one.name in costs:
                worst[one.name] = max(values)
            elif one.name not in ("name", "device_bytes"):
                worst[one.name] = min(values)
        room = min((m.device_bytes for m in (self, other) if m.device_bytes is not None), default=None)
        return Machine(name=self.name, device_bytes=room, **worst)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by micro-batch size.

    Attributes:
        machine: the rates.
        tables: by rows of a micro-batch, ascending; all have the same calls.
        key: what this was measured on: model structure, shapes, dtypes, versions, hardware.
    """

    machine: Machine
    tables: tuple[tuple[int, CostTable], ...]
    key: Mapping[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[int, ...]:
        return self.tables[0][1].calls

    def at(self, rows: int) -> CostTable:
        """Costs of a micro-batch of `rows`: as measured, or interpolated between the sizes around it.

        Raises:
            ProfileError: `rows` is larger than everything measured.
        """
        sizes = [size for size, _ in self.tables]
        place = bisect_left(sizes, rows)
        if place == len(sizes):
            raise ProfileError(
                f"micro-batches of up to {sizes[-1]} rows were profiled, but the plan is wanted for {rows}: profile "
                "larger ones, or lower train_micro_batch_size_per_gpu."
            )
        above = self.tables[place][1]
        if sizes[place] == rows or place == 0:
            # Below the smallest size the smallest one bounds bytes and time.
            return above
        below = self.tables[place - 1][1]
        share = (rows - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return _between(below, above, share)

    def to_json(self) -> str:
        data = {
            "format": _FORMAT,
            "key": dict(self.key),
            "machine": asdict(self.machine),
            "tables": [{"rows": rows, "table": asdict(table)} for rows, table in self.tables],
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read a profile; raise ProfileError where `text` is none, or one of another version."""
        try:
            data = json.loads(text)
            found = data["format"]
            if found != _FORMAT:
                raise ProfileError(f"the profile has format {found}, this version reads {_FORMAT}: profile again.")
            tables = tuple((entry["rows"], _table(entry["table"])) for entry in data["tables"])
            return Profile(Machine(**data["machine"]), tables, data["key"])
        except (ValueError, TypeError, KeyError) as error:
            raise ProfileError(f"this is no profile of harmony_ds ({error!r}): profile again.") from error

    def check(self, key: Mapping[str, str]) -> None:
        """Raise ProfileError, naming what differs, unless this was measured on what `key` says."""
        differing = [name for name in {**self.key, **key} if self.key.get(name) != key.get(name)]
        if differing:
            what = "; ".join(f"{name} {_difference(self.key.get(name, ''), key.get(name, ''))}" for name in differing)
            raise ProfileError(f"the profile was made for something else: {what}. Delete the file, or profile again.")


def _difference(before: str, now: str) -> str:
    """Return both texts from where they begin to differ."""
    same = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), 0)
    begin = 0 if max(len(before), len(now)) <= _SHOWN else max(0, same - _SHOWN // 3)
    was, is_now = (f"{'...' if begin else ''}{text[begin : begin + _SHOWN]!r}" for text in (before, now))
    return f"was {was} and is {is_now} now"


def _between(below: CostTable, above: CostTable, share: float) -> CostTable:
    costs = tuple(_mixed(a, b, share) for a, b in zip(below.costs, above.costs, strict=True))
    crossing = above.crossing
    if [value.first for value in below.crossing] == [value.first for value in crossing]:
        pairs = zip(below.crossing, above.crossing, strict=True)
        crossing = tuple(replace(b, nbytes=a.nbytes + round((b.nbytes - a.nbytes) * share)) for a, b in pairs)
    return replace(_mixed(below, above, share), costs=costs, crossing=crossing)


def _mixed(below: _Costs, above: _Costs, share: float) -> _Costs:
    """Return the numbers between both, also in the parts of a call's cost; bytes are rounded up.

    What is no number is taken from `above`.
    """
    values: dict[str, Any] = {}
    for f in fields(above):
        a, b = getattr(below, f.name), getattr(above, f.name)
        if isinstance(b, (WaitingBytes, StashBytes, ForwardBytes, BackwardBytes)):
            values[f.name] = _mixed(a, b, share)
        elif isinstance(b, (int, float)) and not isinstance(b, bool):
            mixed = a + (b - a) * share
            values[f.name] = mixed if isinstance(b, float) else -int(-mixed // 1)
    return replace(above, **values)


def _table(data: dict[str, Any]) -> CostTable:
    costs = tuple(_call_cost(cost) for cost in data["costs"])
    crossing = tuple(CrossingValue.from_dict(value) for value in data["crossing"])
    whole = {"calls": tuple(data["calls"]), "costs": costs, "flow": Flow.from_dict(data["flow"]), "crossing": crossing}
    if data["allocations"] is not None:
        whole["allocations"] = Allocations.from_dict(data["allocations"])
    return CostTable(**{**data, **whole})


def _call_cost(data: dict[str, Any]) -> CallCost:
    """Return the cost that `dataclasses.asdict` made `data` of."""
    parts = {
        "waiting": WaitingBytes(**data["waiting"]),
        "stash": StashBytes(**data["stash"]),
        "forward": ForwardBytes(**data["forward"]),
        "backward": BackwardBytes(**data["backward"]),
    }
    return CallCost(**{**data, **parts})
