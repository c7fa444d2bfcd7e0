"""Micro-batches that take another way through the model than those before, when part of their step has run already."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import PAIRS, REGROUPED, Found, case
from tests.exactness.models import CLASSES, WIDTH, Net, adamw, sgd, trained
from tests.exactness.sides import Side


class Heads(nn.Module):
    """Tasks, each with a head, and with a weight of its own in a dictionary that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({task: nn.Linear(WIDTH, CLASSES) for task in "ab"})
        self.weights = nn.ParameterDict({task: nn.Parameter(torch.zeros(())) for task in "ab"})

    def forward(self, x: Tensor, labels: Tensor, tasks: str) -> Tensor:
        x = torch.tanh(self.front(x))
        losses = [F.cross_entropy(self.heads[task](x), labels) for task in tasks]
        return sum(
            (
                loss * torch.exp(-self.weights[task]) + self.weights[task]
                for task, loss in zip(tasks, losses, strict=True)
            ),
            x.new_zeros(()),
        )


def in_turn(side: Side, look: bool, watch: bool) -> Found:
    """Two steps, whose micro-batches have either task; each loss is looked at, or a module has a backward hook."""
    model = Heads()
    if watch:
        model.front.register_full_backward_hook(lambda *_: None)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss = engine(x, labels, tasks="ab"[engine.micro_steps % 2])
        if look:
            loss.item()
        return loss

    return trained(side, model, sgd, loss)


@case(*PAIRS)
def tasks_in_turn_with_losses_read(side: Side) -> Found:
    """Two tasks in turn, each weighted by a parameter of an nn.ParameterDict; each loss is logged."""
    return in_turn(side, look=True, watch=False)


@case(*PAIRS)
def tasks_in_turn_with_a_backward_hook(side: Side) -> Found:
    """Two tasks in turn, and a backward hook of a module, so that each micro-batch is propagated by itself."""
    return in_turn(side, look=False, watch=True)


class Borrowing(Heads):
    """Uses the weight of another task's head itself, after its own."""

    def forward(self, x: Tensor, labels: Tensor, tasks: str) -> Tensor:
        loss = super().forward(x, labels, tasks)
        return loss + self.spare[tasks].weight.square().sum() * 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleDict({task: nn.Linear(WIDTH, 1, bias=False) for task in "ab"})


@case(*PAIRS, tolerance=REGROUPED)
def weights_used_between_layers_within_a_step(side: Side) -> Found:
    """A later task uses the weight of a module that it does not call, which no micro-batch of the step did before."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss = engine(x, labels, tasks="ab"[engine.micro_steps % side.accumulation > 1])
        loss.item()
        return loss

    return trained(side, Borrowing(), sgd, loss)


class Sometimes(Net):
    """Uses the weight of its head before it calls that, for some data."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.body(x)
        if x.sum() > 0:
            hidden = hidden + self.head.weight.sum(0)
        return F.cross_entropy(self.head(hidden), labels)


@case(*PAIRS, tolerance=REGROUPED)
def weight_used_between_layers_for_some_data(side: Side) -> Found:
    """The code before the head uses its weight for the data of every third micro-batch."""
    return trained(
        side, Sometimes(), sgd, lambda engine, x, y: engine(x.abs() if engine.micro_steps % 3 == 2 else -x.abs(), y)
    )


class FixedPoint(nn.Module):
    """Goes through one layer until it changes nothing, and once more with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.step = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, rounds: int) -> Tensor:
        x = z = self.front(x)
        with torch.no_grad():
            for _ in range(rounds):
                z = torch.tanh(self.step(z) * 0.3 + x)
        for _ in range(2):
            z = torch.tanh(self.step(z) * 0.3 + x)
        return F.cross_entropy(self.head(z), labels)


@case(*PAIRS, tolerance=REGROUPED)
def fixed_point_of_as_many_rounds_as_it_takes(side: Side) -> Found:
    """A layer is called without gradients as often as the data take, then twice with them (phantom gradients)."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return engine(x, labels, rounds=(7, 3, 9, 5)[engine.micro_steps % 4])

    return trained(side, FixedPoint(), adamw, loss, steps=3)


class Augmented(Net):
    """Weakens some data by a number that Python's own generator draws, after batch normalization."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()))

    def body(self, x: Tensor) -> Tensor:
        weakens = x.sum() > 0
        x = super().body(x)
        return x * random.random() if weakens else x


@case(*PAIRS)
def numbers_of_python_for_some_data_with_losses_read(side: Side) -> Found:
    """BatchNorm, and random.random() for the data of every third micro-batch; each loss is logged."""
    model = Augmented()

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss = engine(x.abs() if engine.micro_steps % 3 == 2 else -x.abs(), labels)
        loss.item()
        return loss

    return {**trained(side, model, sgd, loss), **dict(model.named_buffers())}
