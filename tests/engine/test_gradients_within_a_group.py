"""Gradients that are looked at, and changed, between the micro-batches of one step: the next ones add to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.cover import pairs
from tests.engine.drive import config_of, engine_for, sgd
from tests.engine.test_paths import Net, batch_of, built
from tests.oracle import assert_same

GROUP = 4


def read(model: nn.Module) -> None:
    assert all(parameter.grad is not None for parameter in model.parameters())


def scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(3)


def drop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def put(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2


@pytest.mark.parametrize(
    ("what", "when", "clip"), pairs([read, scale, drop, put], [(0,), (0, 2), (1,), (0, 1, 2, 3)], [None, 0.1])
)
def test_looks_within_a_group(what: Callable[[nn.Module], None], when: tuple[int, ...], clip: float | None) -> None:
    if what is drop:
        when = tuple(place for place in when if place < GROUP - 1)
    plain, model = built(Net), built(Net)
    optimizer = sgd(plain.parameters())
    with engine_for(model, sgd, config_of(GROUP, clip)) as engine:
        for index in range(2 * GROUP):
            batch = batch_of(index)
            engine.backward(engine(**batch)["loss"])
            (plain(**batch)["loss"] / GROUP).backward()
            if index % GROUP in when:
                what(model)
                what(plain)
            engine.step()
            if index % GROUP == GROUP - 1:
                if clip is not None:
                    nn.utils.clip_grad_norm_(plain.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    # What is put there is added to the sum of those that follow, not they to it.
    assert_same(model, plain, bitwise=what is not put and clip is None)


def test_what_is_seen_is_the_sum_so_far() -> None:
    plain, model = built(Net), built(Net)
    with engine_for(model, sgd, config_of(GROUP)) as engine:
        for index in range(GROUP):
            engine.backward(engine(**batch_of(index))["loss"])
            (plain(**batch_of(index))["loss"] / GROUP).backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                assert torch.equal(mine.grad, theirs.grad)
            engine.step()
