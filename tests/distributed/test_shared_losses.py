"""Losses of several forward passes, in several processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.processes import run
from tests.engine.drive import config_of, engine_for, sgd
from tests.engine.test_shared_losses import LOSSES, Encoder, data

pytestmark = pytest.mark.fixed_times

NAMES = ("siamese", "triplet", "info_nce")
STEPS, ACCUMULATION = 2, 2


def train(clip: float, devices: int) -> list[tuple[list[Tensor], float]]:
    """Train with each loss on this process's part of the data; return the weights, and the ratio of swaps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for name in NAMES:
        model = Encoder()
        config = config_of(ACCUMULATION, clip, {"pack_layers": 1, "devices": devices})
        with engine_for(model, sgd, config) as engine:
            for number in range(STEPS * ACCUMULATION):
                engine.backward(LOSSES[name](engine, data()[number * size + rank]))
                engine.step()
            ratio = engine.swap_report().ratio
        found.append(([one.detach().clone() for one in model.parameters()], ratio))
    return found


@pytest.mark.parametrize(("clip", "devices"), [(0.0, 1), (0.3, 1), (0.3, 2)])
def test_losses_of_several_passes_are_grouped_and_exact(clip: float, devices: int) -> None:
    """To rounding: gradients are added up within each process first."""
    size = 2
    found = run(size, train, clip, devices)
    for place, name in enumerate(NAMES):
        plain = Encoder()
        optimizer = sgd(plain.parameters())
        for step in range(STEPS):
            for number in range(ACCUMULATION * size):
                (LOSSES[name](plain, data()[step * ACCUMULATION * size + number]) / (ACCUMULATION * size)).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        for weights, ratio in (of_rank[place] for of_rank in found):
            assert ratio == 1.0
            for own, expected in zip(weights, plain.parameters(), strict=True):
                torch.testing.assert_close(own, expected.detach(), rtol=1e-5, atol=1e-7)
