"""Random streams of micro-batches do not depend on what runs between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from harmony_ds import micro_batch_seed
from harmony_ds.device import CpuDevice
from harmony_ds.model.contract import UnseenError
from harmony_ds.model.random_streams import RandomStreams


@pytest.fixture
def streams() -> Iterator[RandomStreams]:
    with torch.random.fork_rng(devices=[]):
        made = RandomStreams(CpuDevice())
        made.open()
        yield made
        made.close()


def drawn_plainly(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


def draw() -> float:
    return torch.rand(()).item()


def test_seeds_never_change_and_depend_on_all_three_numbers() -> None:
    """They are part of what makes a run repeatable: a change here changes every user's dropout."""
    assert micro_batch_seed(0, 0, 0) == 3051931488724851722
    assert micro_batch_seed(5, 1, 2) == 2001467980314101415
    assert micro_batch_seed(1, 11, 1) != micro_batch_seed(1, 1, 11) != micro_batch_seed(11, 1, 1)


def test_interleaved_streams_draw_what_they_would_alone(streams: RandomStreams) -> None:
    first, second = [], []
    streams.start("a", 1)
    streams.switch("a")  # the current one already
    first.append(draw())
    streams.start("b", 2)
    second.append(draw())
    for _ in range(3):
        streams.switch("a")
        first.append(draw())
        streams.switch("b")
        second += [draw(), draw()]

    assert first == drawn_plainly(1, 4)
    assert second == drawn_plainly(2, 7)


def test_a_replay_draws_the_same_and_does_not_move_its_stream(streams: RandomStreams) -> None:
    streams.start("a", 1)
    draw()
    state = streams.snapshot()
    once = [draw(), draw()]
    streams.replay(state)
    again = [draw(), draw()]
    streams.switch("a")

    assert again == once
    assert draw() == drawn_plainly(1, 4)[3]


@pytest.mark.parametrize("draw_in_python", [random.random, np.random.random, np.random.normal])
def test_who_draws_in_python_is_found_and_gets_streams_there_from_then_on(
    streams: RandomStreams, draw_in_python: Callable[[], float]
) -> None:
    streams.start("a", 1)
    streams.check_drawn()
    draw_in_python()
    streams.start("b", 2)  # does not hide it
    with pytest.raises(UnseenError, match=r"draws from random or numpy\.random"):
        streams.check_drawn()
    streams.check_drawn()  # it is known
    streams.start("a", 1)
    first = draw_in_python()
    streams.start("b", 2)
    other = draw_in_python()
    streams.switch("a")
    second = draw_in_python()
    random.seed(1)
    np.random.seed(1)
    assert (first, second) == (draw_in_python(), draw_in_python())
    random.seed(2)
    np.random.seed(2)
    assert other == draw_in_python()


def test_the_programs_generators_in_python_are_restored() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    streams = RandomStreams(CpuDevice())
    streams.draws_in_python = True
    streams.open()
    streams.start("a", 1)
    random.random()
    np.random.random()
    streams.close()
    assert (random.random(), np.random.random()) == expected


def test_the_users_generator_is_restored() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        streams = RandomStreams(CpuDevice())
        streams.open()
        streams.start("a", 1)
        draw()
        streams.close()
        assert draw() == drawn_plainly(9, 1)[0]
