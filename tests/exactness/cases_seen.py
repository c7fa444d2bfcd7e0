"""What a loop finds between a call and its step that forward left somewhere else than in its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exactness.case import PAIRS, REGROUPED, Found, case
from tests.exactness.models import WIDTH, Block, Net, batches, sgd, weights
from tests.exactness.sides import Side


class Scored(Net):
    """Returns its loss, so that a call of the engine could be put off."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), labels)


def trained(side: Side, model: nn.Module, look: Any) -> Found:
    """The familiar loop; `look(engine, x, y)` calls the engine, and gives the loss and what it saw."""
    engine = side.initialize(model, sgd(model))
    seen = []
    for x, y in batches(3 * side.accumulation):
        loss, found = look(engine, x, y)
        seen.append(torch.as_tensor(found).detach().clone())
        engine.backward(loss)
        engine.step()
    return {**weights(model), "seen": torch.stack(seen)}


@case(*PAIRS)
def number_kept_on_the_model(side: Side) -> Found:
    """`self.last = loss.item()` in the model's forward; the loop logs `model.last` after each call."""

    class Keeping(Scored):
        last = 0.0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            self.last = loss.item()
            return loss

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        return engine(x, y), model.last

    model = Keeping()
    return trained(side, model, look)


@case(*PAIRS)
def number_read_through_the_engine(side: Side) -> Found:
    """The same, read as `engine.last` and `engine.module.last`."""

    class Keeping(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.last = 0.0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            self.last = float(x.mean())
            return loss

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, [engine.last, engine.module.last]

    return trained(side, Keeping(), look)


@case(*PAIRS)
def calls_counted_by_the_model(side: Side) -> Found:
    """`self.calls += 1` in forward; the loop reads it after each call."""

    class Counting(Scored):
        calls = 0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            self.calls += 1
            return super().forward(x, labels)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        return engine(x, y), model.calls

    model = Counting()
    return trained(side, model, look)


@case(*PAIRS)
def length_kept_on_a_block(side: Side) -> Found:
    """A block keeps `self.seen_rows = len(x)`; batches differ in length; the loop reads it."""
    model = Scored(Measured)
    engine = side.initialize(model, sgd(model))
    seen = []
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        rows = 1 + i % len(x)
        loss = engine(x[:rows], y[:rows])
        seen.append([block.rows for block in model.blocks])
        engine.backward(loss)
        engine.step()
    return {**weights(model), "seen": torch.tensor(seen)}


class Measured(Block):
    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)
        return super().forward(x)


class Regularized(Block):
    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.linear(x).pow(2).mean()
        return super().forward(x)


@case(*PAIRS, tolerance=REGROUPED)
def penalty_on_blocks_added_to_the_models_loss(side: Side) -> Found:
    """Blocks keep `self.penalty`; the model returns its loss; the loop adds the penalties to it."""

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        penalty = sum(block.penalty for block in model.blocks)
        return loss + 0.1 * penalty, penalty

    model = Scored(Regularized)
    return trained(side, model, look)


class SwitchedOn(Block):
    collects = False
    penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.collects:
            self.penalty = self.linear(x).pow(2).mean()
        return super().forward(x)


@case(*PAIRS, tolerance=REGROUPED)
def penalty_on_blocks_switched_on_later(side: Side) -> Found:
    """Blocks keep it from the second micro-batch on, when the loop sets `block.collects = True`; before, it is zero."""

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        penalty = sum(block.penalty for block in model.blocks)
        for block in model.blocks:
            block.collects = True
        return loss + 0.1 * penalty, penalty

    model = Scored(SwitchedOn)
    return trained(side, model, look)


@case(*PAIRS)
def penalty_in_train_batch_switched_on_unseen(side: Side) -> Found:
    """The same in train_batch, from the third step on, by a number of the loop's that blocks compare with 2."""

    class Staged(SwitchedOn):
        stage = 0

        @property
        def collects(self) -> bool:  # type: ignore[override]
            return self.stage >= 2

    model = Net(Staged)
    engine = side.initialize(model, sgd(model))
    inputs = iter([(x,) for x, _ in batches(3 * side.accumulation)])
    for stage in range(3):
        for block in model.blocks:
            block.stage = stage
        engine.train_batch(inputs, loss_fn=lambda z: z.pow(2).mean() + sum(block.penalty for block in model.blocks))
    return weights(model)


@case(*PAIRS)
def logits_kept_on_the_model(side: Side) -> Found:
    """`self.logits = logits.detach()`; the loop computes an accuracy of them."""

    class Keeping(Net):
        logits: Tensor

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            logits = super().forward(x)
            self.logits = logits.detach()
            return F.cross_entropy(logits, labels)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, (model.logits.argmax(-1) == y).float()

    model = Keeping()
    return trained(side, model, look)


