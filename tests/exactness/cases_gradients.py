"""Gradients read and set where programs read and set them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import ALL, ONE, REGROUPED, Found, case
from tests.exactness.models import (
    WIDTH,
    Block,
    Net,
    adamw,
    batches,
    of_logits,
    own_loss,
    seen_after_steps,
    sgd,
    train,
    trained,
    weights,
)
from tests.exactness.sides import Side

# ---- hooks


@case(*ALL)
def parameter_hook(side: Side) -> Found:
    """`p.register_hook(lambda g: g * 2)` on a weight, a mask of rows on another's gradient, before initialize."""
    model = Net()
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])[:, None]
    model.head.weight.register_hook(lambda g: g * mask)
    model.blocks[1].linear.weight.register_hook(lambda g: g * 2)
    return trained(side, model, steps=3)


@case()
def parameter_hook_later(side: Side) -> Found:
    """`p.register_hook(...)` on every parameter after a step, which sums norms; removed after another step."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    train(engine, batches(side.accumulation))
    norms: list[Tensor] = []
    handles = [p.register_hook(lambda g: norms.append(g.norm())) for p in model.parameters()]
    train(engine, batches(side.accumulation, seed=2))
    for handle in handles:
        handle.remove()
    train(engine, batches(side.accumulation, seed=3))
    return {**weights(model), "norms": torch.stack(norms).sort().values}


@case(*ALL)
def post_accumulate_hook(side: Side) -> Found:
    """`p.register_post_accumulate_grad_hook(...)` that clips every gradient by value as it comes."""
    model = Net()

    def clip(p: Tensor) -> None:
        p.grad.clamp_(-0.01, 0.01)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clip)
    return trained(side, model, sgd, steps=3)


@case()
def full_backward_hook(side: Side) -> Found:
    """module.register_full_backward_hook doubles the gradient of one block's input."""
    model = Net()

    def double(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(g * 2 for g in inputs)

    model.blocks[1].register_full_backward_hook(double)
    return trained(side, model)


@case()
def gradient_of_logits(side: Side) -> Found:
    """`logits.retain_grad()`, and `logits.grad` is read after backward."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    seen = []
    for x, y in batches(2 * side.accumulation):
        logits = engine(x)
        logits.retain_grad()
        engine.backward(F.cross_entropy(logits, y))
        seen.append(logits.grad.clone())
        engine.step()
    return {**weights(model), "seen": torch.stack(seen)}


# ---- losses over parameters


@case(*ALL, tolerance=REGROUPED)
def penalty_outside(side: Side) -> Found:
    """`loss + 0.1 * sum(p.pow(2).sum() for p in engine.module.parameters())`, computed in the loop."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return of_logits(engine, x, labels) + 0.1 * sum(p.pow(2).sum() for p in engine.module.parameters())

    return trained(side, Net(), sgd, loss, steps=3)


@case(tolerance=REGROUPED)
def penalty_inside(side: Side) -> Found:
    """The model's own forward adds an L2 penalty over its parameters to the loss."""

    class Penalized(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            out = super().forward(x, labels)
            return out if labels is None else out + 0.01 * sum(p.pow(2).sum() for p in self.parameters())

    return trained(side, Penalized(), sgd, own_loss)


@case(*ALL)
def penalty_of_a_layer_without_gradients(side: Side) -> Found:
    """The first layers are called under torch.no_grad(); the loop adds a penalty on a weight of theirs to the loss."""

    class FirstFixed(Net):
        def body(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[0](self.front(x))
            for block in self.blocks[1:]:
                x = block(x)
            return x

    model = FirstFixed()

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return of_logits(engine, x, labels) + 0.1 * model.blocks[0].linear.weight.pow(2).sum()

    return trained(side, model, sgd, loss, steps=3)


@case(tolerance=REGROUPED)
def backward_of_a_penalty_alone(side: Side) -> Found:
    """`(0.01 * p.pow(2).sum()).backward()` for each parameter, beside engine.backward(loss)."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(F.cross_entropy(engine(x), y))
        for p in model.parameters():
            (0.01 * p.pow(2).sum()).backward()
        engine.step()
    return weights(model)


# ---- p.grad between backward and step


@case()
def gradients_read_within_a_group(side: Side) -> Found:
    """Norms of `p.grad` are logged after every micro-batch: the gradient so far."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    seen = []
    for x, y in batches(2 * side.accumulation):
        engine.backward(engine(x, labels=y))
        seen.append(torch.stack([p.grad.norm() for p in model.parameters()]))
        engine.step()
    return {**weights(model), "seen": torch.stack(seen)}


@case(*ALL)
def gradients_of_two_passes_read_within_a_group(side: Side) -> Found:
    """Norms of `p.grad` are logged after every micro-batch, whose loss is of two forwards, with dropout."""
    model = Net(lambda: Block(dropout=0.2))
    engine = side.initialize(model, adamw(model))
    seen = []
    for x, _ in batches(2 * side.accumulation):
        engine.backward((engine(x) * engine(-x)).mean())
        seen.append(torch.stack([p.grad.norm() for p in model.parameters()]))
        engine.step()
    return {**weights(model), "seen": torch.stack(seen)}


@case()
def gradients_gone_after_step(side: Side) -> Found:
    """`p.grad` is looked at after step: None, or zero."""
    model = Net()

    def look(_: Any) -> Tensor:
        return torch.tensor([0.0 if p.grad is None else float(p.grad.abs().sum()) for p in model.parameters()])

    return seen_after_steps(side, model, look, steps=2)


@case(*ALL)
def gradients_set(side: Side) -> Found:
    """`p.grad = torch.sign(p.grad)` for every parameter at each boundary."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(engine(x, labels=y))
        if engine.is_gradient_accumulation_boundary():
            for p in model.parameters():
                p.grad = torch.sign(p.grad)
        engine.step()
    return weights(model)


@case()
def gradients_set_to_none(side: Side) -> Found:
    """`p.grad = None` for one block at each boundary: it keeps its weights, without decay."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(engine(x, labels=y))
        if engine.is_gradient_accumulation_boundary():
            for p in model.blocks[1].parameters():
                p.grad = None
        engine.step()
    return weights(model)


@case(*ONE)
def gradients_without_backward(side: Side) -> Found:
    """`p.grad = ...` for every parameter and step(), with no backward at all (an evolution strategy)."""
    model = Net()
    optimizer = sgd(model)
    engine = side.initialize(model, optimizer)
    for step in range(3):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.01 * (i + step))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.module is model  # an engine that nobody keeps is gone
    return weights(model)


@case(*ALL)
def clipping_by_hand(side: Side) -> Found:
    """torch.nn.utils.clip_grad_norm_ between backward and step at each boundary."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    norms = []
    for x, y in batches(3 * side.accumulation):
        engine.backward(F.cross_entropy(engine(x), y))
        if engine.is_gradient_accumulation_boundary():
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        engine.step()
    return {**weights(model), "norms": torch.stack(norms)}


@case(*ALL)
def step_skipped_for_a_large_norm(side: Side) -> Found:
    """If the norm of all `p.grad` is large at a boundary, the loop calls zero_grad() first, so that nothing is trained."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        engine.backward(F.cross_entropy(engine(x * (100.0 if i == 2 else 1.0)), y))
        if engine.is_gradient_accumulation_boundary():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            if norm > 5.0:
                engine.zero_grad()
        engine.step()
    return weights(model)


# ---- backward by other means


@case(*ONE)
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


@case(*ONE)
def plain_loop_around_the_module(side: Side) -> Found:
    """A plain PyTorch loop over the model itself, as if there were no engine."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    for x, y in batches(6):
        model(x, labels=y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.module is model  # an engine that nobody keeps is gone
    return weights(model)


class Giving(Net):
    """Gives what it is asked for."""

    def forward(self, x: Tensor, gives: str = "loss") -> Any:  # type: ignore[override]
        hidden = self.body(x)
        logits = self.head(hidden)
        loss = logits.pow(2).mean()
        both = {"dict": {"loss": loss, "logits": logits}, "twice": (loss, loss), "tuple": (loss, logits, hidden)}
        return both.get(gives, loss)


def looked(loss: Tensor) -> Tensor:
    loss.item()
    return loss


def of_a_dictionary(engine: Any, x: Tensor) -> Tensor:
    outputs = engine(x, "dict")
    return looked(outputs["loss"]) + outputs["logits"].sum()


def of_a_tuple(engine: Any, x: Tensor) -> Tensor:
    loss, logits, hidden = engine(x, "tuple")
    return loss + logits.sum() * hidden.mean()


LOSSES: tuple[Callable[[Any, Tensor], Tensor], ...] = (
    lambda engine, x: engine(x),
    lambda engine, x: 3 * engine(x) + 1,
    lambda engine, x: looked(engine(x)),
    of_a_dictionary,
    of_a_tuple,
    lambda engine, x: engine(x, "twice")[1],
)


@case(*ALL)
def loss_backward_of_every_loss(side: Side) -> Found:
    """loss.backward() of the model's loss, of a scaled one, one looked at, two of several outputs, one given twice."""
    model = Giving()
    engine = side.initialize(model, adamw(model))
    for i, (x, _) in enumerate(batches(len(LOSSES) * side.accumulation)):
        LOSSES[i // side.accumulation](engine, x).backward()
        engine.step()
    return weights(model)


@case(*ALL)
def boundary_of_the_program(side: Side) -> Found:
    """The same with managed_gradient_accumulation=False and engine.step() once for each group."""
    model = Giving()
    engine = side.initialize(model, adamw(model), managed_gradient_accumulation=False)
    for i, (x, _) in enumerate(batches(len(LOSSES) * side.accumulation)):
        LOSSES[i // side.accumulation](engine, x).backward()
        if (i + 1) % side.accumulation == 0:
            engine.step()
    return weights(model)


@case()
def plain_accumulation_around_the_engine(side: Side) -> Found:
    """A plain PyTorch loop that divides the loss and counts to four itself."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer, accumulation=1)
    for i, (x, y) in enumerate(batches(8)):
        (F.cross_entropy(engine(x), y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@case(*ALL)
def optimizer_step_by_hand(side: Side) -> Found:
    """engine.backward, then optimizer.step() and engine.zero_grad() at each boundary, and no engine.step()."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        engine.backward(engine(x, labels=y))
        if (i + 1) % side.accumulation == 0:
            optimizer.step()
            engine.zero_grad()
    return weights(model)


@case(*ALL, tolerance=REGROUPED)
def loss_backward_from_several_calls(side: Side) -> Found:
    """One loss.backward() for the losses of a whole group, one of them looked at, beside engine.backward of another."""
    model = Net()
    engine = side.initialize(model, adamw(model), accumulation=4)
    for step in range(2):
        losses = [engine(x, labels=y) for x, y in batches(4)]
        engine.backward(losses.pop())
        losses[step].item()
        (losses[0] + 2 * losses[1] + losses[2]).backward()
        for _ in range(4):
            engine.step()
    return weights(model)


@case(*ALL)
def output_gradients_by_hand(side: Side) -> Found:
    """outputs.backward(gradient) with a gradient of the program's own, then engine.step()."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for x, _ in batches(2 * side.accumulation):
        outputs = engine(x)
        outputs.backward(0.1 * outputs.detach().tanh())
        engine.step()
    return weights(model)


@case(*ALL)
def loss_backward_through_a_head_outside(side: Side) -> Found:
    """loss.backward() through a head of the program's own, whose gradients nobody divides."""
    model, head = Net(), nn.Linear(5, 3, bias=False)
    nn.init.constant_(head.weight, 0.1)
    engine = side.initialize(model, adamw(model))
    seen = []
    for x, _ in batches(2 * side.accumulation):
        head(engine(x)).pow(2).mean().backward()
        engine.step()
        seen.append(head.weight.grad.clone())
        head.zero_grad()
    return {**weights(model), "of the head": torch.stack(seen)}


@case(tolerance=REGROUPED)
def module_backward_beside_the_engine(side: Side) -> Found:
    """A second loss by `model(x)` and backward() beside each micro-batch of the engine."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(F.cross_entropy(engine(x), y))
        model(-x).pow(2).mean().backward()
        engine.step()
    return weights(model)


@case()
def method_called_instead_of_forward(side: Side) -> Found:
    """`engine.module.body(x)`, a method of the model, gives the features that the loss is of."""
    return trained(side, Net(), sgd, lambda engine, x, _: engine.module.body(x).pow(2).mean())


# ---- zero_grad


@case()
def zero_grad_drops_what_is_queued(side: Side) -> Found:
    """zero_grad() of the engine, the optimizer and the model after the second micro-batch of a group, a group each."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    for one in (engine, optimizer, model):
        for i, (x, y) in enumerate(batches(side.accumulation)):
            loss = F.cross_entropy(engine(x), y) if one is optimizer else engine(x, labels=y)
            engine.backward(loss)
            if i == 1:
                one.zero_grad()
            engine.step()
    return weights(model)


@case()
def zero_grad_of_one_module(side: Side) -> Found:
    """`model.head.zero_grad()` after the second micro-batch of a group."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        engine.backward(engine(x, labels=y))
        if i % 4 == 1:
            model.head.zero_grad()
        engine.step()
    return weights(model)


@case(*ALL)
def zero_grad_before_every_group(side: Side) -> Found:
    """optimizer.zero_grad() at the start of each group, out of habit."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        if engine.micro_steps % side.accumulation == 0:
            engine.optimizer.zero_grad()
        return engine(x, labels)

    return trained(side, Net(), adamw, loss, steps=3)


@case(*ONE)
def zero_grad_between_forward_and_backward(side: Side) -> Found:
    """engine.zero_grad() between the forward and the backward, the order of PyTorch's tutorials."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss = engine(x, labels=labels)
        engine.zero_grad()
        return loss

    return trained(side, Net(), adamw, loss, steps=4)


# ---- graphs


@case(tolerance=REGROUPED)
def retain_graph(side: Side) -> Found:
    """Two losses of one forward, propagated one after the other: the first with retain_graph=True."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        logits = engine(x)
        engine.backward(F.cross_entropy(logits, y), retain_graph=True)
        engine.backward(0.1 * logits.pow(2).mean())
        engine.step()
    return weights(model)


@case(tolerance=REGROUPED)
def backward_twice(side: Side) -> Found:
    """The model's own loss is propagated twice, the first time with retain_graph=True."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        loss = engine(x, labels=y)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
    return weights(model)


@case()
def gradient_of_the_weights_by_autograd(side: Side) -> Found:
    """`torch.autograd.grad(loss, model.parameters())`, and the gradients are written to p.grad by hand."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        loss = F.cross_entropy(engine(x), y) / side.accumulation
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g if p.grad is None else p.grad + g
        engine.step()
    return weights(model)


@case(*ONE)
def backward_into_some_parameters(side: Side) -> Found:
    """`loss.backward(inputs=list(model.head.parameters()))`: only the head gets gradients."""
    model = Net()
    optimizer = sgd(model)
    engine = side.initialize(model, optimizer)
    for x, y in batches(3):
        own_loss(engine, x, y).backward(inputs=list(model.head.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case()
def gradient_of_an_input(side: Side) -> Found:
    """`x.requires_grad_()`, and `x.grad` is read after backward, from the first step on."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    seen = []
    for x, y in batches(2 * side.accumulation):
        x.requires_grad_(True)
        engine.backward(F.cross_entropy(engine(x), y))
        seen.append(x.grad.clone())
        engine.step()
    return {**weights(model), "seen": torch.stack(seen)}


@case(*ALL)
def trained_module_before(side: Side) -> Found:
    """A module before the engine, trained by an optimizer of its own, which is stepped after the engine."""
    model, front = Net(), nn.Linear(WIDTH, WIDTH)
    engine = side.initialize(model, adamw(model))
    optimizer = sgd(front)
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(front(x), labels=y))
        engine.step()
        if engine.micro_steps % side.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {**weights(model), **weights(front, "before ")}


@case()
def loss_without_a_graph(side: Side) -> Found:
    """A forward whose loss is only logged, never propagated, between micro-batches that are trained on."""
    seen = []

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        seen.append(engine(-x, labels).detach())
        return engine(x, labels)

    return {**trained(side, Net(), adamw, loss), "seen": torch.stack(seen)}


@case(*ONE)
def gradients_projected(side: Side) -> Found:
    """Two tasks' gradients by two backwards, the second projected off the first (PCGrad), by p.grad."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3):
        engine.backward(F.cross_entropy(engine(x), y))
        first = [p.grad.clone() for p in model.parameters()]
        engine.zero_grad()
        engine.backward(engine(x).pow(2).mean())
        for p, g in zip(model.parameters(), first, strict=True):
            overlap = (p.grad * g).sum() / g.pow(2).sum().clamp_min(1e-12)
            p.grad = p.grad - overlap.clamp_max(0.0) * g + g
        engine.step()
    return weights(model)


@case(*ONE)
def sharpness_aware_minimization(side: Side) -> Found:
    """SAM: weights are moved along the gradient, a second forward and backward, moved back, then the step."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3):
        engine.backward(F.cross_entropy(engine(x), y))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / norm for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        engine.zero_grad()
        engine.backward(F.cross_entropy(engine(x), y))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        engine.step()
    return weights(model)
