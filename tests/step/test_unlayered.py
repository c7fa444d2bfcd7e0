"""Parameters that no layer call covers, through steps with looks and evaluations between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine.drive import adamw, config_of, engine_for, weights_of
from tests.families import build_seeded
from tests.oracle import assert_same
from tests.runtime import test_timeline as timeline

pytestmark = pytest.mark.fixed_times


class Net(timeline.Net):
    """Has a parameter that the model does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


BATCHES = [torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def plainly(clip: float) -> dict[str, Tensor]:
    model = build_seeded(Net)
    optimizer = adamw(model.parameters())
    for step in (BATCHES[:3], BATCHES[3:]):
        for inputs in step:
            (model(inputs) / 3).backward()
        (model.unused.sum() / 10).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize(
    ("clip", "looks", "evaluates"), [(0.0, False, True), (0.0, True, False), (0.05, False, False), (0.05, True, True)]
)
def test_their_gradients_are_those_of_plain_accumulation(clip: float, looks: bool, evaluates: bool) -> None:
    model = build_seeded(Net)
    with engine_for(model, adamw, config_of(3, clip, {"pack_layers": 1})) as engine:
        for step in (BATCHES[:3], BATCHES[3:]):
            for place, inputs in enumerate(step):
                loss = engine(inputs)
                if place == 1:
                    loss.item()
                if evaluates:  # between a forward pass and its backward pass
                    engine.eval_batch(iter([BATCHES[0]]))
                engine.backward(loss)
                if looks and place == 2:
                    assert model.scale.grad is not None
                if place == 2:
                    (model.unused.sum() / 10).backward()
                engine.step()
        found = weights_of(model)

    assert_same(found, plainly(clip), bitwise=True)
