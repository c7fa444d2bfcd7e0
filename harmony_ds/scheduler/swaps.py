"""Bytes between host and device: what a plan moves, what it must move at least, what ZeRO-3 offload would move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.crossing import CrossingBytes, crossing_moves
from harmony_ds.scheduler.flow import Flow, Move
from harmony_ds.scheduler.plan import RUNS, Pack, Packing, Plan, Policy, Task, TaskKind

_COPIES_NOTHING = (
    *RUNS,
    TaskKind.EVICT,
    TaskKind.FREE_GRADIENTS,
    TaskKind.UPDATE,
    TaskKind.UPDATE_ON_DEVICE,
    TaskKind.NORM,
    TaskKind.MOVE,
    TaskKind.MOVE_BACK,
)
"""Kinds of tasks that copy nothing between host and device, but for slices from the host; moves are counted together."""


@dataclass(frozen=True, slots=True)
class Swaps:
    """Bytes that one step moves on one device, by kind; `sent`: to other processes' devices, not the host; `moved`: from
    one to another of the devices that one process drives (the other kinds are all of these devices' then).
    """

    weights_in: int = 0
    gradients_out: int = 0
    stash_out: int = 0
    stash_in: int = 0
    crossing_out: int = 0
    crossing_in: int = 0
    sent: int = 0
    moved: int = 0

    @property
    def total(self) -> int:
        """Between host and device."""
        stash = self.stash_out + self.stash_in
        return self.weights_in + self.gradients_out + stash + self.crossing_out + self.crossing_in


def swaps_of(plan: Plan, costs: CostTable, rank: int | None = None, counts: Sequence[int] = ()) -> Swaps:
    """Return the bytes that the tasks of `plan` move on device `rank` (None: on the one that moves most), as the ledger
    will count them. `counts`: how many micro-batches each one stands for; empty: for itself.
    """
    weights = gradients = out = back = sent = 0
    crossing_out = crossing_in = 0
    crossing = CrossingTaskBytes(plan.packing, plan.policy, costs)
    stashes = StashMoves(plan, costs, crossing)
    for task in plan.tasks:
        pack = plan.packs[task.pack]
        match task.kind:
            case TaskKind.SWAP_IN:
                weights += pack.swap_in_bytes(plan.policy.swaps_in_shares)
            case TaskKind.GATHER:
                sent += pack.gathered_bytes
            case TaskKind.SWAP_OUT:
                gradients += pack.swap_out_bytes(rank)
            case TaskKind.REDUCE:
                sent += _sent_bytes(pack, rank)
            case TaskKind.STASH_OUT:
                out += stashes.out_bytes(task) * (counts[task.micro_batch] if counts else 1)
            case TaskKind.FUSED | TaskKind.BACKWARD if plan.policy.slices_from_host:
                times = counts[task.micro_batch] if counts else 1
                back += stashes.in_slices_bytes(pack) * times
                out += stashes.out_bytes(task) * times if task.kind is TaskKind.FUSED else 0
            case TaskKind.STASH_IN:
                back += stashes.in_bytes(task) * (counts[task.micro_batch] if counts else 1)
            case TaskKind.CROSSING_OUT | TaskKind.CROSSING_GRADIENTS_OUT:
                crossing_out += crossing.of(task) * (counts[task.micro_batch] if counts else 1)
            case TaskKind.CROSSING_IN | TaskKind.CROSSING_GRADIENTS_IN:
                crossing_in += crossing.of(task) * (counts[task.micro_batch] if counts else 1)
            case kind if kind in _COPIES_NOTHING:
                pass
            case _:
                raise AssertionError(f"it is not known what {task.kind} copies")
    moved = sum(between_devices(plan.packing, costs.flow, plan.micro_batches).values())
    return Swaps(weights, gradients, out, back, crossing_out, crossing_in, sent, moved)


def _sent_bytes(pack: Pack, rank: int | None) -> int:
    """Return what device `rank` (None: the one that sends most) sends to others to have a pack's gradients reduced."""
    if not pack.sent_bytes:  # on the host
        return 0
    return max(pack.sent_bytes) if rank is None else pack.sent_bytes[rank]


class CrossingTaskBytes:
    """The bytes that the CROSSING tasks of a plan copy, of one micro-batch each."""

    def __init__(self, packing: Packing, policy: Policy, costs: CostTable) -> None:
        self._packs = packing.packs
        self._costs = costs
        self._fused = packing.fused.positions[0]
        self._crossings = CrossingBytes(packing, costs.crossing) if crossing_moves(packing, policy) else None
        self._known: dict[tuple[TaskKind, int], int] = {}
        self._copied_before_stash: dict[int, int] = {}  # by pack

    def of(self, task: Task) -> int:
        """Return the bytes that a CROSSING task copies."""
        key = task.kind, task.pack
        if key not in self._known:
            self._known[key] = self._count(task.kind, self._packs[task.pack])
        return self._known[key]

    def copied_before_stash(self, pack: Pack) -> int:
        """Return how much of a pack's stash CROSSING tasks have copied to the host before the stash leaves."""
        if self._crossings is None:
            return 0
        if pack.index not in self._copied_before_stash:
            self._copied_before_stash[pack.index] = self._crossings.copied_before_bytes(pack)
        return self._copied_before_stash[pack.index]

    def _count(self, kind: TaskKind, pack: Pack) -> int:
        if self._crossings is None:
            return 0
        fused = self._fused
        first, following = pack.positions[0], pack.positions[-1] + 1
        match kind:
            case TaskKind.CROSSING_OUT:
                return self._crossings.out_bytes(following)
            case TaskKind.CROSSING_IN:
                return self._crossings.in_bytes(first)
            case TaskKind.CROSSING_GRADIENTS_OUT:
                return self._costs.crossing_gradient_bytes(first, fused)
            case _:
                return self._costs.crossing_gradient_bytes(following, fused)


class StashMoves:
    """The bytes that the stash tasks of a plan copy, of one micro-batch each.

    An input that calls of several packs have stashed comes back for each of them. On its way out it is copied once for
    each, too, unless it has been on the host between packs: then its copy there serves them all.
    """

    def __init__(self, plan: Plan, costs: CostTable, crossing: CrossingTaskBytes) -> None:
        self._packs, self._costs, self._crossing = plan.packs, costs, crossing
        away = [plan.packs[index] for index in plan.packing.forward[: plan.policy.stash_on_host]]
        self._away = {position for pack in away for position in pack.positions}
        self._firsts = {pack.positions[0] for pack in away}
        self._crossed = {task.micro_batch for task in plan.tasks if task.kind is TaskKind.CROSSING_OUT}
        # By pack, and whether what the micro-batch holds has been on the host between packs:
        self._out_bytes: dict[tuple[int, bool], int] = {}
        self._in_bytes: dict[tuple[int, bool], int] = {}

    def out_bytes(self, task: Task) -> int:
        """Return what a STASH_OUT copies to the host, or a fused run whose slices come from there."""
        key = task.pack, task.micro_batch in self._crossed
        if key not in self._out_bytes:
            self._out_bytes[key] = self._count_out(*key)
        return self._out_bytes[key]

    def in_bytes(self, task: Task) -> int:
        """Return what a STASH_IN copies to the device."""
        key = task.pack, task.micro_batch in self._crossed
        if key not in self._in_bytes:
            self._in_bytes[key] = self._count_in(*key)
        return self._in_bytes[key]

    def _count_out(self, index: int, has_crossed: bool) -> int:
        pack = self._packs[index]
        if not has_crossed:
            return stash_bytes(pack, self._costs, shares_copies=False)
        return stash_bytes(pack, self._costs, shares_copies=True) - self._crossing.copied_before_stash(pack)

    def _count_in(self, index: int, has_crossed: bool) -> int:
        positions = self._packs[index].positions
        begins = {positions[0]} if has_crossed else {positions[0], *self._firsts}
        nbytes = 0
        for position in self._away.intersection(positions):
            stash = self._costs.costs[position].stash
            nbytes += stash.new_bytes + stash.again_bytes + (stash.again_at_cut_bytes if position in begins else 0)
        return nbytes

    def in_slices_bytes(self, pack: Pack) -> int:
        """Return what the slices of a run take from the host."""
        return sum(self._costs.costs[position].stash.taken_bytes for position in pack.positions)


def stash_bytes(pack: Pack, costs: CostTable, shares_copies: bool) -> int:
    """Return what one micro-batch's stash for a pack takes on the host.

    Args:
        shares_copies: what an earlier pack has stashed, too, has one copy for both.
    """
    stashes = [costs.costs[position].stash for position in pack.positions]
    nbytes = sum(stash.new_bytes for stash in stashes)
    if shares_copies:
        return nbytes
    return nbytes + sum(stash.again_bytes for stash in stashes) + stashes[0].again_at_cut_bytes


def between_devices(packing: Packing, flow: Flow, micro_batches: int) -> dict[tuple[int, int], int]:
    """Return what a step takes from a device to another, by their numbers: activations, and gradients of them."""
    between: Counter[tuple[int, int]] = Counter()
    for move in _moves(packing, flow):
        between[move.source, move.target] += move.nbytes * (1 if move.is_lasting else micro_batches)
        if move.returns:
            between[move.target, move.source] += move.nbytes * micro_batches
    return dict(between)


def _moves(packing: Packing, flow: Flow) -> tuple[Move, ...]:
    devices = {p: packing.packs[index].device for index in packing.backward for p in packing.packs[index].positions}
    return flow.moves([devices[p] for p in sorted(devices)]) if any(devices.values()) else ()


def moved_bytes(packing: Packing, flow: Flow) -> Counter[tuple[TaskKind, int]]:
    """By the kind of move and the pack: what one micro-batch takes along to the pack's device, what comes of gradients."""
    pack_of = {p: index for index in packing.backward for p in packing.packs[index].positions}
    moved: Counter[tuple[TaskKind, int]] = Counter()
    for move in _moves(packing, flow):
        index = pack_of[max(move.position, 0)]
        moved[TaskKind.MOVE, index] += move.nbytes
        moved[TaskKind.MOVE_BACK, index - 1] += move.nbytes * move.returns
    return moved


def lower_bound_bytes(plan: Plan, rank: int | None = None) -> int:
    """Weights in once per pack and pass (the fused last pack, kept packs and unlayered parameters once), gradients out once
    per pack; nothing of resident packs. `rank`: of which device; None: of the one that moves most.
    """
    packing = plan.packing
    policy = plan.policy
    once = dict.fromkeys((*packing.forward, packing.backward[-1]))
    shared = policy.swaps_in_shares
    forward = sum(plan.packs[index].swap_in_bytes(shared) for index in once if index not in policy.resident)
    backward = [plan.packs[i] for i in packing.backward if plan.packs[i].needs_backward and i not in policy.resident]
    stay = (*policy.kept, *packing.last_forward_packs)
    kept = {packing.backward[-1], *(index for index in stay if index in packing.forward)}
    again = sum(pack.swap_in_bytes(shared) for pack in backward if pack.index not in kept)
    gradients = sum(pack.swap_out_bytes(rank) for pack in backward)
    always = sum(pack.swap_in_bytes(shared) + pack.swap_out_bytes(rank) for pack in packing.unlayered_packs)
    return forward + again + gradients + always


def zero3_offload_bytes(graph: LayerGraph, weight_bytes: int, micro_batches: int) -> int:
    """Weights and gradients that ZeRO-3 with parameter and optimizer offload (DeepSpeed 0.19) moves in one step.

    Per micro-batch: every weight in twice (forward, backward), every gradient in and out in the compute dtype; once
    per step: the gradients out in fp32. Measured on its CPU accelerator by counting copies, without activation
    checkpointing (which gathers weights a third time).
    """
    total = sum(weight_bytes * s.numel if s.stored_bytes is None else s.stored_bytes for s in graph.parameters)
    trainable = sum(spec.numel for spec in graph.parameters if spec.trainable)
    per_micro_batch = 2 * total + 2 * weight_bytes * trainable
    return per_micro_batch * micro_batches + 4 * trainable
