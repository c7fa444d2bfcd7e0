"""Loops: orders of calls to engines, and other models trained beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import ALL, ONE, PAIRS, REGROUPED, Found, Tolerance, case
from tests.exactness.models import (
    CLASSES,
    WIDTH,
    Block,
    Net,
    adamw,
    batches,
    evaluated,
    of_logits,
    own_loss,
    seen_after_steps,
    sgd,
    train,
    trained,
    weights,
)
from tests.exactness.sides import Setting, Side, Stay

# ---- ways to hand micro-batches over


@case(*ALL)
def train_batch_of_dicts(side: Side) -> Found:
    """engine.train_batch(iterator of dicts), the loss among the outputs."""
    return by_train_batch(side, 3 * side.accumulation)


def by_train_batch(side: Side, micro_batches: int) -> Found:
    model = Net(lambda: Block(dropout=0.2))
    engine = side.initialize(model, adamw(model))
    loader = iter([{"x": x, "labels": y} for x, y in batches(micro_batches)])
    losses = [engine.train_batch(loader) for _ in range(3)]
    return {**weights(model), "losses": torch.stack(losses)}


@case(*ALL)
def train_batch_with_a_loss_function(side: Side) -> Found:
    """engine.train_batch(iterator, loss_fn): the loss is computed from the logits, with dropout in the loss too."""
    model = Net(lambda: Block(dropout=0.2))
    engine = side.initialize(model, adamw(model))
    loader = iter([(x,) for x, _ in batches(3 * side.accumulation)])
    losses = [engine.train_batch(loader, loss_fn=lambda z: F.dropout(z).pow(2).mean()) for _ in range(3)]
    return {**weights(model), "losses": torch.stack(losses)}


@case()
def ragged_last_group(side: Side) -> Found:
    """The data end in the middle of a group: train_batch takes the step over what there is."""
    return by_train_batch(side, 2 * side.accumulation + 1)


@case()
def loop_that_ends_within_a_group(side: Side) -> Found:
    """The data end in the middle of a group, and the loop just ends."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for x, y in batches(side.accumulation + 2):
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case()
def train_batch_and_loop_in_turn(side: Side) -> Found:
    """Steps by train_batch and by the familiar loop in turn."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for step in range(4):
        micro_batches = batches(side.accumulation, seed=step)
        if step % 2:
            engine.train_batch(iter(micro_batches))
        else:
            train(engine, micro_batches)
    return weights(model)


@case()
def loss_weighted(side: Side) -> Found:
    """Losses are weighted by a tensor, a number and the count of labels."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss = engine(x, labels) * torch.tensor(0.5) + 1.0
        return loss * (engine.micro_steps + 1) / labels.numel()

    return trained(side, Net(), adamw, loss)


@case(*ALL)
def distance_of_two_passes(side: Side) -> Found:
    """A Siamese loss: `F.mse_loss(engine(x), engine(-x))`, of a model with dropout."""
    return trained(
        side, Net(lambda: Block(dropout=0.2)), loss_of=lambda engine, x, _: F.mse_loss(engine(x), engine(-x))
    )


@case(*PAIRS, tolerance=REGROUPED)
def distance_of_two_passes_and_an_evaluation(side: Side) -> Found:
    """Two passes with BatchNorm; the loss is not kept, and after each micro-batch the model is evaluated."""
    model = Net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))
    engine = side.initialize(model, sgd(model))

    def propagate(x: Tensor) -> None:
        # Of x and -x, or of two rows, the normalized values would be alike but for their signs, and gradients of biases
        # nothing but rounding.
        engine.backward(F.mse_loss(engine(x), engine(x * x)))

    for x, _ in batches(2 * side.accumulation, rows=4):
        propagate(x)
        engine.eval()
        with torch.no_grad():
            engine(x)
        engine.train()
        engine.step()
    return {**weights(model), **{name: own.clone() for name, own in model.named_buffers()}}