@case(*PAIRS)
def logs_in_an_object_of_the_model(side: Side) -> Found:
    """`self.log = SimpleNamespace()`, which forward writes a value into; a dictionary as well."""

    class Logging(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.log = SimpleNamespace(loss=0.0)
            self.values: dict[str, float] = {}

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            self.log.loss = loss.item()
            self.values["x"] = x.sum().item()
            return loss

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, [model.log.loss, model.values["x"]]

    model = Logging()
    return trained(side, model, look)


@case(*PAIRS)
def hook_fills_a_list(side: Side) -> Found:
    """A forward hook on a block appends its output's mean to a list, which the loop reads after each call."""
    kept: list[float] = []

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, [len(kept), kept[-1]]

    model = Scored()
    model.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output.mean().item()))
    return trained(side, model, look)


@case(*PAIRS)
def hook_method_keeps_features(side: Side) -> Found:
    """A feature extractor's bound method is the hook; it keeps the last output of every block."""

    class Extractor:
        def __init__(self) -> None:
            self.features: dict[str, Tensor] = {}

        def hook(self, name: str) -> Any:
            def keep(module: nn.Module, args: Any, output: Tensor) -> None:
                self.features[name] = output.detach()

            return keep

    extractor = Extractor()

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, torch.stack([value.mean() for value in extractor.features.values()])

    model = Scored()
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(extractor.hook(str(i)))
    return trained(side, model, look)


@case(*PAIRS)
def hook_on_the_model_keeps_its_output(side: Side) -> Found:
    """A forward hook on the whole model keeps the loss that it returned."""
    kept: list[float] = []
    model = Scored()
    model.register_forward_hook(lambda module, args, output: kept.append(output.item()))

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, [len(kept), kept[-1]]

    return trained(side, model, look)


@case(*PAIRS)
def pre_hook_counts(side: Side) -> Found:
    """A forward pre-hook counts samples in a dictionary."""
    count = {"samples": 0}

    def counting(module: nn.Module, args: Any) -> None:
        count["samples"] += len(args[0])

    model = Scored()
    model.front.register_forward_pre_hook(counting)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, count["samples"]

    return trained(side, model, look)


LAST: dict[str, float] = {}
STEPS = 0


@case(*PAIRS)
def global_dictionary_written_by_the_model(side: Side) -> Found:
    """Forward writes into a dictionary of its module's globals."""

    class Writing(Scored):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            LAST["loss"] = loss.item()
            return loss

    LAST.clear()

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        return engine(x, y), LAST["loss"]

    return trained(side, Writing(), look)


@case(*PAIRS)
def global_number_written_by_the_model(side: Side) -> Found:
    """`global STEPS; STEPS += 1` in forward."""

    class Stepping(Scored):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            global STEPS  # noqa: PLW0603
            STEPS += 1
            return super().forward(x, labels)

    global STEPS  # noqa: PLW0603
    STEPS = 0

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        return engine(x, y), STEPS

    return trained(side, Stepping(), look)


class Filling(Scored):
    """Leaves something in what it is given."""

    def forward(self, x: Tensor, labels: Tensor, out: Any = None) -> Tensor:  # type: ignore[override]
        x = self.front(x)
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        logits = self.head(x)
        self.leave(out, x, kept)
        return F.cross_entropy(logits, labels)

    def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
        raise NotImplementedError


@case(*PAIRS)
def list_argument_appended_to(side: Side) -> Found:
    """`out = []; loss = engine(x, y, out)`, forward appends numbers."""

    class Appending(Filling):
        def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
            out += [one.mean().item() for one in kept]

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        out: list[float] = []
        loss = engine(x, y, out)
        return loss, out

    return trained(side, Appending(), look)


@case(*PAIRS, tolerance=REGROUPED)
def dictionary_argument_filled_with_tensors(side: Side) -> Found:
    """`aux = {}; loss = engine(x, y, aux)`, and the loop adds `aux["penalty"]` to the loss."""

    class Adding(Filling):
        def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
            out["penalty"] = sum(one.pow(2).mean() for one in kept)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        aux: dict[str, Tensor] = {}
        loss = engine(x, y, aux)
        return loss + 0.1 * aux["penalty"], aux["penalty"]

    return trained(side, Adding(), look)


