"""A `Plan` is the finished list of tasks of one optimizer step. Pure data: it compares and saves as JSON.

A task prints, and is parsed, as its kind, pack and micro-batch: `I2` swaps pack 2 in, `F2.0` runs micro-batch 0 through
it, `L3.0` is the fused forward, loss and backward of the last pack, `B2.0` recomputes and propagates back; `K2.0` runs
forward and keeps the graph, through which `P2.0` propagates back; `O2` swaps the pack's gradients out, `U2` lets the
host update its parameters, `E2` evicts its weights, `G2` frees its gradients; `S1.0` and `T1.0` move the stash of
micro-batch 0 for pack 1 to the host and back; `X1.0` moves what micro-batch 0 holds after it has passed pack 1 to the
host, `Y2.0` brings it back before pack 2, and `V2.0` and `Z1.0` do the same with gradients on the way back; `N` is the
point where the gradient norm of the whole model is known; `D2` updates pack 2, which never leaves the device, there;
`R2` adds up the gradients of pack 2 that several devices have, so that each updates its own piece: before `O2`, or on
the host after it; `A2` brings together the weights of pack 2 of which each has swapped in its share; `M2.0` moves what
micro-batch 0 holds to the device of pack 2, and `W1.0` gradients of it back to that of pack 1.

Parameters that no layer call covers are packs without calls, which come last: `I4` at the beginning of a step brings what
the model uses between its layers, `O4 G4 E4` at the end takes it away, `U4` updates it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from harmony_ds.scheduler.rows import WHOLE_CALLS, Rows


class TaskKind(Enum):
    """What a task does; the value is its letter in a printed plan."""

    SWAP_IN = "I"
    FORWARD = "F"
    FUSED = "L"
    BACKWARD = "B"
    FORWARD_FOR_GRAPH = "K"
    BACKWARD_FROM_GRAPH = "P"
    SWAP_OUT = "O"
    UPDATE = "U"
    EVICT = "E"
    FREE_GRADIENTS = "G"
    STASH_OUT = "S"
    STASH_IN = "T"
    CROSSING_OUT = "X"
    CROSSING_IN = "Y"
    CROSSING_GRADIENTS_OUT = "V"
    CROSSING_GRADIENTS_IN = "Z"
    NORM = "N"
    UPDATE_ON_DEVICE = "D"
    REDUCE = "R"
    GATHER = "A"
    MOVE = "M"
    MOVE_BACK = "W"

    __hash__ = object.__hash__  # there is one of each, and an Enum's own is written in Python


FORWARD_KINDS = (TaskKind.FORWARD, TaskKind.FORWARD_FOR_GRAPH)
BACKWARD_KINDS = (TaskKind.BACKWARD, TaskKind.BACKWARD_FROM_GRAPH)
"""Of the two passes, which the fused pack runs at once."""
RUNS = (*FORWARD_KINDS, TaskKind.FUSED, *BACKWARD_KINDS)
"""The kinds of tasks that run a micro-batch through a pack."""


class Task(NamedTuple):
    """One step of a plan (a named tuple: a search makes very many). `micro_batch` is -1 where it concerns no single one."""

    kind: TaskKind
    pack: int
    micro_batch: int = -1

    @staticmethod
    def parse(text: str) -> Task:
        """Return the task that prints as `text`. Raises ValueError where none does."""
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
    """Contiguous calls that are swapped and run together; or, without calls, parameters that no call covers.

    Attributes:
        index: its number in the plan.
        positions: of its layer calls, in the order of a forward pass; empty: of parameters that are used between layers,
            or not at all.
        layers: the layers called there, each once.
        parameters: canonical names of their parameters, each once.
        owned: those of `parameters` that are updated when this pack is. Several packs may use a parameter (tied weights);
            the first of them that has a backward pass owns it, since its backward pass runs last, and completes the
            gradient. A pack without a backward pass owns what no other pack uses, if some of that is trained: backward
            passes of the program's own may give it gradients.
        weight_bytes: bytes of its weights, as one swap-in of one device moves them.
        gradient_bytes: bytes of all its gradients, which one swap-out copies unless several devices reduce them before.
        needs_backward: whether any gradient flows through it.
        update_elements: trainable elements of `owned`; of several devices, the most that one of them updates.
        resident_bytes: what it holds on the device from step to step if it is resident: weights that no earlier pack
            owns, and masters and optimizer state of `owned`.
        update_bytes: the most that updating it on the device takes beside that and the gradients.
        gradient_pieces: of several devices, bytes of its gradients that each one updates with; else empty.
        sent_bytes: of several devices that reduce gradients before they leave, bytes that each one sends to the others to
            have it done; else empty.
        gathered_bytes: of several devices, bytes of its weights that each one sends to, and has from, the others, where
            each swaps in its share.
        device: of those that one process drives, the one that it runs on.
        forward_ms, backward_ms: about what a micro-batch takes through it, by which several devices take turns; 0: not
            known.
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
    gradient_pieces: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] = ()
    gathered_bytes: int = 0
    device: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0

    def swap_in_bytes(self, of_share: bool) -> int:
        """Return what one swap-in moves; `of_share`: of one device's share."""
        return self.weight_bytes - self.gathered_bytes * of_share

    def swap_out_bytes(self, rank: int | None = None) -> int:
        """Return what one swap-out of its gradients moves on device `rank`; None: on the one that moves most."""
        return self.piece_bytes(rank) if self.sent_bytes else self.gradient_bytes

    def piece_bytes(self, rank: int | None = None) -> int:
        """Return what waits on the host for the update of device `rank`; None: of the one that has most."""
        if not self.gradient_pieces:
            return self.gradient_bytes
        return max(self.gradient_pieces) if rank is None else self.gradient_pieces[rank]

    @property
    def is_updated(self) -> bool:
        """Whether each step updates what it owns."""
        return self.needs_backward or bool(self.owned)

    @property
    def needed_at(self) -> int:
        """The position at which a step first needs its weights: updates are made in that order."""
        if self.positions:
            return self.positions[0]
        return -1 if self.parameters else _NEVER


