"""How the tests of this folder build an engine on the CPU device, drive it, and compare it with the oracle."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds import HarmonyEngine
from harmony_ds.runtime.lane import Lane
from tests.families import FAMILIES, MODULES, Batch, Family
from tests.oracle import assert_same, loss_in, train_plainly

SEED = 5
WHOLE = 100  # more layer calls than any family makes: one pack
Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[Any], Optimizer]
Groups = list[list[Batch]]
EVERY_FAMILY = FAMILIES + MODULES


def seed_of(step: int, position: int) -> int:
    return harmony_ds.micro_batch_seed(SEED, step, position)


def family(name: str) -> Family:
    return next(f for f in EVERY_FAMILY if f.name == name)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def small_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def optimizer_for(one: Family) -> MakeOptimizer:
    """AdamW where the bits must agree; else one that does not blow rounding up."""
    if one.bitwise:
        return adamw
    return small_sgd if one.name == "gemma4" else sgd


def config_of(accumulation: int, clip: float | None = None, harmony: dict[str, Any] | None = None, **more: Any) -> Any:
    """A ds_config on the CPU device; `harmony` and `more` are added to its two levels."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip or 0.0,
        "harmony": {"device": "cpu", "seed": SEED, **(harmony or {})},
        **more,
    }


@contextmanager
def engine_for(model: nn.Module, optimizer: Any, config: dict[str, Any], **arguments: Any) -> Iterator[HarmonyEngine]:
    """An engine over `model`, destroyed at the end. `optimizer`: from parameters to an optimizer, or None."""
    made = None if optimizer is None else optimizer(model.parameters())
    engine, *_ = harmony_ds.initialize(model=model, optimizer=made, config=config, **arguments)
    try:
        yield engine
    finally:
        engine.destroy()


def random_rows(seed: int, *shape: int) -> Tensor:
    """Return a tensor of random numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def groups_of(one: Family, steps: int, accumulation: int) -> Groups:
    return [[one.batch(step * accumulation + i) for i in range(accumulation)] for step in range(steps)]


def train_groups(engine: HarmonyEngine, groups: Iterable[Sequence[Batch]]) -> list[float]:
    """One `train_batch` for each group; the mean losses."""
    return [engine.train_batch(iter(group)).item() for group in groups]


def loop(engine: HarmonyEngine, groups: Groups, look: Callable[[int], bool] = lambda i: False) -> list[list[float]]:
    """The familiar loop. `look(i)` tells after which micro-batches of a group the loss is looked at."""
    losses: list[list[float]] = []
    for group in groups:
        row = []
        for i, batch in enumerate(group):
            loss = loss_in(engine(**batch))
            if look(i):
                loss.item()
            engine.backward(loss)
            engine.step()
            row.append(loss)
        losses.append([loss.item() for loss in row])
    return losses


LossOf = Callable[[Any, Any], Tensor]
"""Makes a loss of a model or an engine, and a batch."""


def loop_plainly(
    model: nn.Module,
    batches: Sequence[Any],
    accumulation: int,
    loss_of: LossOf,
    make: MakeOptimizer = sgd,
    seeded: bool = False,
    clip: float = 0.0,
) -> list[float]:
    """Train with a loss of the program's own in plain PyTorch; return the losses.

    Args:
        seeded: each micro-batch draws random numbers from its own seed, as it does on an engine.
    """
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for number, batch in enumerate(batches):
        if seeded:
            torch.manual_seed(seed_of(number // accumulation, number % accumulation))
        loss = loss_of(model, batch)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (number + 1) % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def loop_with(
    engine: HarmonyEngine, batches: Sequence[Any], loss_of: LossOf, by_hand: bool = False
) -> tuple[list[float], list[float]]:
    """Train likewise on an engine; return the losses, and for each step the ratio of its swaps to the least possible.

    Args:
        by_hand: call `loss.backward()` in the place of `engine.backward(loss)`.
    """
    losses, ratios = [], []
    for batch in batches:
        loss = loss_of(engine, batch)
        if by_hand:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if engine.was_step_applied():
            ratios.append(engine.swap_report().ratio)
    return [loss.item() for loss in losses], ratios


def squares(call: Any, x: Tensor) -> Tensor:
    """The loss of a model whose outputs are to be zero."""
    loss: Tensor = call(x).square().mean()
    return loss


def means_of(losses: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each group, in the arithmetic of the losses."""
    return [torch.tensor(group).mean().item() for group in losses]


def plain_model(one: Family, dropout: float) -> nn.Module:
    """The model to train plainly. A key-value cache changes the strides of GPT-2's and OPT's attention dropout."""
    model = one.build(dropout)
    if one.name in ("gpt2", "opt") and dropout:
        model.config.use_cache = False
    return model


def plainly(
    one: Family, dropout: float, groups: Groups, make: MakeOptimizer, clip: float | None = None, **options: Any
) -> tuple[nn.Module, list[list[float]]]:
    """The oracle's model after `groups`, and its losses."""
    model = plain_model(one, dropout)
    return model, train_plainly(model, groups, make(model.parameters()), clip=clip, seed_of=seed_of, **options)


def same_losses(actual: Sequence[float], expected: Sequence[float], bitwise: bool) -> bool:
    if bitwise:
        return list(actual) == list(expected)
    return all(abs(a - e) <= 1e-6 * abs(e) for a, e in zip(actual, expected, strict=True))


def assert_trains_like_plain(
    one: Family, dropout: float, groups: Groups, config: dict[str, Any], make: MakeOptimizer
) -> None:
    """The engine's losses and weights after `groups` are the oracle's."""
    plain, losses = plainly(one, dropout, groups, make, config["gradient_clipping"] or None)
    model = one.build(dropout)
    with engine_for(model, make, config) as engine:
        actual = train_groups(engine, groups)
    assert_same(model, plain, one.bitwise)
    assert same_losses(actual, means_of(losses), one.bitwise), (actual, means_of(losses))


def lanes() -> list[Lane]:
    """Forward passes of micro-batches that have begun and are still alive."""
    return [one for one in gc.get_objects() if type(one) is Lane and not one.finished]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
