"""Code of the program that runs inside torch: hooks, modes, steps put on an optimizer, compiled modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.exactness.case import ALL, ONE, PAIRS, REGROUPED, Found, case
from tests.exactness.models import Net, adamw, batches, own_loss, sgd, trained, weights
from tests.exactness.sides import Setting, Side, Stay

# ---- optimizers


def body_and_head(model: Net) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return torch.optim.SGD(body, lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.05)


@case(*ALL, tolerance=REGROUPED)
def second_optimizer_less_often(side: Side) -> Found:
    """A plain loop with two optimizers, the engine's over the body; that of the head is stepped at every second step."""
    model = Net()
    optimizer, other = body_and_head(model)
    engine = side.initialize(model, optimizer, clipping=0.0)
    for i, (x, y) in enumerate(batches(4 * side.accumulation)):
        engine(x, y).backward()
        if (i + 1) % side.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        if (i + 1) % (2 * side.accumulation) == 0:
            other.step()
            other.zero_grad()
    return weights(model)


@case(*ALL)
def gradients_zeroed_in_every_way(side: Side) -> Found:
    """A plain loop drops gradients in turn by `p.grad.zero_()`, `p.grad = None`, `zero_grad(set_to_none=False)`, ..."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer, clipping=0.0)
    ways: list[Callable[[], Any]] = [
        lambda: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
        lambda: [p.grad.detach_().zero_() for p in model.parameters()],
        lambda: [p.grad.data.zero_() for p in model.parameters()],
        lambda: [setattr(p, "grad", None) for p in model.parameters()],
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: model.zero_grad(set_to_none=False),
        model.zero_grad,
    ]
    for zero in ways:
        for x, y in batches(side.accumulation):
            engine(x, y).backward()
        optimizer.step()
        zero()
    return weights(model)


class Branches(Net):
    def forward(self, x: Tensor, branch: int) -> Tensor:  # type: ignore[override]
        return self.head(self.blocks[branch](x)).square().mean()


@case(*ONE)
def gradients_zeroed_in_place_of_branches(side: Side) -> Found:
    """A plain loop takes branches in turn and zeroes in place: a gradient of zeros decays its weight, and none does not."""
    model = Branches()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    for step, branch in enumerate((0, 0, 1, 0)):
        optimizer.zero_grad(set_to_none=False)
        engine(batches(1, seed=step)[0][0], branch).backward()
        if step == 1:
            model.blocks[branch].linear.bias.grad = None
        optimizer.step()
    return weights(model)


class Remembering(torch.optim.SGD):
    """Keeps the momentum of each parameter in a dictionary of its own."""

    elementwise = True  # says that its update of an element needs that element alone

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.momentum: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            momentum = self.momentum.setdefault(p, torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.1)


@case(*PAIRS)
def plain_loop_in_bf16(side: Side) -> Found:
    """A plain loop with bf16 weights: engine.backward(loss), optimizer.step(), optimizer.zero_grad()."""
    return by_plain_loop_in_bf16(side, sgd)


@case(Setting(4, 0.0), Setting(4, 1.0, Stay.GRAPHS))
def momenta_by_parameter_in_bf16(side: Side) -> Found:
    """The same with an optimizer of the user's own, which keeps momenta in a dictionary by parameter."""
    return by_plain_loop_in_bf16(side, Remembering)


def by_plain_loop_in_bf16(side: Side, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Found:
    model = Net()
    optimizer = make(model)
    engine = side.initialize(model, optimizer, clipping=0.0, bf16={"enabled": True})
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        engine.backward(engine(x.bfloat16(), y))
        if (i + 1) % side.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def clamping(optimizer: torch.optim.Optimizer, model: nn.Module, counts: list[int]) -> None:
    """Put a step on `optimizer` that clamps the weights after the one that was there."""
    below = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = below(*args, **kwargs)
        counts.append(1)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
        return result

    optimizer.step = step  # type: ignore[method-assign]


@case(*ALL)
def step_put_on_the_optimizer_before(side: Side) -> Found:
    """`optimizer.step = step` before initialize, where `step` calls the old one and clamps weights."""
    model, counts = Net(), []
    optimizer = sgd(model)
    clamping(optimizer, model, counts)
    return {**trained(side, model, lambda _: optimizer, own_loss, steps=3), "counts": len(counts)}


class Lookahead(torch.optim.Optimizer):
    """An optimizer written by hand around another optimizer, without `super().__init__`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        if self.steps % 2:
            return
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                q.add_(p - q, alpha=0.5)
                p.copy_(q)


@case(*ONE)
def optimizer_around_another(side: Side) -> Found:
    """A Lookahead around AdamW, a torch.optim.Optimizer that does not call `super().__init__`; a plain loop."""
    model = Net()
    base = adamw(model)
    inner = Lookahead(base)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # which the plain side asks for
        if type(side).__name__ == "PlainSide":
            setattr(inner, hooks, OrderedDict())
    engine = side.initialize(model, inner, clipping=0.0)
    for x, y in batches(5):
        inner.zero_grad()
        engine(x, y).backward()
        inner.step()
    return weights(model)


# ---- compiled


@case(*PAIRS)
def scripted_block(side: Side) -> Found:
    """torch.jit.script of a linear layer inside a block."""
    model = Net()
    model.blocks[1].linear = torch.jit.script(model.blocks[1].linear)
    return trained(side, model, sgd, own_loss, steps=1)
