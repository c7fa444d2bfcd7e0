"""Graphs that are kept from forward to backward: the bits are those of recomputing, and nothing of them stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cover import spread
from tests.engine.drive import (
    adamw,
    assert_trains_like_plain,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    means_of,
    optimizer_for,
    plainly,
    train_groups,
)
from tests.engine.failing import Mishap, Trap, trapped_llama, unwrapped
from tests.graphs import graphs_in, keep_graphs
from tests.oracle import assert_same

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 3)
BUDGET = {"pack_layers": 1, "residency": "kept", "device_memory_gib": 1.0}
pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning"),
]


@pytest.mark.parametrize("keeps", [True, False])
def test_spare_memory_holds_graphs_unless_the_ds_config_says_no(keeps: bool) -> None:
    plain, losses = plainly(LLAMA, 0.1, GROUPS, adamw, 0.5)
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(3, 0.5, {**BUDGET, "keep_graphs": keeps})) as engine:
        assert train_groups(engine, GROUPS) == means_of(losses)
        assert graphs_in(engine.plan) == (15 if keeps else 0)
        assert ("15 graphs of 5 packs" in str(engine.plan_report())) == keeps
    assert_same(model, plain, bitwise=True)


WAYS = [((3,), True), ((1, 2), False), ((0, 3, 2), True)]


@pytest.mark.parametrize(
    ("name", "way"),
    spread(["llama", "t5", "resnet", "mixtral", "BatchNormNet", "InPlaceNet", "vit", "LayerDropNet"], WAYS),
    ids=str,
)
def test_losses_that_are_read_early_are_run_forward_without_a_graph(
    name: str, way: tuple[tuple[int, ...], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = family(name)
    counts, first = way
    keep_graphs(monkeypatch, counts)
    groups, make = groups_of(one, 2, 3), optimizer_for(one)
    plain, losses = plainly(one, 0.1, groups, make, 0.5)
    model = one.build(0.1)
    with engine_for(model, make, config_of(3, 0.5, {"pack_layers": 1, "stash": "host"})) as engine:
        actual = loop(engine, groups, lambda i: i == (0 if first else 1))
    assert_same(model, plain, one.bitwise)
    assert means_of(actual) == pytest.approx(means_of(losses), rel=0.0 if one.bitwise else 1e-6)


def test_generators_stand_in_backward_where_recomputing_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers drawn in a backward pass depend neither on the plan nor on what ran before."""
    models: list[nn.Module] = []
    groups = [[torch.randn(2, 8) for _ in range(3)] for _ in range(2)]
    for counts in ((0,), (3,), (1, 2)):
        with monkeypatch.context() as patched:
            keep_graphs(patched, counts)
            torch.manual_seed(0)
            models.append(nn.Sequential(*(Noisy() for _ in range(3))))
            with engine_for(models[-1], adamw, config_of(3, None, {"pack_layers": 1})) as engine:
                for group in groups:
                    engine.train_batch(group, loss_fn=lambda output: output.square().mean())
    assert_same(models[1], models[0], bitwise=True)
    assert_same(models[2], models[0], bitwise=True)


class _NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


class Noisy(nn.Module):
    """Draws a random number forward, and another one back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = _NoisyGradient.apply(nn.functional.dropout(self.linear(hidden), 0.1))
        return out


@pytest.mark.parametrize(("where", "at"), [("forward", 1), ("backward", 0), ("backward", 2)])
def test_a_failure_frees_the_graphs_and_the_step_can_be_taken_again(
    where: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_graphs(monkeypatch, (3, 2))
    plain, _ = plainly(LLAMA, 0.1, GROUPS, adamw, 0.5)
    trap, made = Trap(at), []
    model = trapped_llama(trap, where)
    note = model.model.layers[0].mlp.register_forward_hook(lambda *call: made.append(weakref.ref(call[-1])))
    with engine_for(model, adamw, config_of(3, 0.5, {"pack_layers": 1})) as engine:
        train_groups(engine, GROUPS[:1])
        made.clear()
        trap.arm()
        with pytest.raises(Mishap) as failure:
            engine.train_batch(iter(GROUPS[1]))
        failure.value.__traceback__ = None
        del failure
        gc.collect()
        assert made and not any(tensor() is not None for tensor in made)
        note.remove()
        train_groups(engine, GROUPS[1:])
    assert_same(unwrapped(model), dict(plain.named_parameters()) | dict(plain.named_buffers()), bitwise=True)


def test_micro_batches_that_pass_alone_keep_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without grouping: each micro-batch passes alone, and its gradients are added on the host."""
    keep_graphs(monkeypatch, (2,))
    assert_trains_like_plain(LLAMA, 0.1, GROUPS, config_of(3, 0.5, {"pack_layers": 1, "grouping": False}), adamw)
