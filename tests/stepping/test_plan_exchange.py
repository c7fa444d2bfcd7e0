"""A new plan numbers its packs anew, while updates of the old one's packs may still be under way."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from tests.engine.drive import config_of, engine_for, seed_of
from tests.engine.test_paths import Net, batch_of, built
from tests.inside import planner_of
from tests.oracle import assert_same, train_plainly


class SlowSGD(torch.optim.SGD):
    """Takes long for every layer, so that the next step begins while updates are pending."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


def test_a_new_plan_waits_for_the_updates_of_the_old_ones_packs() -> None:
    groups = [[batch_of(i) for i in range(2)], [batch_of(i) for i in range(2, 6)]]
    plain, model = built(Net), built(Net)
    train_plainly(plain, groups, torch.optim.SGD(plain.parameters(), 0.5), clip=None, seed_of=seed_of)
    with engine_for(model, lambda p: SlowSGD(p, 0.5), config_of(2, None, {"pack_layers": 1})) as engine:
        engine.train_batch(iter(groups[0]))
        before = engine.plan
        # More micro-batches than the plan was made for: a new one, here with larger packs.
        planner = planner_of(engine)
        planner._settings = dataclasses.replace(planner._settings, pack_layers=3)
        engine.set_train_batch_size(8)
        engine.train_batch(iter(groups[1]))
        assert before is not None and engine.plan is not None
        assert len(before.packs) == 5 and len(engine.plan.packs) == 2
    assert_same(model, plain, bitwise=True)
