"""What a group is made of: boundaries, iterators, several forwards in one loss, and what the engine says meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds import BatchError, OptimizerError
from tests.engine.drive import (
    Groups,
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    means_of,
    plainly,
    seed_of,
    sgd,
    train_groups,
    weights_of,
)
from tests.oracle import assert_same, train_plainly

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 4)
PairLoss = Callable[[Callable[..., Any], dict[str, Tensor], dict[str, Tensor]], Tensor]


# ---- two forwards in one loss


def summed(forward: Callable[..., Any], left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
    return forward(**left).loss + 0.5 * forward(**right).loss


def contrastive(forward: Callable[..., Any], left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
    points = [forward(**batch).logits.mean(dim=1) for batch in (left, right)]
    one, other = (F.normalize(p, dim=-1) for p in points)
    return F.cross_entropy(one @ other.T * 3.0, torch.arange(one.shape[0]))


def preference(forward: Callable[..., Any], left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
    """As DPO: how much more the policy prefers `left` to `right` than a frozen look at itself does."""
    with torch.no_grad():
        reference = forward(**left).loss - forward(**right).loss
    policy = forward(**left).loss - forward(**right).loss
    return -F.logsigmoid(reference - 2.0 * policy)


def train_pairs_plainly(loss_of: PairLoss, pairs: Groups) -> tuple[nn.Module, list[float]]:
    model = LLAMA.build(0.0)
    optimizer = sgd(model.parameters())
    losses = []
    for group in pairs:
        for left, right in zip(group[::2], group[1::2], strict=True):
            loss = loss_of(model, left, right)
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@pytest.mark.parametrize("loss_of", [summed, contrastive, preference])
def test_two_forwards_in_one_loss(loss_of: PairLoss) -> None:
    plain, losses = train_pairs_plainly(loss_of, GROUPS)
    model = LLAMA.build(0.0)
    actual = []
    with warnings.catch_warnings(), engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        warnings.simplefilter("ignore", RuntimeWarning)  # a loss over two forwards is looked at
        for group in GROUPS:
            for left, right in zip(group[::2], group[1::2], strict=True):
                loss = loss_of(engine, left, right)
                engine.backward(loss)
                engine.step()
                actual.append(loss.item())
        assert engine.global_steps == 3
    assert actual == pytest.approx(losses, rel=1e-6)
    assert_same(model, plain, bitwise=False)


def test_two_backwards_over_one_forward() -> None:
    reference = LLAMA.build(0.0)
    losses = train_plainly(
        reference, GROUPS, sgd(reference.parameters()), clip=None, seed_of=seed_of, loss_of=lambda out: 1.5 * out.loss
    )
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, config_of(4)) as engine:
        for group, row in zip(GROUPS, losses, strict=True):
            for batch in group:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.backward(0.5 * loss)
                engine.step()
            assert 1.5 * loss.item() == pytest.approx(row[-1], rel=1e-6)
    assert_same(model, reference, bitwise=False)


# ---- boundaries and iterators


def test_a_partial_last_group_by_set_gradient_accumulation_boundary() -> None:
    reference = LLAMA.build(0.1)
    groups = [GROUPS[0], GROUPS[1][:2]]
    optimizer = adamw(reference.parameters())
    for step, group in enumerate(groups):
        for i, batch in enumerate(group):
            torch.manual_seed(seed_of(step, i))
            (reference(**batch).loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(4)) as engine:
        for group in groups:
            for i, batch in enumerate(group):
                engine.set_gradient_accumulation_boundary(i == len(group) - 1)
                assert engine.is_gradient_accumulation_boundary() is (i == len(group) - 1)
                engine.backward(engine(**batch).loss)
                engine.step()
                assert engine.was_step_applied() is (i == len(group) - 1)
    assert_same(model, reference, bitwise=True)


def test_train_batch_takes_the_mean_over_what_a_short_iterator_gave() -> None:
    groups = [GROUPS[0], GROUPS[1][:3]]
    plain, losses = plainly(LLAMA, 0.1, groups, adamw, 0.5)
    model = LLAMA.build(0.1)
    batches = iter([*groups[0], *groups[1]])
    with engine_for(model, adamw, config_of(4, 0.5)) as engine:
        assert [engine.train_batch(batches).item() for _ in groups] == means_of(losses)
        assert engine.micro_steps == 7
        with pytest.raises(StopIteration):
            engine.train_batch(batches)
        assert engine.global_steps == 2
    assert_same(model, plain, bitwise=True)


def test_train_batch_with_the_users_loss_function() -> None:
    def loss_of(outputs: Any) -> Tensor:
        return outputs.logits.float().logsumexp(-1).mean()

    reference = LLAMA.build(0.1)
    losses = train_plainly(
        reference, GROUPS, adamw(reference.parameters()), clip=None, seed_of=seed_of, loss_of=loss_of
    )
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(4)) as engine:
        assert [engine.train_batch(iter(g), loss_fn=loss_of).item() for g in GROUPS] == means_of(losses)
    assert_same(model, reference, bitwise=True)


def test_train_batch_takes_tuples_and_bare_tensors() -> None:
    one = family("BareParameterNet")
    groups = groups_of(one, 2, 2)
    plain, losses = plainly(one, 0.1, groups, adamw)
    model = one.build(0.1)
    with engine_for(model, adamw, config_of(2)) as engine:
        tuples = [[(batch["inputs"], batch["targets"]) for batch in group] for group in groups]
        assert [engine.train_batch(iter(group)).item() for group in tuples] == means_of(losses)
    assert_same(model, plain, bitwise=True)


def test_train_batch_refuses_to_drop_queued_micro_batches() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(4)) as engine:
        engine.backward(engine(**GROUPS[0][0]).loss)
        with pytest.raises(BatchError, match="1 micro-batches"):
            engine.train_batch(iter(GROUPS[0]))


def test_the_loop_and_train_batch_may_take_turns() -> None:
    plain, _ = plainly(LLAMA, 0.1, GROUPS, adamw, 0.5)
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(4, 0.5)) as engine:
        loop(engine, GROUPS[:1])
        train_groups(engine, GROUPS[1:2])
        loop(engine, GROUPS[2:])
    assert_same(model, plain, bitwise=True)


def test_backward_wants_a_scalar() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine:
        outputs = engine(**{k: v for k, v in GROUPS[0][0].items() if k != "labels"})
        with pytest.raises(BatchError, match="scalar"):
            engine.backward(outputs.logits)
        with pytest.raises(BatchError, match="scalar"):
            engine.backward(1.0)  # type: ignore[arg-type]


def test_a_step_without_any_backward_changes_nothing() -> None:
    model = LLAMA.build(0.0)
    before = weights_of(model)
    with engine_for(model, adamw, config_of(2)) as engine:
        for batch in GROUPS[0]:
            engine(**batch)
            engine.step()
        assert engine.global_steps == 2
    assert_same(model, before, bitwise=True)


def test_a_step_with_no_forward_at_all() -> None:
    with engine_for(LLAMA.build(0.0), adamw, config_of(1)) as engine:
        engine.step()
        assert engine.global_steps == 1
        assert engine.train_batch(iter(GROUPS[0])).item() > 0.0


# ---- what the engine says


def test_counters_follow_the_boundary() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(4)) as engine:
        seen = []
        for batch in [*GROUPS[0], *GROUPS[1]]:
            boundary = engine.is_gradient_accumulation_boundary()
            engine.backward(engine(**batch).loss)
            engine.step()
            seen.append((engine.micro_steps, engine.global_steps, engine.global_samples, engine.was_step_applied()))
            assert engine.was_step_applied() is boundary
        assert seen == [
            (1, 0, 0, False), (2, 0, 0, False), (3, 0, 0, False), (4, 1, 8, True),
            (5, 1, 8, False), (6, 1, 8, False), (7, 1, 8, False), (8, 2, 16, True),
        ]  # fmt: skip
        assert (engine.skipped_steps, engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (0, 8, 2)
        assert engine.gradient_accumulation_steps() == 4
        assert engine.get_lr() == [0.01]


def test_unknown_attributes_are_the_models() -> None:
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, config_of(1)) as engine:
        assert engine.model is model.model
        assert engine.get_input_embeddings() is model.model.embed_tokens
        assert engine.module is model
        with pytest.raises(AttributeError):
            engine.no_such_thing  # noqa: B018
        engine.eval()
        assert not model.training
        engine.train()
        assert model.training
        assert {n for n, _ in engine.module.named_parameters()} == {n for n, _ in LLAMA.build(0.0).named_parameters()}


def test_backward_and_step_need_an_optimizer() -> None:
    with engine_for(LLAMA.build(0.0), None, config_of(1)) as engine:
        assert engine.optimizer is None
        with torch.no_grad():
            assert engine(**GROUPS[0][0]).loss.item() > 0.0
        with pytest.raises(OptimizerError, match="must provide optimizer"):
            engine.train_batch(iter(GROUPS[0]))
        with pytest.raises(OptimizerError, match="must provide optimizer"):
            engine.step()


# ---- learning rates


def warmup(optimizer: Any) -> Any:
    return WarmupLR(optimizer, warmup_min_lr=0.001, warmup_max_lr=0.02, warmup_num_steps=3, warmup_type="linear")


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 3, "warmup_type": "linear"},
}


@pytest.mark.parametrize(
    ("make", "arguments", "more", "clip"),
    [
        (warmup, {}, {"scheduler": WARMUP}, None),
        (warmup, {"lr_scheduler": warmup}, {}, 0.5),
        (halving, {"lr_scheduler": halving}, {}, None),
    ],
    ids=["ds_config", "client's DeepSpeed", "client's torch"],
)
def test_learning_rate_schedules(make: Any, arguments: Any, more: Any, clip: float | None) -> None:
    reference = LLAMA.build(0.0)
    optimizer = adamw(reference.parameters())
    scheduler = make(optimizer)
    train_plainly(reference, GROUPS, optimizer, clip=clip, seed_of=seed_of, scheduler=scheduler)
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(4, clip, **more), **arguments) as engine:
        train_groups(engine, GROUPS)
        assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
        assert engine.lr_scheduler is not None
    assert_same(model, reference, bitwise=True)
