"""Checkpoints of the program's own, with operations after the layers in them: results are those of plain PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harmony_ds import ModelError
from harmony_ds.model.checkpointing import checkpoints_bypassed
from harmony_ds.utils import safe_get_full_grad, safe_get_local_grad
from tests.cover import pairs
from tests.engine.residual_net import ACCUMULATION, GROUPS, WIDTH, Net, assert_equals_plain, built, training
from tests.oracle import assert_same

Checkpoint = Callable[..., Any]
Block = Callable[[Tensor], Tensor]

AFTER: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "scaled": lambda block, x: block(x) * 2,
    "residual": lambda block, x: block(x) + x,
    "dropout": lambda block, x: F.dropout(block(x), 0.3),
    "between": lambda block, x: block(F.dropout(x.sin(), 0.3)).exp().tanh(),
}


class Checkpointed(Net):
    """Calls each of its blocks, and an operation after it, in a checkpoint."""

    def __init__(self, after: str, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.after = after
        self.checkpoint = checkpoint

    def run(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = self.checkpoint(lambda h, block=block: AFTER[self.after](block, h), x)
        return x


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if operation is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


WAYS: dict[str, Checkpoint] = {
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "other": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "context": lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=lambda: (nullcontext(), nullcontext())),
    "selective": lambda f, x: checkpoint(
        f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    ),
    "unchecked": lambda f, x: checkpoint(f, x, use_reentrant=False, determinism_check="none", early_stop=False),
}


@pytest.mark.parametrize(("after", "way", "pack"), pairs(AFTER, WAYS, [1, 2, 100]))
def test_operations_after_a_layer_in_a_checkpoint(after: str, way: str, pack: int) -> None:
    # A tensor that two operations take: the gradients are added up in another order.
    assert_equals_plain(lambda: Checkpointed(after, WAYS[way]), bitwise=after != "residual", pack_layers=pack)


def test_random_numbers_that_a_checkpoint_does_not_keep_are_those_of_the_forward_pass() -> None:
    """A recomputation of plain PyTorch's would draw others: the reference has no checkpoint."""
    plain = assert_equals_plain(lambda: Checkpointed("dropout", lambda f, x: f(x)))
    keeping_none = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with training(lambda: Checkpointed("dropout", keeping_none)) as (model, engine):
        for group in GROUPS:
            engine.train_batch(iter(group))
    assert_same(model, plain, bitwise=True)


class ChunkedLoss(Net):
    """Computes its loss in checkpointed chunks, of many values for each number: nothing in them is a layer."""

    def __init__(self, is_checkpointed: bool, way: str = "other") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.checkpoint = WAYS[way] if is_checkpointed else lambda function, x: function(x)
        self.runs = Counter[str]()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        made = self.head(self.run(x)) - y
        return {"loss": sum(self.checkpoint(self.chunk, part) for part in made.split(1, dim=1)) / WIDTH}

    def chunk(self, part: Tensor) -> Tensor:
        self.runs["chunk"] += 1
        many = (part * self.scale).expand(-1, 10_000) * torch.linspace(0, 1, 10_000, device=part.device)
        return F.dropout(many, 0.3).exp().sin().square().mean()


@pytest.mark.parametrize(("way", "pack"), pairs(["other", "context", "unchecked"], [1, 100]))
def test_checkpoints_between_layers_are_torchs_own(way: str, pack: int) -> None:
    assert_equals_plain(lambda: ChunkedLoss(True, way), bitwise=True, pack_layers=pack)
    with training(lambda: ChunkedLoss(True, way), pack_layers=pack) as (model, engine):
        engine.train_batch(iter(GROUPS[0]))
        model.runs.clear()
        engine.train_batch(iter(GROUPS[1]))
    assert model.runs["chunk"] == 2 * WIDTH * ACCUMULATION


