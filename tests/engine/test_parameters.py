"""Errors name the parameter that a program changes in a way that an engine cannot follow, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds import ModelError, OptimizerError, UnsupportedError, UsageError
from tests.engine.drive import config_of, engine_for, sgd, weights_of
from tests.oracle import assert_same


class Net(nn.Module):
    """Blocks, and a head whose loss is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        logits: Tensor = self.head(inputs)
        return logits if targets is None else F.cross_entropy(logits, targets)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 8, generator=generator), torch.randint(0, 4, (2,), generator=generator)


Act = Callable[[Any], None]


def assign(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.zeros(4, 8))


def other_dtype(model: Net) -> None:
    model.half().float()


def other_shape(model: Net) -> None:
    model.head.weight.data = torch.zeros(5, 8)


def load_by_assignment(model: Net) -> None:
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)


def post_accumulate(model: Net) -> None:
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)


REFUSED = [
    (assign, ModelError, "'weight' is assigned"),
    (other_dtype, ModelError, r"blocks\.0\.weight is to become .*float16"),
    (other_shape, ModelError, r"head\.weight is to become \(5, 8\)"),
    (load_by_assignment, UnsupportedError, "assign=True"),
    (post_accumulate, UnsupportedError, "register_post_accumulate_grad_hook"),
]


@pytest.mark.parametrize(("act", "kind", "message"), REFUSED)
def test_what_would_detach_a_parameter_is_refused_and_changes_nothing(act: Act, kind: Any, message: str) -> None:
    plain, model = net(), net()
    optimizer = sgd(plain.parameters())
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine:
        for step in range(2):
            engine.train_batch([batch(step)])
            plain(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(kind, match=message):
                act(model)
            assert_same(model, plain, bitwise=True)


def test_a_parameter_whose_memory_was_exchanged_is_refused_by_the_next_call() -> None:
    model = net()
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        with torch.no_grad():
            model.head.weight.set_(torch.zeros(4, 8))
        before = weights_of(model)
        with pytest.raises(ModelError, match=r"head\.weight has been given other memory"):
            engine.train_batch([batch(1)])
        assert_same(model, before, bitwise=True)


def test_thawing_what_was_frozen_at_the_start_is_refused() -> None:
    model = net()
    model.head.requires_grad_(False)
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        with pytest.raises(UnsupportedError, match=r"head\.weight is not trained by this engine"):
            model.requires_grad_(True)


def test_a_parameter_group_that_is_added_later_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        before = weights_of(model)
        optimizer.add_param_group({"params": list(model.head.parameters())})
        with pytest.raises(OptimizerError, match=r"hold \[6, 2\] parameters, and held \[6\]"):
            engine.train_batch([batch(1)])
        assert_same(model, before, bitwise=True)


def test_writing_while_a_micro_batch_waits_for_its_backward_is_refused() -> None:
    model = net()
    with engine_for(model, sgd, config_of(1)) as engine:
        loss = engine(*batch(0))
        assert model.head.weight.data.norm() > 0.0
        assert len(model.state_dict()) == 8
        with torch.no_grad(), pytest.raises(UsageError, match=r"head\.weight is about to be changed"):
            model.head.weight.zero_()
        engine.backward(loss)
        engine.step()
