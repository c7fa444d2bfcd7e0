"""A swap-in whose update is under way holds up no task that does not need its pack."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.waiting import WaitingSwapIns
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from tests.scheduler.examples import packs_of, parse, with_unlayered

PACKING = Packing(packs_of(True, True, True), (0, 1), (0, 1, 2))
TASKS = "I0 I1 F0.0 F0.1 E0 I2 F1.0 F1.1 E1 L2.0 L2.1 O2"


class Updates:
    """Stands for the updater: `pending` packs, by the position where they are needed."""

    def __init__(self, *pending: int) -> None:
        self.pending = set(pending)

    def is_pending(self, pack: int) -> bool:
        return pack in self.pending


def placed(updates: Updates, done_before: dict[str, int], overlap: bool = True) -> list[str]:
    """The order in which tasks come, where the update of a pack is done when the task of that name has come."""
    parts = SimpleNamespace(updater=updates, device=SimpleNamespace(copies_overlap=overlap))
    tasks = parse(TASKS)
    plan = Plan(PACKING, Policy(), tasks, micro_batches=2, resident_bytes=0, peak_bytes=0)
    waiting = WaitingSwapIns(cast("Runtime", parts), plan)
    order: list[str] = []

    def run() -> Iterator[Any]:
        yield from waiting.placed((task, 0) for task in tasks)
        yield from waiting.left()

    for task, _ in run():
        order.append(str(task))
        updates.pending -= {pack for name, pack in done_before.items() if name == str(task)}
    return order


@pytest.mark.parametrize(
    ("pending", "done_before", "overlap", "order"),
    [
        ((), {}, True, TASKS),
        ((1,), {"F0.0": 1}, True, "I0 F0.0 I1 F0.1 E0 I2 F1.0 F1.1 E1 L2.0 L2.1 O2"),
        ((1,), {}, True, "I0 F0.0 F0.1 E0 I1 I2 F1.0 F1.1 E1 L2.0 L2.1 O2"),
        ((1, 2), {"F0.1": 2}, True, "I0 F0.0 F0.1 E0 I1 I2 F1.0 F1.1 E1 L2.0 L2.1 O2"),
        ((1,), {}, False, TASKS),
    ],
    ids=["nothing is under way", "done early", "first task", "swap-ins keep their order", "copies do not overlap"],
)
def test_a_swap_in_comes_once_its_update_is_done_and_before_the_first_task_of_its_pack(
    pending: tuple[int, ...], done_before: dict[str, int], overlap: bool, order: str
) -> None:
    assert " ".join(placed(Updates(*pending), done_before, overlap)) == order


def test_parameters_without_calls_are_never_waited_for_later() -> None:
    packing = with_unlayered(PACKING)
    tasks = parse("I3 I0 F0.0")
    parts = SimpleNamespace(updater=Updates(-1), device=SimpleNamespace(copies_overlap=True))
    plan = Plan(packing, Policy(), tasks, micro_batches=1, resident_bytes=0, peak_bytes=0)
    waiting = WaitingSwapIns(cast("Runtime", parts), plan)
    assert [str(task) for task, _ in waiting.placed((task, 0) for task in tasks)] == ["I3", "I0", "F0.0"]