@case(*ALL)
def triplets_of_three_passes(side: Side) -> Found:
    """`F.triplet_margin_loss(engine(a), engine(b), engine(c))`."""

    def loss_of(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.triplet_margin_loss(engine(x), engine(x + 0.1), engine(-x))

    return trained(side, Net(), loss_of=loss_of)


@case(*ALL)
def one_batch_twice_with_dropout(side: Side) -> Found:
    """R-Drop: a batch goes through the model twice, with dropout; the loss has the divergence of both outputs."""

    def loss_of(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        first, second = (engine(x).log_softmax(-1) for _ in range(2))
        return F.nll_loss(first, labels) + F.nll_loss(second, labels) + F.kl_div(first, second.exp())

    return trained(side, Net(lambda: Block(dropout=0.2)), loss_of=loss_of)


@case(*PAIRS, tolerance=REGROUPED)
def memory_bank_of_outputs(side: Side) -> Found:
    """The loop keeps outputs, detached, which the losses of later micro-batches are made with (XBM)."""
    bank: list[Tensor] = []

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = engine(x)
        loss = F.cross_entropy(logits, labels)
        if bank:
            loss = loss + (logits * torch.stack(bank[-3:]).mean(0)).sum()
        bank.append(logits.detach())
        return loss

    return trained(side, Net(), sgd, loss, steps=3)


@case(tolerance=REGROUPED)
def losses_summed_before_one_backward(side: Side) -> Found:
    """Two losses of the model are summed before one backward."""
    return trained(side, Net(), sgd, lambda engine, x, y: engine(x, labels=y) + 0.5 * engine(-x, labels=y))


@case(tolerance=REGROUPED)
def forwards_before_backwards(side: Side) -> Found:
    """All four forwards of a group first, then their backwards in reverse order, then four steps."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for step in range(2):
        losses = [F.cross_entropy(engine(x), y) for x, y in batches(side.accumulation, seed=step)]
        for loss in reversed(losses):
            engine.backward(loss)
        for _ in losses:
            engine.step()
    return weights(model)


@case()
def micro_batch_without_backward(side: Side) -> Found:
    """Micro-batches of a group with a large loss get no backward; the group ends all the same."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        loss = engine(x, labels=y)
        if i % 3:
            engine.backward(loss)
        engine.step()
    return weights(model)


@case()
def steps_without_scaling(side: Side) -> Found:
    """engine.backward(loss, scale_wrt_gas=False): losses are summed, not averaged."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        engine.backward(0.1 * engine(x, labels=y), scale_wrt_gas=False)
        engine.step()
    return weights(model)


# ---- several forwards of one model


@case(*PAIRS, tolerance=REGROUPED)
def contrastive(side: Side) -> Found:
    """Two views of a batch through the model, and a loss over the similarity of their features."""

    def loss(engine: Any, x: Tensor, _: Tensor) -> Tensor:
        first, second = engine(x), engine(x + 0.1)
        similarity = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
        return F.cross_entropy(similarity * 5, torch.arange(4))

    return trained(side, Net(lambda: Block(dropout=0.2)), sgd, loss, rows=4)


@case(*PAIRS, tolerance=REGROUPED)
def stop_gradient_branch(side: Side) -> Found:
    """SimSiam: one of two forwards is detached."""

    def loss(engine: Any, x: Tensor, _: Tensor) -> Tensor:
        target = engine(x).detach()
        return -F.cosine_similarity(engine(x + 0.1), target).mean()

    return trained(side, Net(), sgd, loss)


@case(*PAIRS)
def target_without_gradients(side: Side) -> Found:
    """The target is a forward of the engine under torch.no_grad(), right before the one that is trained."""
    return towards_a_target(side, torch.no_grad)


@case(*PAIRS)
def inference_mode(side: Side) -> Found:
    """The same under torch.inference_mode()."""
    return towards_a_target(side, torch.inference_mode)


def towards_a_target(side: Side, mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Found:
    def loss(engine: Any, x: Tensor, _: Tensor) -> Tensor:
        with mode():
            target = engine(x + 0.1)
        return F.mse_loss(engine(x), target.clone() + 0.1)

    return trained(side, Net(), sgd, loss)


@case(*PAIRS, tolerance=Tolerance(3e-6, "sums are regrouped, and a small bias's cancel"))
def output_fed_back_in_with_its_graph(side: Side) -> Found:
    """The output of a first forward is part of the input of the second, with gradients through both."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return of_logits(engine, x + F.pad(engine(x), (0, WIDTH - CLASSES)), labels)

    return trained(side, Net(), sgd, loss)


# ---- several models


class Generator(Net):
    """From noise to something like data."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


@case(*ALL, tolerance=REGROUPED)
def adversarial_networks_with_a_frozen_one(side: Side) -> Found:
    """A GAN of two engines, the discriminator frozen by requires_grad_(False) while the generator is trained."""
    generator, discriminator = Generator(), Net()
    g, d = side.initialize(generator, sgd(generator)), side.initialize(discriminator, sgd(discriminator))
    for x, _ in batches(2 * side.accumulation):
        discriminator.requires_grad_(True)
        with torch.no_grad():
            fake = g(-x)
        d.backward(F.softplus(-d(x)).mean() + F.softplus(d(fake)).mean())
        d.step()
        discriminator.requires_grad_(False)
        g.backward(F.softplus(-d(g(-x))).mean())
        g.step()
    return {**weights(generator, "g "), **weights(discriminator, "d ")}


@case(*ONE, tolerance=REGROUPED)
def adversarial_networks_without_freezing(side: Side) -> Found:
    """The generator's loss leaves gradients in the discriminator, which zero_grad() drops; one forward for both."""
    generator, discriminator = Generator(), Net()
    g, d = side.initialize(generator, sgd(generator)), side.initialize(discriminator, sgd(discriminator))
    for x, _ in batches(4):
        d.zero_grad()
        fake = g(-x)
        d.backward(F.softplus(-d(x)).mean() + F.softplus(d(fake.detach())).mean())
        d.step()
        g.backward(F.softplus(-d(fake)).mean())
        g.step()
    d.zero_grad()
    return {**weights(generator, "g "), **weights(discriminator, "d ")}


@case(*PAIRS)
def engine_after_an_engine(side: Side) -> Found:
    """An encoder and a decoder with an engine each; one loss trains both."""
    encoder, decoder = Generator(), Net()
    e, d = side.initialize(encoder, sgd(encoder)), side.initialize(decoder, sgd(decoder))
    for x, y in batches(2 * side.accumulation):
        loss = F.cross_entropy(d(e(x)), y)
        d.backward(loss)
        d.step()
        e.step()
    return {**weights(encoder, "e "), **weights(decoder, "d ")}


@case(tolerance=REGROUPED)
def engines_around_a_frozen_one(side: Side) -> Found:
    """A prompt's engine, a frozen model's, and a head's: gradients go through the frozen one, which has no optimizer."""
    prompt, between, last = Generator(), Generator().requires_grad_(False), Net()
    p, b, e = (
        side.initialize(one, sgd(one)) if one is not between else side.initialize(one, None)
        for one in (prompt, between, last)
    )
    for x, y in batches(2 * side.accumulation):
        e.backward(F.cross_entropy(e(b(p(x))), y))
        p.step()
        e.step()
    return {**weights(prompt, "p "), **weights(last, "e ")}


@case(tolerance=REGROUPED)
def module_before_a_frozen_engine(side: Side) -> Found:
    """A prompt that no engine has is trained through a frozen one, by one pass, and by two that meet in a loss."""
    prompt, frozen = nn.Linear(WIDTH, WIDTH), Net().requires_grad_(False)
    engine, optimizer = side.initialize(frozen, None), sgd(prompt)
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        if i % 2:
            (engine(prompt(x)) - engine(prompt(-x))).pow(2).mean().backward()
        else:
            F.cross_entropy(engine(prompt(x)), y).backward()
        if (i + 1) % side.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(prompt)


@case(*PAIRS)
def policy_and_reference(side: Side) -> Found:
    """A frozen reference (an engine without an optimizer) is called with gradients on, before the policy."""
    reference = side.initialize(Net().requires_grad_(False), None)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        old = reference(x).log_softmax(-1)
        ratio = (engine(x).log_softmax(-1) - old.detach()).gather(1, labels[:, None])
        return -F.logsigmoid(ratio).mean()

    return trained(side, Net(), sgd, loss)


@case(*PAIRS)
def engines_that_share_a_module(side: Side) -> Found:
    """Two models with one body in common, an engine and an optimizer each."""
    first, second = Net(), Net()
    second.blocks = first.blocks
    a, b = side.initialize(first, sgd(first)), side.initialize(second, sgd(second))
    train(a, batches(2 * side.accumulation))
    train(b, batches(2 * side.accumulation))
    return {**weights(first, "a "), **weights(second, "b ")}


class Student(Net):
    """Calls `teach`, of another model, on what its blocks give; its logits are to be like the result."""

    def __init__(self, teach: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.teach = teach

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.body(x)
        return (self.head(x) - self.teach(x)).square().mean()


@case(*PAIRS, tolerance=REGROUPED)
def teacher_in_forward(side: Side) -> Found:
    """A model's forward calls, with gradients, the frozen and deeper model of another engine."""
    teacher = Net(depth=6).requires_grad_(False)
    engine = side.initialize(teacher, None)
    return trained(side, Student(engine.module.forward), sgd, own_loss)


# ---- evaluation


@case(*ALL)
def evaluation_between_steps(side: Side) -> Found:
    """`model.eval()`, a forward under no_grad, `model.train()` after each step; BatchNorm and dropout."""
    model = Net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)))

    def look(engine: Any) -> Tensor:
        model.eval()
        seen = evaluated(engine)
        model.train()
        return seen

    return seen_after_steps(side, model, look, rows=4)