@case(*PAIRS)
def object_argument_written_to(side: Side) -> Found:
    """An object given as a keyword argument gets attributes."""

    class Setting(Filling):
        def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
            out.features = x.detach()
            out.count += 1

    state = SimpleNamespace(count=0, features=None)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y, out=state)
        return loss, torch.stack([state.features.mean(), torch.tensor(float(state.count))])

    return trained(side, Setting(), look)


@case(*PAIRS)
def list_argument_given_to_every_call(side: Side) -> Found:
    """One list for all calls: forward appends, and reads what earlier calls left."""

    class Reading(Filling):
        def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
            out.append(x.mean().item() + 0.5 * (out[-1] if out else 0.0))

    history: list[float] = []

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y, history)
        return loss, [len(history), history[-1]]

    return trained(side, Reading(), look)


@case(*PAIRS)
def statistics_read_after_the_call(side: Side) -> Found:
    """BatchNorm's running mean is logged after each call of a model that returns its loss."""

    class Normalized(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = self.norm(self.front(x))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x), labels)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, model.norm.running_mean

    model = Normalized()
    return trained(side, model, look)


@case(*PAIRS)
def attribute_read_after_train_batch(side: Side) -> Found:
    """`train_batch`, and then `model.last`, which forward set: it is that of the last micro-batch."""

    class Keeping(Scored):
        last = 0.0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            self.last = loss.item()
            return loss

    model = Keeping()
    engine = side.initialize(model, sgd(model))
    seen = []
    data = iter(batches(3 * side.accumulation))
    for _ in range(3):
        engine.train_batch(data)
        seen.append(model.last)
    return {**weights(model), "seen": torch.tensor(seen)}


@case(*PAIRS)
def attribute_read_after_the_step(side: Side) -> Found:
    """The loop reads `model.last` only behind `step()`."""

    class Keeping(Scored):
        last = 0.0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            self.last = loss.item()
            return loss

    model = Keeping()
    engine = side.initialize(model, sgd(model))
    seen = []
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, y))
        engine.step()
        seen.append(model.last)
    return {**weights(model), "seen": torch.tensor(seen)}


@case(*PAIRS)
def hook_registered_after_the_first_step(side: Side) -> Found:
    """The hook that fills a list comes after training has begun, and goes before it ends."""
    kept: list[float] = []
    model = Scored()
    engine = side.initialize(model, sgd(model))
    seen = []
    handle: Any = None
    for i, (x, y) in enumerate(batches(6 * side.accumulation)):
        if i == 2 * side.accumulation:
            handle = model.blocks[0].register_forward_hook(lambda m, a, out: kept.append(out.sum().item()))
        if i == 4 * side.accumulation:
            handle.remove()
        loss = engine(x, y)
        seen.append([float(len(kept)), kept[-1] if kept else 0.0])
        engine.backward(loss)
        engine.step()
    return {**weights(model), "seen": torch.tensor(seen)}


@case(*PAIRS)
def counter_on_the_class(side: Side) -> Found:
    """`type(self).calls += 1` in forward: an attribute of the class."""

    class Counting(Scored):
        calls = 0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            type(self).calls += 1
            return super().forward(x, labels)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        return engine(x, y), Counting.calls

    return trained(side, Counting(), look)


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


