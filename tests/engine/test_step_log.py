"""Reports of optimizer steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.drive import config_of, engine_for, sgd


def test_throughput_counts_the_samples_that_a_short_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    with engine_for(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), sgd, config_of(4)) as engine:
        timer = engine.tput_timer
        monkeypatch.setattr(timer, "stop", lambda global_step: told.append(timer.batch_size))
        batches = iter([(torch.ones(2, 2),)] * 6)
        for _ in range(2):
            engine.train_batch(batches, loss_fn=torch.mean)

    assert told == [8, 4]