@case(*PAIRS)
def evaluation_of_the_module(side: Side) -> Found:
    """`model(x)` itself, not the engine, under no_grad after each step."""
    model = Net()
    return seen_after_steps(side, model, lambda _: evaluated(model))


@case(*PAIRS)
def evaluation_with_gradients_on(side: Side) -> Found:
    """An evaluation after each step that forgets torch.no_grad(): `engine(x).argmax(-1)`."""

    def look(engine: Any) -> Tensor:
        engine.eval()
        seen = engine(batches(1)[0][0]).argmax(-1)
        engine.train()
        return seen

    return seen_after_steps(side, Net(), look)


@case(*PAIRS)
def evaluation_by_eval_batch(side: Side) -> Found:
    """engine.eval_batch after each step."""
    model = Net(lambda: Block(dropout=0.2))
    return seen_after_steps(side, model, lambda engine: engine.eval_batch(iter(batches(side.accumulation, seed=9))))


@case(*PAIRS)
def one_block_called_by_itself(side: Side) -> Found:
    """`model.blocks[1](x)` under no_grad after each step."""
    model = Net()
    return seen_after_steps(side, model, lambda _: evaluated(model.blocks[1]))


@case(*PAIRS)
def one_block_called_by_itself_within_a_group(side: Side) -> Found:
    """`model.front(x)` under no_grad between two micro-batches of a group, to log features."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    seen = []
    for x, y in batches(2 * side.accumulation):
        engine.backward(engine(x, labels=y))
        with torch.no_grad():
            seen.append(model.front(x))
        engine.step()
    return {**weights(model), "seen": torch.stack(seen)}


@case(*PAIRS)
def input_gradient_in_evaluation(side: Side) -> Found:
    """A saliency map after each step: the gradient of a logit with respect to the input."""
    model = Net()

    def look(_: Any) -> Tensor:
        x = batches(1)[0][0].requires_grad_(True)
        (saliency,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
        return saliency

    return seen_after_steps(side, model, look, steps=2)


# ---- failures


class Failing(Net):
    fail = False

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.front(x))
        if bool(x.isnan().any()) or self.fail:
            raise FloatingPointError("not a number")
        return self.blocks[2](self.blocks[1](x))


@case()
def exception_in_a_forward(side: Side) -> Found:
    """The model raises for one micro-batch of bad data; the loop looks at losses, catches it, and steps as usual."""
    model = Failing()
    train_past_bad_data(side, model, lambda loss: loss.item())
    return weights(model)


def train_past_bad_data(
    side: Side,
    model: Net,
    looked: Callable[[Tensor], object] = lambda loss: None,
    loss_of: Callable[..., Tensor] = of_logits,
) -> None:
    """`looked` is shown each loss."""
    engine = side.initialize(model, adamw(model))
    micro_batches = batches(2 * side.accumulation + 1)
    micro_batches[1][0].fill_(float("nan"))
    for x, y in micro_batches:
        with contextlib.suppress(FloatingPointError):
            loss = loss_of(engine, x, y)
            looked(loss)
            engine.backward(loss)
            engine.step()


class Refusing(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()))

    def body(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise FloatingPointError("not a number")
        return super().body(x)


@case()
def exception_in_forwards_in_order(side: Side) -> Found:
    """Bad data of a model with BatchNorm, whose forward passes run in the order of their calls; each loss is printed."""
    model = Refusing()
    train_past_bad_data(side, model, lambda loss: print(loss.item()))
    return {**weights(model), **{name: own.clone() for name, own in model.named_buffers()}}


class Greedy(Net):
    def body(self, x: Tensor) -> Tensor:
        if len(x) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return super().body(x)


@case()
def micro_batch_split_where_memory_ran_out(side: Side) -> Found:
    """The loop splits a micro-batch in two where the model raises torch.OutOfMemoryError."""
    # The halves are tensors of their own, as the engine's are: kernels are chosen by the alignment of what they read.
    model = Greedy()
    engine = side.initialize(model, adamw(model))
    micro_batches = batches(4 * side.accumulation)
    micro_batches[5] = batches(1, rows=6, seed=2)[0]
    parts = [*micro_batches]
    while parts:
        x, y = parts.pop(0)
        try:
            loss = F.cross_entropy(engine(x), y)
        except torch.OutOfMemoryError:
            parts[:0] = [(x[half].clone(), y[half].clone()) for half in (slice(3), slice(3, None))]
            continue
        engine.backward(loss)
        engine.step()
    return weights(model)


@case(*ONE)
def exception_in_a_whole_group(side: Side) -> Found:
    """Bad data in steps of one micro-batch, whose loss is the model's: it may raise as late as in step()."""
    model = Failing()
    train_past_bad_data(side, model, loss_of=own_loss)
    return weights(model)


@case(*ONE)
def exception_between_forward_and_backward(side: Side) -> Found:
    """The loop's own code raises between forward and backward; the next iteration begins with zero_grad()."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(4)):
        engine.zero_grad()
        with contextlib.suppress(KeyError):
            loss = engine(x, labels=y)
            if i == 1:
                raise KeyError("a metric")
            engine.backward(loss)
            engine.step()
    return weights(model)


@case(Setting(1, 1.0, Stay.RESIDENT), Setting(1, 1.0))
def exception_in_a_backward(side: Side) -> Found:
    """A custom autograd.Function raises in backward once, with clipping; the loop calls zero_grad() and goes on."""
    fail = [False, True, False, False]

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if fail[0]:
                raise ArithmeticError("in backward")
            return g

    class RaisingBlock(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Raising.apply(super().forward(x))

    model = Net(RaisingBlock)
    engine = side.initialize(model, adamw(model))
    for x, y in batches(4):
        try:
            engine.backward(F.cross_entropy(engine(x), y))
            engine.step()
        except ArithmeticError:
            engine.zero_grad()
        fail.append(fail.pop(0))
    return weights(model)
