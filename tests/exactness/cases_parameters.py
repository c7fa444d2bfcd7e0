"""Parameters that are exchanged or changed under the engine."""

from __future__ import annotations

import torch
from torch import nn

from tests.exactness.case import Found, case
from tests.exactness.models import Net, adamw, batches, sgd, train, weights
from tests.exactness.sides import Side


@case()
def data_replaced(side: Side) -> Found:
    """`p.data = p.data * 0.5` for every parameter between two steps."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    train(engine, batches(side.accumulation))
    for p in model.parameters():
        p.data = p.data * 0.5
    losses = train(engine, batches(side.accumulation))
    return {**weights(model), "losses": losses}


@case()
def vector_to_parameters(side: Side) -> Found:
    """torch.nn.utils.vector_to_parameters writes a flat vector back between two steps."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    train(engine, batches(side.accumulation))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    losses = train(engine, batches(side.accumulation))
    return {**weights(model), "losses": losses}


@case()
def requires_grad_after_the_start(side: Side) -> Found:
    """The head alone is trained first; after two steps the blocks are unfrozen."""
    model = Net()
    model.blocks.requires_grad_(False)
    engine = side.initialize(model, sgd(model))
    train(engine, batches(2 * side.accumulation))
    model.blocks.requires_grad_(True)
    train(engine, batches(2 * side.accumulation))
    return weights(model)


@case()
def parameters_listed_once(side: Side) -> Found:
    """`ps = list(model.parameters())` is taken once and read after each train_batch."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    ps = list(model.parameters())
    seen = []
    for step in range(3):
        group = batches(side.accumulation, seed=step)
        engine.train_batch(iter([{"x": x, "labels": y} for x, y in group]))
        seen.append(torch.stack([p.detach().sum() for p in ps]))
    return {"seen": torch.stack(seen)}
