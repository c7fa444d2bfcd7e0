"""Puts the passes of packs over a group of micro-batches into one list of tasks, on one device or on several.

What enters: for each pack and pass its tasks, such as `I0 F0.0 F0.1 E0 | I1 L1.0 L1.1 E1`. What leaves: one list. On one
device the passes follow each other. On two devices, here without swaps, it is `F0.0 M1.0 F0.1 L1.0 M1.1 L1.1`:
micro-batch 1 passes pack 0 while micro-batch 0 passes pack 1, and M moves results to the next pack's device.

Each device runs its packs one after the other, and each pack all micro-batches. A micro-batch passes a pack when it has
passed the one before. On several devices that makes a wave: while one device runs micro-batch 1 through its pack, the next
runs micro-batch 0 through the following one. Tasks are issued in the order of predicted times:

    begin(pass, m) = max of end(pass before, m), end(pass, m - 1), end(pass before on this device, last m)
    end(pass, m) = begin(pass, m) + the time of a micro-batch's run through the pack in that pass

A run is issued when it begins; the move of its results, and the tasks after the last run of a pass, when it has ended:
copies share streams, where one issued too early would hold up copies of micro-batches that are ready before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harmony_ds.scheduler.plan import Pack, Task, TaskKind


@dataclass(slots=True)
class PackPass:
    """The tasks of one pack in one pass, forward or backward, of all micro-batches of a group.

    Attributes:
        runs: for each micro-batch in turn, the tasks of its run through the pack; the fused pack may run one twice.
        before, after: the tasks before the first run, and after the last one.
    """

    pack: Pack
    runs: list[tuple[int, list[Task]]] = field(default_factory=list)
    is_backward: bool = False
    before: list[Task] = field(default_factory=list)
    after: list[Task] = field(default_factory=list)

    @property
    def run_ms(self) -> float:
        """About what one micro-batch takes through the pack; 0: not known."""
        return self.pack.backward_ms if self.is_backward else self.pack.forward_ms


def order_tasks(passes: Sequence[PackPass], last_first: bool = False) -> Iterator[Task]:
    """Yield the tasks of passes, which are given in the order in which each micro-batch makes them.

    Args:
        last_first: on several devices, the first swap-ins of the last packs' devices come before those of the first packs':
            the host updates the last packs first, so that their weights can be swapped in first.
    """
    if len({pack_pass.pack.device for pack_pass in passes}) > 1:
        yield from _in_waves(passes, last_first)
        return
    for pack_pass in passes:
        yield from pack_pass.before
        for _, tasks in pack_pass.runs:
            yield from tasks
        yield from pack_pass.after


@dataclass(frozen=True, slots=True)
class _Issue:
    """Tasks that are issued together.

    Attributes:
        ms: when, by prediction.
        pass_number, place: what decides between those of the same time: the pass, and the place in it.
    """

    ms: float
    pass_number: int
    place: int
    tasks: list[Task]


def _in_waves(passes: Sequence[PackPass], last_first: bool) -> Iterator[Task]:
    """Yield the tasks of passes on several devices, in the order of predicted times (see the top of the file)."""
    passed_ms: dict[int, float] = {}  # by micro-batch: when it has made its latest pass
    free_ms: dict[int, float] = {}  # by device: when it has done its last run
    are_times_known = all(one.pack.forward_ms and one.pack.backward_ms for one in passes)
    following = _following(passes)
    first: dict[int, PackPass] = {}  # by device
    for pack_pass in passes:
        first.setdefault(pack_pass.pack.device, pack_pass)
    begun = sorted(first.values(), key=lambda one: one.pack.index, reverse=last_first)
    issues = [_Issue(0.0, -1, 0, pack_pass.before) for pack_pass in begun]
    for number, pack_pass in enumerate(passes):
        device = pack_pass.pack.device
        last_place = len(pack_pass.runs) - 1
        last_run_of = {m: place for place, (m, _) in enumerate(pack_pass.runs)}
        for place, (m, run) in enumerate(pack_pass.runs):
            begin_ms = max(passed_ms.get(m, 0.0), free_ms.get(device, 0.0))
            end_ms = begin_ms + (pack_pass.run_ms if are_times_known else 1.0)
            passed_ms[m] = free_ms[device] = end_ms
            at_begin, at_end = [*run], []
            if place == 0 and pack_pass is not first[device]:
                at_begin = [*pack_pass.before, *run]
            if place == last_run_of[m]:
                at_end += _moved(pack_pass, following.get((number, m)), m)
            if place == last_place:
                at_end += pack_pass.after
            issues.append(_Issue(begin_ms, number, 2 * place, at_begin))
            issues.append(_Issue(end_ms, number, 2 * place + 1, at_end))
    for issue in sorted(issues, key=lambda one: (one.ms, one.pass_number, one.place)):
        yield from issue.tasks


def _moved(pack_pass: PackPass, after: PackPass | None, micro_batch: int) -> list[Task]:
    """Return the task that moves a micro-batch's results to the device of its next pass; none if that is the same one."""
    if after is None or after.pack.device == pack_pass.pack.device:
        return []
    back = after.is_backward and pack_pass.is_backward
    return [Task(TaskKind.MOVE_BACK if back else TaskKind.MOVE, after.pack.index, micro_batch)]


def _following(passes: Sequence[PackPass]) -> dict[tuple[int, int], PackPass]:
    """Return by pass (its number) and micro-batch the pass that the micro-batch makes next."""
    following: dict[tuple[int, int], PackPass] = {}
    latest: dict[int, int] = {}
    for number, pack_pass in enumerate(passes):
        for m, _ in pack_pass.runs:
            if m in latest:
                following[latest[m], m] = pack_pass
            latest[m] = number
    return following
