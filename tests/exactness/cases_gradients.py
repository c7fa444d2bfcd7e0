"""Gradients where people look for them, and where they put them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.case import Found, case
from tests.exactness.models import Net, adamw, batches, train, weights
from tests.exactness.sides import Side


@case(accumulation=(1, 4))
def parameter_hook(side: Side) -> Found:
    """`p.register_hook(lambda g: g * 2)` on the weights of one block."""
    model = Net()
    model.blocks[1].linear.weight.register_hook(lambda g: g * 2)
    engine = side.initialize(model, adamw(model))
    train(engine, batches(3 * side.accumulation))
    return weights(model)


@case(accumulation=(1, 4))
def penalty_outside(side: Side) -> Found:
    """`loss + 0.1 * sum(p.pow(2).sum() for p in engine.module.parameters())`, computed in the loop."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for x, y in batches(3 * side.accumulation):
        loss = F.cross_entropy(engine(x), y)
        loss = loss + 0.1 * sum(p.pow(2).sum() for p in engine.module.parameters())
        engine.backward(loss)
        engine.step()
    return weights(model)


@case(accumulation=(1, 4))
def clipping_by_hand(side: Side) -> Found:
    """torch.nn.utils.clip_grad_norm_ between backward and step at each boundary."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(F.cross_entropy(engine(x), y))
        if engine.is_gradient_accumulation_boundary():
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        engine.step()
    return weights(model)


@case(accumulation=(1,))
def plain_loop_around_the_engine(side: Side) -> Found:
    """A plain PyTorch loop: loss.backward(), optimizer.step(), optimizer.zero_grad(), with the engine as the model."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    losses = []
    for x, y in batches(6):
        loss = F.cross_entropy(engine(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {**weights(model), "losses": torch.stack(losses)}
