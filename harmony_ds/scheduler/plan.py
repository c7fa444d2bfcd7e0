"""A `Plan` is the finished list of tasks of one optimizer step. Pure data: it prints, compares and saves as JSON.

A task prints as its kind, pack and micro-batch: `I2` swaps pack 2 in, `F2.0` runs micro-batch 0 through it, `L3.0` is
the fused forward, loss and backward of the last pack, `B2.0` recomputes and propagates back, `O2` swaps the pack's
gradients out, `U2` lets the host update its parameters, `E2` evicts its weights, `G2` frees its gradients; `S1.0` and
`T1.0` move the stash of micro-batch 0 for pack 1 to the host and back; `N` is the point where the gradient norm of
the whole model is known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class TaskKind(Enum):
    SWAP_IN = "I"
    FORWARD = "F"
    FUSED = "L"
    BACKWARD = "B"
    SWAP_OUT = "O"
    UPDATE = "U"
    EVICT = "E"
    FREE_GRADIENTS = "G"
    STASH_OUT = "S"
    STASH_IN = "T"
    NORM = "N"


@dataclass(frozen=True, slots=True)
class Task:
    """One step of a plan. `micro_batch` is -1 where the task concerns no single one."""

    kind: TaskKind
    pack: int
    micro_batch: int = -1
    device: int = 0

    def __str__(self) -> str:
        place = "" if self.kind is TaskKind.NORM else str(self.pack)
        return self.kind.value + place + (f".{self.micro_batch}" if self.micro_batch >= 0 else "")


@dataclass(frozen=True, slots=True)
class Pack:
    """Contiguous calls that are swapped and run together.

    Attributes:
        index: place in forward order.
        positions: the positions in the call order that it covers.
        layers: the layers behind them, each once.
        parameters: canonical names of their parameters, each once.
        owned: those of `parameters` that no earlier pack with a backward pass has; the host updates them with this pack,
            whose gradient is the last of theirs to arrive.
        weight_bytes: bytes that one swap-in moves.
        gradient_bytes: bytes that one swap-out of all its gradients moves.
        needs_backward: whether any gradient flows through it.
    """

    index: int
    positions: tuple[int, ...]
    layers: tuple[int, ...]
    parameters: tuple[str, ...]
    owned: tuple[str, ...]
    weight_bytes: int
    gradient_bytes: int
    needs_backward: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the executor does in one optimizer step, in order, and what it will take.

    Attributes:
        packs: in forward order; the last one is fused.
        tasks: the executor runs exactly these.
        micro_batches: the size of the group.
        stash_on_host: whether stashed inputs wait on the host between forward and backward.
        resident_bytes: parameters, gradients and buffers that stay on the device for the whole step.
        peak_bytes: predicted device peak.
    """

    packs: tuple[Pack, ...]
    tasks: tuple[Task, ...]
    micro_batches: int
    stash_on_host: bool
    resident_bytes: int
    peak_bytes: int

    def format(self) -> str:
        """The packs and the tasks, a line per swap-in."""
        lines = [
            f"{len(self.packs)} packs, {self.micro_batches} micro-batches, stash on the "
            f"{'host' if self.stash_on_host else 'device'}, planned device peak {self.peak_bytes:,} bytes"
        ]
        lines += [
            f"  pack {pack.index}: calls {pack.positions[0]}-{pack.positions[-1]}, "
            f"{pack.weight_bytes:,} bytes of weights, {pack.gradient_bytes:,} of gradients"
            for pack in self.packs
        ]
        row: list[str] = []
        for task in self.tasks:
            if task.kind is TaskKind.SWAP_IN and row:
                lines.append("  " + " ".join(row))
                row = []
            row.append(str(task))
        return "\n".join([*lines, "  " + " ".join(row)])

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=lambda kind: kind.value)

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        packs = tuple(_pack_of(pack) for pack in data["packs"])
        tasks = tuple(Task(TaskKind(t["kind"]), t["pack"], t["micro_batch"], t["device"]) for t in data["tasks"])
        return Plan(packs, tasks, **{k: v for k, v in data.items() if k not in ("packs", "tasks")})


def _pack_of(fields: dict[str, Any]) -> Pack:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Pack(**values)
