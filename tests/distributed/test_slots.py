"""Exchange of gradients through slots in shared memory, here between threads of one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from harmony_ds.device import CpuDevice
from harmony_ds.distributed.board import Board, Posted, board_bytes
from harmony_ds.distributed.shared_memory import SharedMemory, make_file
from harmony_ds.distributed.slots import GradientSlots
from harmony_ds.errors import PeerFailedError

SIZE = 3
LENGTH = 8


@pytest.fixture
def boards() -> Iterator[tuple[int, list[Board]]]:
    file = make_file()
    made = [Board(file, rank, [os.getpid()] * SIZE, 0, timeout_s=20.0) for rank in range(SIZE)]
    yield file, made
    for board in made:
        board.close()
    os.close(file)


@pytest.fixture
def views(boards: tuple[int, list[Board]]) -> list[GradientSlots]:
    file, made = boards
    several = [GradientSlots(board, SharedMemory(file, board_bytes(SIZE, 0)), CpuDevice()) for board in made]
    for slots in several:
        slots.allocate(2, 4 * LENGTH)
    return several


def _leave(slots: GradientSlots, *numbers: float) -> int:
    slots.wait_free_slot(lambda: None).view(torch.float32).copy_(
        torch.tensor(numbers).repeat_interleave(LENGTH // len(numbers))
    )
    return slots.next_reduction()


def _together(*calls: object) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    return threads


def test_a_slot_is_reused_when_all_have_read_it(views: list[GradientSlots]) -> None:
    first = views[0]
    for _ in range(2):
        _leave(first, 1.0)
    began = threading.Event()
    (waiting,) = _together(lambda: (first.wait_free_slot(lambda: None), began.set()))
    for slots in views:
        assert not began.wait(0.05)
        slots.post_read(1)
    assert began.wait(20)
    waiting.join()


def test_a_process_that_would_wait_for_itself_raises_its_failure(views: list[GradientSlots]) -> None:
    for _ in range(2):
        _leave(views[0], 1.0)

    def failed() -> None:
        raise RuntimeError("the update has failed")

    with pytest.raises(RuntimeError, match="the update has failed"):
        views[0].wait_free_slot(failed)


def test_no_process_waits_for_one_that_has_given_up(
    views: list[GradientSlots], boards: tuple[int, list[Board]]
) -> None:
    number = _leave(views[0], 1.0)
    boards[1][2].give_up("it is out of memory" + 2000 * "\N{WARNING SIGN}")  # does not fit, cut within a character
    with pytest.raises(PeerFailedError, match="out of memory") as caught:
        views[0].wait_filled(number)
    assert caught.value.rank == 2


def test_slots_of_other_sizes_replace_the_old_ones(views: list[GradientSlots]) -> None:
    assert all(slots.fits(2, 4 * LENGTH) and slots.fits(2, 1) for slots in views)
    assert not any(slots.fits(2, 4 * LENGTH + 1) or slots.fits(3, 1) for slots in views)
    _leave(views[0], 1.0)
    for slots in views:
        slots.allocate(3, 8 * LENGTH)
        assert slots.fits(3, 8 * LENGTH) and slots.nbytes == 24 * LENGTH
    own, seen = views[0].wait_free_slot(lambda: None), views[1]
    assert not own.any()
    own.fill_(7)
    views[0].next_reduction()
    (filling,) = _together(lambda: views[2].wait_filled(2))
    assert all(part.shape == (8 * LENGTH,) for part in _parts_of(seen, views))
    filling.join(20)


def _parts_of(slots: GradientSlots, views: list[GradientSlots]) -> list[torch.Tensor]:
    for other in views:
        other._board.post(Posted.SLOT_FILLED, 2)
    return slots.wait_filled(2)
