"""A call computes with the values that its arguments had when it was made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import ALL, ONE, PAIRS, Found, Tolerance, case
from tests.exactness.models import WIDTH, Block, Net, adamw, batches, sgd, weights
from tests.exactness.sides import Side


@case(*ALL)
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


@case(*ALL)
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


@case(*ALL)
def dropout(side: Side) -> Found:
    """Dropout, and the loss is computed by the loop from the logits."""
    model = Net(lambda: Block(dropout=0.3))
    engine = side.initialize(model, adamw(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
    return weights(model)


class OfBatch(Net):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return super().forward(batch["x"] * batch.get("scale", 1), batch["labels"])


@case()
def batch_dict_changed_after_the_call(side: Side) -> Found:
    """One dict is handed over for every micro-batch, its entries exchanged in between."""
    model = OfBatch()
    engine = side.initialize(model, adamw(model))
    batch: dict[str, Any] = {}
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        batch.update(x=x, labels=y, scale=i)
        engine.backward(engine(batch))
        engine.step()
        batch.clear()
    return weights(model)


@case()
def dropout_rate_changed_between_steps(side: Side) -> Found:
    """`dropout.p` is raised after each step."""
    model = Net(lambda: Block(dropout=0.0))
    engine = side.initialize(model, adamw(model))
    for step in range(3):
        for block in model.blocks:
            block.dropout.p = 0.2 * step
        for x, y in batches(side.accumulation, seed=step):
            engine.backward(engine(x, labels=y))
            engine.step()
    return weights(model)


class Tempered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.ones(())  # neither parameter nor buffer
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x / self.temperature + self.shift, labels)


@case()
def tensor_attribute_filled_within_a_group(side: Side) -> Found:
    """`model.temperature.fill_(i)`, a plain tensor attribute, before each micro-batch."""
    model = Tempered()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        model.temperature.fill_(1.0 + i)
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case()
def buffer_filled_within_a_group(side: Side) -> Found:
    """`model.shift.fill_(i)`, a registered buffer, before each micro-batch."""
    model = Tempered()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        model.shift.fill_(0.1 * i)
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case(*ALL)
def buffer_filled_between_steps(side: Side) -> Found:
    """`model.shift.fill_(i)` and `model.shift.data.fill_(i)`, a registered buffer, before each step in turn."""
    model = Tempered()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        if i % side.accumulation == 0:
            (model.shift if i % 2 else model.shift.data).fill_(0.1 * i)
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case()
def buffer_replaced_within_a_group(side: Side) -> Found:
    """`model.shift = torch.full(...)`, a registered buffer, before each micro-batch."""
    model = Tempered()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        model.shift = torch.full((WIDTH,), 0.1 * i)
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case()
def buffer_filled_between_logits_and_backward(side: Side) -> Found:
    """A registered buffer is filled for the next micro-batch before this one's backward; the loss is the loop's."""
    model = Tempered()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        loss = F.cross_entropy(engine(x), y)
        model.shift.fill_(0.1 * i)
        engine.backward(loss)
        engine.step()
    return weights(model)


@case()
def evaluation_within_a_group(side: Side) -> Found:
    """After two micro-batches of a group the model is evaluated under no_grad and eval(), with BatchNorm and dropout."""
    model = Net(lambda: nn.Sequential(normed(), nn.Dropout(0.2)))
    engine = side.initialize(model, adamw(model))
    seen = []
    for i, (x, y) in enumerate(batches(2 * side.accumulation, rows=4)):
        engine.backward(engine(x, labels=y))
        if i % 4 == 1:
            engine.eval()
            with torch.no_grad():
                seen.append(engine(x))
            engine.train()
        engine.step()
    return {**weights(model), "seen": torch.stack(seen)}


@case()
def no_grad_forward_in_training_mode(side: Side) -> Found:
    """A no_grad forward in training mode between micro-batches updates BatchNorm's statistics too."""
    model = Net(normed)
    engine = side.initialize(model, adamw(model))
    for x, y in batches(2 * side.accumulation, rows=4):
        with torch.no_grad():
            engine(-x)
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


class Masked(Net):
    def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale if mask is None else x * mask * scale, labels)


@case()
def different_keywords_per_call(side: Side) -> Found:
    """Every second call has a mask, every third a scale."""
    model = Masked()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        more: dict[str, Any] = {"mask": (x > 0).float()} if i % 2 else {}
        if i % 3 == 0:
            more["scale"] = 0.5 + i
        engine.backward(engine(x, labels=y, **more))
        engine.step()
    return weights(model)


@case()
def different_lengths(side: Side) -> Found:
    """Micro-batches of 2, 5, 1 and 7 rows in one group, the largest last."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for i in range(3 * side.accumulation):
        ((x, y),) = batches(1, rows=(2, 5, 1, 7)[i % 4] + i // 8, seed=i)
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case()
def random_numbers_of_the_loop(side: Side) -> Found:
    """The loop draws noise with torch.randn_like between micro-batches of a model with dropout."""
    model = Net(lambda: Block(dropout=0.3))
    engine = side.initialize(model, adamw(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(engine(x + 0.1 * torch.randn_like(x), labels=y))
        engine.step()
    return {**weights(model), "next": torch.rand(3)}


@case(tolerance=Tolerance(1e-6, "an expanded tensor is copied dense, and kernels add in the order of strides"))
def inputs_of_other_kinds(side: Side) -> Found:
    """Inputs are an expanded row, a transposed matrix and float64 that forward converts."""

    class Mixed(Net):
        def forward(self, row: Tensor, columns: Tensor, wide: Tensor, labels: Tensor) -> Tensor:
            return super().forward(row + columns.T + wide.float(), labels)

    model = Mixed()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(engine(x[:1].expand(2, -1), x.T.contiguous(), x.double(), y))
        engine.step()
    return weights(model)


@case()
def one_input_in_two_places(side: Side) -> Found:
    """The same tensor is handed over twice, and forward writes into one of them in place."""

    class Twice(Net):
        def forward(self, x: Tensor, context: Tensor, labels: Tensor) -> Tensor:
            x[:, 0] = 1.0
            return super().forward(x + context, labels)

    model = Twice()
    engine = side.initialize(model, adamw(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(engine(x, x, y))
        engine.step()
    return weights(model)


@case(*ONE)
def forward_writes_into_its_input(side: Side) -> Found:
    """Forward normalizes its input in place; the loop gives it a new tensor each time."""

    class InPlace(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            x.div_(2.0)
            return super().forward(x, labels)

    model = InPlace()
    engine = side.initialize(model, adamw(model))
    ((x, y),) = batches(1)
    for _ in range(3):
        engine.backward(engine(x.clone(), y))
        engine.step()
    return weights(model)


class Summing(Net):
    def forward(self, x: Tensor, labels: Tensor, parts: Iterable[Tensor]) -> Tensor:
        return super().forward(x + sum(parts), labels)


@case(*PAIRS)
def iterator_given(side: Side) -> Found:
    """`engine(x, y, (part for part in parts))`: an argument that can be gone through once."""
    model = Summing()
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        engine.backward(engine(x, y, (torch.full((WIDTH,), 0.1 * k * i) for k in (1, 2))))
        engine.step()
    return weights(model)
