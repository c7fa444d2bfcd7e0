"""Ends of a group, and warnings of the engine within it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from harmony_ds import BatchError, UsageError
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, sgd, weights_of
from tests.oracle import assert_same

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 4)


def test_train_batch_refuses_to_drop_queued_micro_batches() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(4)) as engine:
        engine.backward(engine(**GROUPS[0][0]).loss)
        with pytest.raises(BatchError, match=r"still queued \(1\)"):
            engine.train_batch(iter(GROUPS[0]))


def test_an_iterator_may_yield_one_buffer_again_and_again() -> None:
    group = [GROUPS[0][place] for place in (0, 3)]  # of one length
    buffers = {key: value.clone() for key, value in group[0].items()}

    def again() -> Iterator[dict[str, Tensor]]:
        for batch in group:
            for key, value in batch.items():
                buffers[key].copy_(value)
            yield buffers

    losses = []
    for batches in (iter(group), again()):
        with engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine:
            losses.append(engine.train_batch(batches).item())
    assert losses[0] == losses[1]


def test_a_step_without_any_backward_changes_nothing() -> None:
    model = LLAMA.build(0.0)
    before = weights_of(model)
    with engine_for(model, adamw, config_of(2)) as engine:
        for batch in GROUPS[0]:
            engine(**batch)
            engine.step()
        engine.step()  # nor does one without a forward pass
        engine.step()
        assert engine.global_steps == 3
        assert_same(model, before, bitwise=True)
        assert engine.train_batch(iter(GROUPS[0])).item() > 0.0


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
        engine.train_batch(iter(GROUPS[0][:2]))  # ends early: the next group is a whole one
        for batch in GROUPS[1]:
            engine.backward(engine(**batch).loss)
            engine.step()
        assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (14, 4, True)


def test_backward_and_step_need_an_optimizer() -> None:
    with engine_for(LLAMA.build(0.0), None, config_of(1)) as engine:
        assert engine.optimizer is None
        with torch.no_grad():
            assert engine(**GROUPS[0][0]).loss.item() > 0.0
        with pytest.raises(UsageError, match="must provide optimizer"):
            engine.train_batch(iter(GROUPS[0]))
        with pytest.raises(UsageError, match="must provide optimizer"):
            engine.step()
