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
        engine(**GROUPS[0][0])
        engine.step()
        engine(**GROUPS[0][1])
        with pytest.warns(RuntimeWarning, match="updates nothing"):
            engine.step()
        engine.step()  # nor does one without a forward pass
        engine.step()
        assert engine.global_steps == 2
        assert_same(model, before, bitwise=True)
        assert engine.train_batch(iter(GROUPS[0])).item() > 0.0


def test_after_a_group_that_ends_early_comes_a_whole_one() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(4)) as engine:
        engine.train_batch(iter(GROUPS[0][:2]))
        for batch in GROUPS[1]:
            engine.backward(engine(**batch).loss)
            engine.step()
        assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (6, 2, True)


def test_train_batch_needs_an_optimizer_and_evaluation_none() -> None:
    with engine_for(LLAMA.build(0.0), None, config_of(1)) as engine:
        with torch.no_grad():
            assert engine(**GROUPS[0][0]).loss.item() > 0.0
        with pytest.raises(UsageError, match="must provide optimizer"):
            engine.train_batch(iter(GROUPS[0]))