@case(*PAIRS)
def meter_of_the_model(side: Side) -> Found:
    """`self.meter.update(loss.item())` in forward; the loop logs its mean."""

    class Metered(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.meter = Meter()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            self.meter.update(loss.item())
            return loss

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss, [model.meter.total, model.meter.count]

    model = Metered()
    return trained(side, model, look)


@case(*PAIRS)
def note_on_the_models_config(side: Side) -> Found:
    """`self.config.last = ...` in forward, on an object called a Config."""

    class NetConfig:
        last = 0.0

    class Noting(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.config = NetConfig()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, labels)
            self.config.last = loss.item()
            return loss

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        return engine(x, y), model.config.last

    model = Noting()
    return trained(side, model, look)


@case(*PAIRS, tolerance=REGROUPED)
def penalty_that_shares_saved_tensors(side: Side) -> Found:
    """The model keeps `self.penalty = h.mean()` of an h that the next layer reads as well; the loop adds it."""

    class Sharing(Net):
        penalty: Tensor

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = self.front(x)
            for block in self.blocks:
                x = torch.tanh(block(x))
            self.penalty = x.pow(2).mean()
            return F.cross_entropy(self.head(x), labels)

    def look(engine: Any, x: Tensor, y: Tensor) -> Any:
        loss = engine(x, y)
        return loss + 0.1 * model.penalty, model.penalty

    model = Sharing()
    return trained(side, model, look)


@case(*PAIRS, tolerance=REGROUPED)
def penalties_by_loss_backward(side: Side) -> Found:
    """The same, and the loop calls `(loss + penalty).backward()` itself, without the engine's backward."""

    class Sharing(Net):
        penalty: Tensor

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = self.front(x)
            for block in self.blocks:
                x = torch.tanh(block(x))
            self.penalty = x.pow(2).mean()
            return F.cross_entropy(self.head(x), labels)

    model = Sharing()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        loss = engine(x, y)
        (loss + 0.1 * model.penalty).backward()
        engine.step()
    return weights(model)


@case(*PAIRS)
def one_list_in_all_batches_of_train_batch(side: Side) -> Found:
    """`train_batch` over `(x, labels, log)`, one list in all of them, to which forward appends."""

    class Appending(Filling):
        def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
            out.append(x.mean().item())

    model = Appending()
    engine = side.initialize(model, sgd(model))
    log: list[float] = []
    data = iter([(x, y, log) for x, y in batches(3 * side.accumulation)])
    for _ in range(3):
        engine.train_batch(data)
    return {**weights(model), "log": torch.tensor(log)}


@case(*PAIRS)
def lists_of_their_own_in_train_batch(side: Side) -> Found:
    """The same, each micro-batch with a list of its own."""

    class Appending(Filling):
        def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
            out.append(x.mean().item())

    model = Appending()
    engine = side.initialize(model, sgd(model))
    logs: list[list[float]] = [[] for _ in range(3 * side.accumulation)]
    data = iter([(x, y, log) for (x, y), log in zip(batches(3 * side.accumulation), logs, strict=True)])
    for _ in range(3):
        engine.train_batch(data)
    return {**weights(model), "logs": torch.tensor(logs)}


@case(*PAIRS)
def list_filled_without_gradients(side: Side) -> Found:
    """`with torch.no_grad(): engine(x, y, out)`, and forward appends to `out`."""

    class Appending(Filling):
        def leave(self, out: Any, x: Tensor, kept: list[Tensor]) -> None:
            if out is not None:
                out.append(x.mean().item())

    model = Appending()
    engine = side.initialize(model, sgd(model))
    seen = []
    for x, y in batches(3 * side.accumulation):
        out: list[float] = []
        with torch.no_grad():
            engine(x, y, out)
        seen.append(out)
        engine.backward(engine(x, y))
        engine.step()
    return {**weights(model), "seen": torch.tensor(seen)}


@case(*PAIRS)
def gradient_taken_inside_forward_across_layers(side: Side) -> Found:
    """Forward takes `torch.autograd.grad(energy, x)` through its layers and adds the gradient's norm."""

    class Forces(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = x.requires_grad_()
            logits = super().forward(x)
            (force,) = torch.autograd.grad(logits.sum(), x, retain_graph=True)
            return F.cross_entropy(logits + force.norm(), labels)

    model = Forces()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, y))
        engine.step()
    return weights(model)


@case(*PAIRS)
def gradient_taken_inside_a_block(side: Side) -> Found:
    """A block takes `torch.autograd.grad` of its own output with respect to its own input, with create_graph."""

    class Forcing(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(super().forward(own).sum(), own, create_graph=True)
            return super().forward(x) + 0.1 * force

    model = Scored(Forcing)
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, y))
        engine.step()
    return weights(model)


@case(*PAIRS)
def gradient_taken_of_a_head_between_layers(side: Side) -> Found:
    """Forward takes the gradient of a bilinear energy with respect to the last block's output, and adds it to that."""

    class Forces(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = self.body(x)
            (force,) = torch.autograd.grad((x * x.roll(1, -1)).sum(), x, create_graph=True)
            return F.cross_entropy(self.head(x + 0.1 * force), labels)

    model = Forces()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, y))
        engine.step()
    return weights(model)


@case(*PAIRS)
def gradient_taken_partly_through_layers(side: Side) -> Found:
    """The same of an energy that holds the input itself and the logits, with respect to the input."""

    class Forces(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = x.requires_grad_()
            logits = super().forward(x)
            (force,) = torch.autograd.grad(logits.sum() + x.pow(2).sum(), x, retain_graph=True)
            return F.cross_entropy(logits + force.norm(), labels)

    model = Forces()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, y))
        engine.step()
    return weights(model)


@case(*PAIRS)
def optimizer_stepped_again_behind_the_step(side: Side) -> Found:
    """`engine.step()`, and then `optimizer.step()` with nothing gathered."""
    model = Scored()
    optimizer = sgd(model)
    engine = side.initialize(model, optimizer)
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, y))
        engine.step()
        if engine.micro_steps % side.accumulation == 0:
            optimizer.zero_grad()
            optimizer.step()
    return weights(model)
