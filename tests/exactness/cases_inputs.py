"""What a call sees is what it saw when it was made."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import Found, case
from tests.exactness.models import WIDTH, Block, Net, adamw, batches, weights
from tests.exactness.sides import Side


@case(accumulation=(1, 4))
def reused_input_buffer(side: Side) -> Found:
    """The loop copies every micro-batch into one pair of tensors; the loss is the model's."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    bx, by = torch.empty(2, WIDTH), torch.empty(2, dtype=torch.long)
    losses = []
    for x, y in batches(3 * side.accumulation):
        bx.copy_(x)
        by.copy_(y)
        loss = engine(bx, labels=by)
        engine.backward(loss)
        engine.step()
        losses.append(loss)
    return {**weights(model), "losses": torch.stack([loss.detach() for loss in losses])}


@case()
def reused_numpy_buffer(side: Side) -> Found:
    """Inputs are made by torch.from_numpy over an array that is overwritten for each micro-batch."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    array = torch.empty(2, WIDTH).numpy()
    for x, y in batches(3 * side.accumulation):
        array[:] = x.numpy()
        engine.backward(engine(torch.from_numpy(array), labels=y))
        engine.step()
    return weights(model)


@case()
def train_and_eval_within_a_group(side: Side) -> Found:
    """Every second micro-batch of a group runs in eval mode, without dropout."""
    model = Net(lambda: Block(dropout=0.3))
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        engine.train(i % 2 == 0)
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


class Scaled(Net):
    k = 1

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x * self.k, labels)


@case()
def attribute_changed_within_a_group(side: Side) -> Found:
    """`model.k = 1 + i` before each micro-batch, read in forward."""
    model = Scaled()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        model.k = 1 + i
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


@case(accumulation=(1, 4))
def batch_norm(side: Side) -> Found:
    """BatchNorm in the blocks, losses looked at after the step."""
    model = Net(normed)
    engine = side.initialize(model, adamw(model))
    for x, y in batches(3 * side.accumulation, rows=4):
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case()
def batch_norm_and_a_look(side: Side) -> Found:
    """BatchNorm in the blocks, and the third loss of a group is printed before its backward."""
    model = Net(normed)
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation, rows=4)):
        loss = engine(x, labels=y)
        if i % 4 == 2:
            str(loss.item())
        engine.backward(loss)
        engine.step()
    return weights(model)


@case(accumulation=(1, 4))
def dropout(side: Side) -> Found:
    """Dropout, and the loss is computed by the loop from the logits."""
    model = Net(lambda: Block(dropout=0.3))
    engine = side.initialize(model, adamw(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
    return weights(model)