@dataclass(frozen=True, slots=True)
class Packing:
    """The call order cut into packs, once for the backward pass and once for the forward pass.

    Attributes:
        packs: those of the backward pass, in forward order and numbered from 0; then those that only the forward pass
            has; then those without calls. The last pack of the backward pass is fused.
        forward: the numbers of the forward pass's packs; they cover every call before the fused pack.
        backward: the numbers of the backward pass's packs; they cover every call.
        unlayered: the number of the pack of the unlayered parameters, which are on the device for the whole step.
        uncalled: the number of the pack of trained parameters that the model does not use: only backward passes of the
            program's own reach them, so that nothing of it is ever on the device.
    """

    packs: tuple[Pack, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    unlayered: int | None = None
    uncalled: int | None = None

    @property
    def fused(self) -> Pack:
        return self.packs[self.backward[-1]]

    @property
    def unlayered_packs(self) -> tuple[Pack, ...]:
        """The pack of the unlayered parameters; empty: there is none."""
        return () if self.unlayered is None else (self.packs[self.unlayered],)

    @property
    def last_forward_packs(self) -> tuple[int, ...]:
        """The last pack of each device's forward pass but the fused one: the device's backward pass begins with it, so its
        weights stay.
        """
        last = {self.packs[index].device: index for index in (*self.forward, self.backward[-1])}
        return tuple(index for index in last.values() if index != self.backward[-1])

    @property
    def covering(self) -> tuple[Pack, ...]:
        """The packs that have calls."""
        return tuple(pack for pack in self.packs if pack.positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Places and times of tasks: as the ds_config says (the first three), and as the search decides.

    Of one kind of update (`deferred_update`), size of slices and tiles, and number of devices, every policy gives the same
    bits.

    Attributes:
        stash_on_host: how many of the first forward packs have their stashed inputs wait on the host between forward
            and backward (they wait longest); the others' wait on the device.
        crossing_on_host: what a micro-batch holds between two packs, outputs of the one or gradients of them, waits on
            the host until the other one takes it; where all of the stash does, too (see `crossing.crossing_moves`).
        slices_from_host: the inputs of each slice of rows, or of a call that is not cut, come from the host when it runs
            backward; what leaves the device has left before the next task, and comes back right before it is needed. All
            of the stash goes, the fused pack's, too, before the loss. It takes the least memory, and hides no copy.
        deferred_update: no update before the norm of all gradients is known.
        kept: packs whose weights stay on the device from forward to backward.
        resident: packs that never leave the device: weights, gradients, optimizer state; updated there.
        graphs: by pack of the backward pass, of how many micro-batches (the first ones) the autograd graph is kept from
            forward to backward, so that nothing is recomputed; empty: of none. Packs that are kept or resident alone.
        joined_count: how many micro-batches' rows go through a layer at a time, as one micro-batch of the plan.
        forward_rows, backward_rows: how many rows of such a one go through a layer at a time; 0: all of them.
        tile_tokens: how many tokens go through the model's last layer and the loss at a time; 0: all of a micro-batch's.
        layer_tile_tokens: how many go at a time through parts of layers that treat each token by itself; 0: all.
        devices: how many of one server train the model, each with such a plan and micro-batches of its own.
        servers: how many do so, each with so many devices, and with all weights and updates for itself.
        swaps_in_shares: of several devices, each swaps in a share of every pack, and has the rest from the others.
        reduce_on_host: several devices swap out all of their gradients, which are added up on the host.
        pipeline: how many devices one process drives, to which packs are dealt in turn.
        swap_in_delays: by pack, at most how many runs of micro-batches later its first swap-in is issued than composed,
            because the host is still updating the pack's weights; empty: none. The pack's own first run and the next
            eviction on its device end a delay, so that a larger number means: as late as it may be.
    """

    grouping: bool = True
    prefetch: bool = True
    gradient_slabs: int = 3
    stash_on_host: int = 0
    crossing_on_host: bool = False
    slices_from_host: bool = False
    deferred_update: bool = True
    kept: tuple[int, ...] = ()
    resident: tuple[int, ...] = ()
    graphs: tuple[int, ...] = ()
    joined_count: int = 1
    forward_rows: int = 0
    backward_rows: int = 0
    tile_tokens: int = 0
    layer_tile_tokens: int = 0
    devices: int = 1
    servers: int = 1
    swaps_in_shares: bool = False
    reduce_on_host: bool = False
    pipeline: int = 1
    swap_in_delays: tuple[int, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether one device trains the model."""
        return self.devices == self.servers == 1

    @property
    def reduces_on_device(self) -> bool:
        """Whether devices add up their gradients in buffers of their own, which take device memory beside the plan."""
        return not (self.alone or self.reduce_on_host)

    @property
    def leave_whole(self) -> bool:
        """Whether the gradients that a device swaps out are all there are of their pack."""
        return self.grouping and self.alone

    @property
    def gradients_wait(self) -> bool:
        """Whether the gradients of all packs are on the host at once."""
        return self.deferred_update or not self.grouping


_NEVER = 2**30
ALL_PACKS = 2**31
"""For `Policy.stash_on_host`: however many there are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the executor does in one optimizer step (or in a part of it), in order, and what it will take.

    Attributes:
        packing: the packs of both passes.
        policy: where things wait.
        tasks: the executor runs exactly these.
        micro_batches: the size of the group.
        resident_bytes: everything that is on the device from step to step: buffers, resident packs.
        peak_bytes: predicted device peak; of several devices that one process drives, the highest.
        calls: the call order, by the layers' indices: what packs' positions refer to.
        device_peaks: the peak of each.
        activation_bytes: what each task holds beside weights, in the order of `tasks`.
        rows: how layer calls are cut into slices of a micro-batch's rows. Where they are, the fused pack keeps no graph.
    """

    packing: Packing
    policy: Policy
    tasks: tuple[Task, ...]
    micro_batches: int
    resident_bytes: int
    peak_bytes: int
    calls: tuple[int, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    device_peaks: tuple[int, ...] = ()
    rows: Rows = WHOLE_CALLS

    @property
    def packs(self) -> tuple[Pack, ...]:
        return self.packing.packs

    @property
    def held_transfers(self) -> int:
        """See the function of this name."""
        return held_transfers(self.packing, self.policy)

    def owners_of(self, pack: Pack) -> list[Pack]:
        """Return the packs whose updates the swap-in of `pack` waits for: its own, and those that own parameters of it."""
        tied = set(pack.parameters) - set(pack.owned)
        return [pack, *(other for other in self.packs if other is not pack and tied & set(other.owned))]

    def part(self, begin: int, end: int | None = None) -> Plan:
        """Return the tasks from one place to before another."""
        part = slice(begin, end)
        return replace(self, tasks=self.tasks[part], activation_bytes=self.activation_bytes[part])

    def to_json(self) -> str:
        data = asdict(replace(self, tasks=(), rows=WHOLE_CALLS))
        del data["rows"]  # measured anew by the process that runs the plan
        return json.dumps({**data, "tasks": [str(task) for task in self.tasks]})

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        packing = data["packing"]
        packs = tuple(Pack(**_tuples(pack)) for pack in packing.pop("packs"))
        data |= {
            "packing": Packing(packs, **_tuples(packing)),
            "policy": Policy(**_tuples(data["policy"])),
            "tasks": tuple(Task.parse(task) for task in data["tasks"]),
        }
        return Plan(**_tuples(data))


EMPTY_PLAN = Plan(Packing((), (), ()), Policy(), (), micro_batches=0, resident_bytes=0, peak_bytes=0)
"""The executor's plan before it has run one."""


def held_transfers(packing: Packing, policy: Policy) -> int:
    """Return how many packs' gradients must wait on the host: for other micro-batches' or other packs' of a parameter that
    both have, or for the end of the backward pass.
    """
    if policy.gradients_wait:
        return len(packing.backward)
    transferred: set[str] = set()
    held = 0
    packs = [packing.packs[index] for index in reversed(packing.backward)]
    for pack in (pack for pack in packs if pack.needs_backward):
        first = set(pack.parameters) - transferred
        held += bool(first - set(pack.owned))
        transferred |= first
    return held


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
