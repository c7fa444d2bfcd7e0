"""Rows padded to the longest of each micro-batch, in a plain loop with a loss of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds import BatchError
from harmony_ds.step.pending import PendingTensor
from tests.engine.drive import config_of, engine_for, loop_plainly, loop_with, sgd
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

WORDS, ROWS = 13, 2
ONE_PACK_EACH = {"pack_layers": 1}


class Tagger(nn.Module):
    """Scores of each token; the length of what it returns is `length` of that of its argument."""

    def __init__(self, length: Callable[[int], int] = lambda given: given) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, WORDS)
        self.length = length

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        hidden = [x]
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return {"scores": self.head(x)[:, : self.length(ids.shape[1])], "hidden": hidden}


def padded(count: int, rows: Callable[[int], int] = lambda number: ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    # The longest first, so that no later one is measured.
    return [
        torch.randint(WORDS, (rows(number), length), generator=generator)
        for number, length in enumerate((32, *lengths[1:]))
    ]


def loss_of(call: Any, ids: Tensor) -> Tensor:
    outputs = call(ids)
    scores = outputs["scores"]
    loss = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), ids[:, : scores.shape[1]].reshape(-1))
    regular: Tensor = outputs["hidden"][1].pow(2).mean()
    return loss + 0.1 * regular


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize(("rows", "before"), [(lambda number: ROWS, 4), (lambda number: 1 + number % 3, 8)])
def test_rows_of_any_length_are_grouped_after_the_first_steps(rows: Callable[[int], int], before: int) -> None:
    accumulation, data = 4, padded(40, rows)
    plain, model = Tagger(), Tagger()
    expected = loop_plainly(plain, data, accumulation, loss_of)
    with engine_for(model, sgd, config_of(accumulation, None, ONE_PACK_EACH)) as engine:
        losses, ratios = loop_with(engine, data, loss_of)
    assert losses == expected
    assert_same(model, plain, bitwise=True)
    assert ratios[before // accumulation :] == [1.0] * len(ratios[before // accumulation :]), ratios


def ones(length: int) -> Tensor:
    return torch.ones(ROWS, length, dtype=torch.long)


def halved_where_16(length: int) -> int:
    return 10 if length == 16 else length


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_a_length_that_does_not_follow_is_right_unless_the_program_has_used_it() -> None:
    plain, model = Tagger(halved_where_16), Tagger(halved_where_16)
    with engine_for(model, sgd, config_of(1, None, ONE_PACK_EACH)) as engine:
        loop_with(engine, [ones(length) for length in (20, 12, 8)], loss_of)
        plain.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        ids = ones(16)
        scores = engine(ids)["scores"]
        assert isinstance(scores, PendingTensor)
        loss = scores.square().mean()
        engine.backward(loss)
        engine.step()
        assert loss.item() == plain(ids)["scores"].square().mean().item()
        assert engine(ones(17))["scores"].shape == (ROWS, 17, WORDS)  # no rule: computed


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_a_shape_that_the_program_has_used_and_that_is_another_one_is_an_error() -> None:
    with engine_for(Tagger(halved_where_16), sgd, config_of(1, None, ONE_PACK_EACH)) as engine:
        loop_with(engine, [ones(length) for length in (20, 12, 8)], loss_of)
        scores = engine(ones(16))["scores"]
        engine.backward(scores.reshape(scores.shape[0] * scores.shape[1], -1).square().mean())
        with pytest.raises(BatchError, match=r"told the shape \(2, 16, 13\)"):
            engine.step()