def test_a_checkpoint_between_layers_saves_what_it_saves_in_plain_pytorch() -> None:
    peaks = []
    for is_checkpointed in (True, False):
        with training(partial(ChunkedLoss, is_checkpointed)) as (_, engine):
            for group in GROUPS:
                engine.train_batch(iter(group))
            report = engine.memory_report()
        assert report.device_peak_bytes == report.planned_peak_bytes
        peaks.append(report.device_peak_bytes)
    chunk_bytes = 2 * 10_000 * 4
    assert peaks[1] - peaks[0] > 3 * (WIDTH - 1) * chunk_bytes


class Wrapped(Net):
    """Functions of one code are checkpointed: some call layers, others call none."""

    def run(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, torch.sin):
            x = checkpoint(lambda h, block=block: block(h) * 2, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("pack", [1, 100])
def test_checkpoints_of_one_code_around_layers_and_between_them(pack: int) -> None:
    assert_equals_plain(Wrapped, bitwise=True, pack_layers=pack)


# ---- others' checkpoints


def deepspeeds(function: Block, x: Tensor) -> Any:
    return pytest.importorskip("deepspeed").checkpointing.checkpoint(function, x)


@pytest.mark.parametrize(("after", "pack"), pairs(AFTER, [1, 100]))
def test_deepspeeds_checkpoints(after: str, pack: int) -> None:
    assert_equals_plain(lambda: Checkpointed(after, deepspeeds), bitwise=after != "residual", pack_layers=pack)


def test_deepspeeds_checkpoints_elsewhere_are_unchanged() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    runs = []

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(1)
        return x.sin(), x.cos()

    class Two(Net):
        def run(self, x: Tensor) -> Tensor:
            a, b = deepspeed.checkpointing.checkpoint(two, super().run(x))
            return a * b

    assert_equals_plain(Two, bitwise=False)
    runs.clear()
    sum(deepspeed.checkpointing.checkpoint(two, torch.ones(2, requires_grad=True))).sum().backward()
    assert len(runs) == 2


def runs_of(way: str) -> int:
    """How often a checkpointed function runs, forward and back."""
    runs = []
    WAYS[way](lambda x: runs.append(1) or x.sin(), torch.ones(2, requires_grad=True)).sum().backward()
    return len(runs)


def test_torchs_checkpoints_are_torchs_own_until_an_engine_runs() -> None:
    asked = "c = ours.torch.utils.checkpoint"
    own = "getattr(c, ours._NON_REENTRANT).__module__ == c.__name__ and 'apply' not in vars(c.CheckpointFunction)"
    command = f"import harmony_ds.model.checkpointing as ours; {asked}; assert {own}"
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize("way", ["reentrant", "other"])
def test_torchs_checkpoints_pass_through_while_the_engine_runs_and_for_its_thread_alone(way: str) -> None:
    def beside() -> tuple[int, int]:
        without = runs_of(way)
        with checkpoints_bypassed():
            return without, runs_of(way)

    with ThreadPoolExecutor(1) as other, checkpoints_bypassed():
        assert other.submit(beside).result() == (2, 1)
        with checkpoints_bypassed():
            assert runs_of(way) == 1
        assert runs_of(way) == 1
    assert runs_of(way) == 2


class Recomputing(torch.autograd.Function):
    """A checkpoint of the program's own making."""

    @staticmethod
    def forward(ctx: Any, function: Block, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.function(x)
        torch.autograd.backward(made, gradient)
        return None, x.grad


@pytest.mark.parametrize("pack", [1, 100])
def test_unknown_checkpoints_are_refused_with_the_parameters_name(pack: int) -> None:
    with training(lambda: Checkpointed("scaled", Recomputing.apply), pack_layers=pack) as (model, engine):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(ModelError, match=r"blocks\.3\.\S+ was used outside the call of the layer"):
            engine.train_batch(iter(GROUPS[0]))
        assert_same(model, before, bitwise=True)


# ---- tiles


class Tiled(nn.Module):
    """A layer that DeepSpeed's TiledMLP takes through in tiles, and again, tile by tile, in the backward pass."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tiled = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
        made: Tensor = tiled.apply(Tiled.whole, self, x, 2, list(self.parameters()))
        return made

    def whole(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(x)))
        return made


class TiledNet(Net):
    def __init__(self) -> None:
        super().__init__(Tiled)
        self.entry = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.entry(x))


@pytest.mark.parametrize("pack", [1, 100])
def test_deepspeeds_tiles_as_layers(pack: int) -> None:
    assert_equals_plain(TiledNet, pack_layers=pack)


VALUES = 2000


def checkpointed_in_chunks(net: ChunkedHead, x: Tensor, classes: Tensor) -> Any:
    chunks = zip(x.chunk(4), classes.chunk(4), strict=True)
    return sum(checkpoint(net.loss_of, *chunk, use_reentrant=False) for chunk in chunks) / 4


def fused_by_deepspeed(net: ChunkedHead, x: Tensor, classes: Tensor) -> Any:
    fused = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss
    rows = x.unsqueeze(0), classes.unsqueeze(0)
    return fused.apply(ChunkedHead.loss_of, net, *rows, None, 4, [net.wide.weight], "mean")


def tiled_by_deepspeed(net: ChunkedHead, x: Tensor, classes: Tensor) -> Any:
    tiled = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp").sequence_tiled_compute
    rows = {"x": x.unsqueeze(0), "classes": classes.unsqueeze(0)}
    return tiled(net.loss_of, len(x), 4, rows, {}, "x", [net.wide.weight], output_unshard_dimension=0)


def fused_by_trl(net: ChunkedHead, x: Tensor, classes: Tensor) -> Any:
    fused = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    return -fused.apply(x, net.wide.weight, None, classes, 1.0, 4)[0].mean()


def whole_loss(net: ChunkedHead, x: Tensor, classes: Tensor) -> Any:
    return net.loss_of(x, classes)


class ChunkedHead(Net):
    """A loss of many values for each number, with the weights of a module that is not called."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, VALUES, bias=False)
        self.compute = compute

    def loss_of(self, x: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.wide.weight).view(-1, VALUES), classes.view(-1))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        many = self.head(self.run(x)).repeat(32, 1)
        return {"loss": self.compute(self, many, torch.arange(len(many), device=x.device))}


@pytest.mark.parametrize("compute", [checkpointed_in_chunks, fused_by_deepspeed, tiled_by_deepspeed, fused_by_trl])
def test_losses_in_chunks_save_what_they_save_in_plain_pytorch(compute: Callable[..., Any]) -> None:
    assert_equals_plain(lambda: ChunkedHead(compute), bitwise=True)
    peaks = []
    for one in (compute, whole_loss):
        with training(partial(ChunkedHead, one)) as (_, engine):
            for group in GROUPS:
                engine.train_batch(iter(group))
            report = engine.memory_report()
            assert engine.swap_report().ratio == 1.0
        assert report.device_peak_bytes == report.planned_peak_bytes
        peaks.append(report.device_peak_bytes)
    assert peaks[1] - peaks[0] > 2 * 32 * VALUES * 4


@pytest.mark.parametrize("make", [lambda: Checkpointed("scaled", WAYS["reentrant"]), TiledNet], ids=["plain", "tiles"])
def test_gradients_read_by_hand_are_those_of_plain_pytorch(make: Callable[[], nn.Module]) -> None:
    plain = built(make)
    with training(make) as (model, engine):
        for batch in GROUPS[0][:2]:
            engine.backward(engine(**batch)["loss"])
            (plain(**batch)["loss"] / ACCUMULATION).backward()
            for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                full, local = safe_get_full_grad(parameter), safe_get_local_grad(parameter)
                assert full is not None and local is not None and other.grad is not None
                assert torch.equal(full, other.grad), name
                assert torch.equal(local, other.grad.flatten()), name
