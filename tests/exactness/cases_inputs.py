"""A call computes with the values that its arguments had when it was made."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.exactness.case import ALL, PAIRS, Found, Tolerance, case
from tests.exactness.models import WIDTH, Block, Net, adamw, batches, sgd, trained, weights
from tests.exactness.sides import Side


@case(*ALL)
def reused_input_buffer(side: Side) -> Found:
    """The loop copies every micro-batch into a NumPy array and a tensor; the loss is the model's."""
    rows, by = torch.empty(2, WIDTH).numpy(), torch.empty(2, dtype=torch.long)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        rows[:] = x.numpy()
        return engine(torch.from_numpy(rows), labels=by.copy_(labels))

    return trained(side, Net(), adamw, loss, steps=3)


class OfBuffers(Net):
    def forward(self, objects: Any, numbers: Any, data: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        shift = objects[0] + torch.tensor(numbers.tolist()) + torch.frombuffer(bytearray(data), dtype=torch.float32)
        return super().forward(x + shift, objects[1])


@case(*ALL)
def reused_buffers_of_python(side: Side) -> Found:
    """The loop fills a NumPy array of tensors, an array.array and a bytearray for every micro-batch."""
    own, by = torch.zeros(WIDTH), torch.zeros(2, dtype=torch.long)
    objects, numbers, data = np.array([own, by, None], dtype=object), array("f", [0.0] * WIDTH), bytearray(4 * WIDTH)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        own.copy_(x[0])
        by.copy_(labels)
        numbers[:] = array("f", x[1].tolist())
        data[:] = x[0].numpy().tobytes()
        return engine(objects, numbers, data, x)

    return trained(side, OfBuffers(), adamw, loss)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


class OfBatch(Net):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return super().forward(batch["x"] * batch.get("scale", 1), batch["labels"])


@case()
def batch_dict_changed_after_the_call(side: Side) -> Found:
    """One dict is handed over for every micro-batch, its entries exchanged in between."""
    batch: dict[str, Any] = {}

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        batch.clear()
        batch.update(x=x, labels=labels, scale=engine.micro_steps)
        return engine(batch)

    return trained(side, OfBatch(), adamw, loss)


@case()
def dropout_rate_changed_between_steps(side: Side) -> Found:
    """`dropout.p` is raised after each step."""
    model = Net(lambda: Block(dropout=0.0))

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        for block in model.blocks:
            block.dropout.p = 0.2 * (engine.micro_steps // side.accumulation)
        return engine(x, labels)

    return trained(side, model, adamw, loss, steps=3)


class Shifted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x + self.shift, labels)


@case(*ALL)
def buffer_filled_between_steps(side: Side) -> Found:
    """`model.shift.fill_(i)` and `model.shift.data.fill_(i)`, a registered buffer, before each step in turn."""
    model = Shifted()

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        step, within = divmod(engine.micro_steps, side.accumulation)
        if within == 0:
            (model.shift if step % 2 else model.shift.data).fill_(0.1 * step)
        return engine(x, labels)

    return trained(side, model, adamw, loss, steps=3)


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

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            engine(-x)
        return engine(x, labels)

    return trained(side, Net(normed), adamw, loss, rows=4)


class Masked(Net):
    def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale if mask is None else x * mask * scale, labels)


@case()
def different_keywords_per_call(side: Side) -> Found:
    """Every second call has a mask, every third a scale."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        more: dict[str, Any] = {"mask": (x > 0).float()} if engine.micro_steps % 2 else {}
        if engine.micro_steps % 3 == 0:
            more["scale"] = 0.5 + engine.micro_steps
        return engine(x, labels=labels, **more)

    return trained(side, Masked(), adamw, loss, steps=3)


@case()
def different_lengths(side: Side) -> Found:
    """Micro-batches of 2, 5, 1 and 7 rows in one group, the largest last."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        rows = (2, 5, 1, 7)[engine.micro_steps % 4] + engine.micro_steps // 8
        return engine(x[:rows], labels[:rows])

    return trained(side, Net(), adamw, loss, steps=3, rows=8)


@case()
def random_numbers_of_the_loop(side: Side) -> Found:
    """The loop draws noise with torch.randn_like between micro-batches of a model with dropout."""
    model = Net(lambda: Block(dropout=0.3))
    found = trained(side, model, adamw, lambda engine, x, y: engine(x + 0.1 * torch.randn_like(x), labels=y))
    return {**found, "next": torch.rand(3)}


@case(tolerance=Tolerance(1e-6, "an expanded tensor is copied dense, and kernels add in the order of strides"))
def inputs_of_other_kinds(side: Side) -> Found:
    """Inputs are an expanded row, a transposed matrix and float64 that forward converts."""

    class Mixed(Net):
        def forward(self, row: Tensor, columns: Tensor, wide: Tensor, labels: Tensor) -> Tensor:
            return super().forward(row + columns.T + wide.float(), labels)

    return trained(
        side, Mixed(), sgd, lambda engine, x, y: engine(x[:1].expand(2, -1), x.T.contiguous(), x.double(), y)
    )


@case()
def one_input_in_two_places(side: Side) -> Found:
    """The same tensor is handed over twice, and forward writes into one of them in place."""

    class Twice(Net):
        def forward(self, x: Tensor, context: Tensor, labels: Tensor) -> Tensor:
            x[:, 0] = 1.0
            return super().forward(x + context, labels)

    return trained(side, Twice(), adamw, lambda engine, x, y: engine(x, x, y))


class Summing(Net):
    def forward(self, x: Tensor, labels: Tensor, parts: Iterable[Tensor]) -> Tensor:
        return super().forward(x + sum(parts), labels)


@case(*PAIRS)
def iterator_given(side: Side) -> Found:
    """`engine(x, y, (part for part in parts))`: an argument that can be gone through once."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return engine(x, labels, (torch.full((WIDTH,), 0.1 * k * engine.micro_steps) for k in (1, 2)))

    return trained(side, Summing(), sgd, loss, steps=3)


@case(*PAIRS)
def random_generator_given(side: Side) -> Found:
    """`engine(x, y, generator)`: forward draws noise from a torch.Generator that is an argument."""

    class Noisy(Net):
        def forward(self, x: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:  # type: ignore[override]
            return super().forward(x + torch.randn(x.shape, generator=generator), labels)

    generator = torch.Generator().manual_seed(3)
    return trained(side, Noisy(), sgd, lambda engine, x, labels: engine(x, labels, generator))
