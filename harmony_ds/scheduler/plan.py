"""A `Plan` is the finished list of tasks of one optimizer step. Pure data: it compares and saves as JSON.

A task prints, and is parsed, as its kind, pack and micro-batch: `I2` swaps pack 2 in, `F2.0` runs micro-batch 0 through
it, `L3.0` is the fused forward, loss and backward of the last pack, `B2.0` recomputes and propagates back, `O2` swaps the
pack's gradients out, `U2` lets the host update its parameters, `E2` evicts its weights, `G2` frees its gradients; `S1.0`
and `T1.0` move the stash of micro-batch 0 for pack 1 to the host and back; `N` is the point where the gradient norm of
the whole model is known; `D2` updates pack 2, which never leaves the device, there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from harmony_ds.config.harmony import PlanSwitches


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
    UPDATE_ON_DEVICE = "D"


@dataclass(frozen=True, slots=True)
class Task:
    """One step of a plan. `micro_batch` is -1 where the task concerns no single one."""

    kind: TaskKind
    pack: int
    micro_batch: int = -1

    @staticmethod
    def parse(text: str) -> Task:
        """The task that prints as `text`. Raises ValueError where none does."""
        pack, _, micro_batch = text[1:].partition(".")
        task = Task(TaskKind(text[:1]), int(pack or 0), int(micro_batch or -1))
        if str(task) != text:
            raise ValueError(f"{text!r} is no task: a kind, a pack and perhaps a micro-batch, such as F2.0")
        return task

    def __str__(self) -> str:
        place = "" if self.kind is TaskKind.NORM else str(self.pack)
        return self.kind.value + place + (f".{self.micro_batch}" if self.micro_batch >= 0 else "")


@dataclass(frozen=True, slots=True)
class Pack:
    """Contiguous calls that are swapped and run together.

    Attributes:
        index: its number in the plan.
        positions: the positions in the call order that it covers.
        layers: the layers behind them, each once.
        parameters: canonical names of their parameters, each once.
        owned: those of `parameters` that no earlier pack with a backward pass has; the host updates them with this pack,
            whose gradient is the last of theirs to arrive.
        weight_bytes: bytes that one swap-in moves.
        gradient_bytes: bytes that one swap-out of all its gradients moves.
        needs_backward: whether any gradient flows through it.
        update_elements: trainable elements of `owned`.
        resident_bytes: what it holds on the device from step to step if it is resident: weights that no earlier pack
            owns, and masters and optimizer state of `owned`.
        update_bytes: the most that updating it on the device takes beside that and the gradients.
    """

    index: int
    positions: tuple[int, ...]
    layers: tuple[int, ...]
    parameters: tuple[str, ...]
    owned: tuple[str, ...]
    weight_bytes: int
    gradient_bytes: int
    needs_backward: bool
    update_elements: int = 0
    resident_bytes: int = 0
    update_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Packing:
    """The call order cut into packs, once for the backward pass and once for the forward pass.

    Attributes:
        packs: those of the backward pass, in forward order and numbered from 0; then those that only the forward pass
            has. The last pack of the backward pass is fused.
        forward: the numbers of the forward pass's packs; they cover every call before the fused pack.
        backward: the numbers of the backward pass's packs; they cover every call.
    """

    packs: tuple[Pack, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @staticmethod
    def reused(packs: tuple[Pack, ...]) -> Packing:
        """The same packs in both passes."""
        numbers = tuple(pack.index for pack in packs)
        return Packing(packs, numbers[:-1], numbers)

    @property
    def fused(self) -> Pack:
        return self.packs[self.backward[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(PlanSwitches):
    """Where things wait, and when tasks are issued: the switches that the ds_config sets, and what the search decides.

    Of one kind of update (`deferred_update`), and one size of slices, every policy gives the same bits.

    Attributes:
        stash_on_host: how many of the first forward packs have their stashed inputs wait on the host between forward
            and backward (they wait longest); the others' wait on the device.
        deferred_update: no update before the norm of all gradients is known.
        kept: packs whose weights stay on the device from forward to backward.
        resident: packs that never leave the device: weights, gradients, optimizer state; updated there.
        forward_rows, backward_rows: how many rows of a micro-batch go through a layer at a time; 0: all of them.
    """

    stash_on_host: int = 0
    deferred_update: bool = True
    kept: tuple[int, ...] = ()
    resident: tuple[int, ...] = ()
    forward_rows: int = 0
    backward_rows: int = 0

    @staticmethod
    def of(switches: PlanSwitches, deferred_update: bool) -> Policy:
        """As the ds_config says; what the search decides is left as it is."""
        given = {one.name: getattr(switches, one.name) for one in fields(PlanSwitches)}
        return Policy(**given, deferred_update=deferred_update)

    @property
    def updates_last(self) -> bool:
        """Whether all updates come behind the backward pass."""
        return self.deferred_update or not self.just_in_time_update

    @property
    def gradients_wait(self) -> bool:
        """Whether the gradients of all packs are on the host at once."""
        return self.updates_last or not self.grouping


@dataclass(frozen=True, slots=True)
class UnlayeredParameters:
    """Parameters that no layer call covers: on the device from the first task of a step to the last.

    Attributes:
        weight_bytes: swapped in at the beginning.
        gradient_bytes: swapped out at the end.
        update_elements: trainable elements.
    """

    weight_bytes: int = 0
    gradient_bytes: int = 0
    update_elements: int = 0


ALL_PACKS = 2**31
"""For `Policy.stash_on_host`: however many there are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the executor does in one optimizer step, in order, and what it will take.

    Attributes:
        packing: the packs of both passes.
        policy: where things wait.
        tasks: the executor runs exactly these.
        micro_batches: the size of the group.
        resident_bytes: everything that stays on the device for the whole step, resident packs included.
        peak_bytes: predicted device peak.
        unlayered: the part of `resident_bytes` that crosses the link in every step.
    """

    packing: Packing
    policy: Policy
    tasks: tuple[Task, ...]
    micro_batches: int
    resident_bytes: int
    peak_bytes: int
    unlayered: UnlayeredParameters = field(default_factory=UnlayeredParameters)

    @property
    def packs(self) -> tuple[Pack, ...]:
        return self.packing.packs

    def to_json(self) -> str:
        return json.dumps({**asdict(replace(self, tasks=())), "tasks": [str(task) for task in self.tasks]})

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        packing = data["packing"]
        packs = tuple(Pack(**_tuples(pack)) for pack in packing["packs"])
        return Plan(
            Packing(packs, tuple(packing["forward"]), tuple(packing["backward"])),
            Policy(**_tuples(data["policy"])),
            tuple(Task.parse(task) for task in data["tasks"]),
            data["micro_batches"],
            data["resident_bytes"],
            data["peak_bytes"],
            UnlayeredParameters(**data["unlayered"]),
        )


def suspended(packs: Sequence[Pack], tasks: Sequence[Task]) -> frozenset[int]:
    """The micro-batches that `tasks` run forward through the last pack and, later on, back through it: they wait behind
    its last call, and what comes after that (the loss) runs at the beginning of their backward pass.
    """
    last = max(packs, key=lambda pack: pack.positions[-1]).index
    there = {task.micro_batch for task in tasks if task.kind is TaskKind.FORWARD and task.pack == last}
    if not there:
        return frozenset()
    return frozenset(t.micro_batch for t in tasks if t.kind is TaskKind.BACKWARD and t.pack == last) & there


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
