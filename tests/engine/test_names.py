"""`engine.optimizer`: DeepSpeed's names around the optimizer that steps."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import harmony_ds
from harmony_ds import UnsupportedError
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, plainly, train_groups
from tests.oracle import assert_same

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 2)
CONFIG = config_of(2, 0.5)


def test_the_wrapper_passes_for_its_optimizer_and_attributes_go_there() -> None:
    model = LLAMA.build(0.0)
    mine = adamw(model.parameters())
    engine, optimizer, *_ = harmony_ds.initialize(model=model, optimizer=mine, config=CONFIG)
    try:
        assert optimizer is engine.optimizer
        assert optimizer.optimizer is engine.basic_optimizer is mine
        assert isinstance(optimizer, torch.optim.AdamW)
        assert optimizer == mine and mine == optimizer and optimizer != adamw(model.parameters())
        assert {optimizer: 1}[mine] == 1
        assert not hasattr(mine, "loss_scaler")
        assert not hasattr(optimizer, "clip_master_grads")
        optimizer.note = "mine"
        assert mine.note == "mine"  # type: ignore[attr-defined]
        del optimizer.note
        assert not hasattr(mine, "note")
        assert {"overflow", "get_lr", "param_groups", "clip_grad"} <= set(dir(optimizer))
    finally:
        engine.destroy()
    assert type(pickle.loads(pickle.dumps(optimizer))) is type(copy.deepcopy(optimizer)) is torch.optim.AdamW


def test_values_of_the_ds_config_cannot_be_set() -> None:
    with engine_for(LLAMA.build(0.0), adamw, CONFIG) as engine:
        for name in ("clip_grad", "cur_scale", "loss_scale", "overflow", "cpu_offload", "zenflow"):
            with pytest.raises(UnsupportedError, match=f"optimizer.{name} can be read and not be set"):
                setattr(engine.optimizer, name, 1.0)
        with pytest.raises(UnsupportedError, match=r"fp16\.loss_scale"):
            engine.optimizer.override_loss_scale(8.0)
        with pytest.raises(AttributeError, match=r"no 'bit16_groups'.*docs/compatibility\.md"):
            _ = engine.optimizer.bit16_groups


def test_a_schedule_over_the_wrapper_and_set_lr_train_as_over_the_optimizer() -> None:
    weights = []
    for wrapped in (True, False):
        model = LLAMA.build(0.0)
        with engine_for(model, adamw, CONFIG) as engine:
            over = engine.optimizer if wrapped else engine.optimizer.optimizer
            engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(over, step_size=1, gamma=0.5)
            train_groups(engine, GROUPS[:2])
            assert engine.optimizer.get_lr() == pytest.approx(engine.get_lr()[0])
            engine.optimizer.set_lr(1e-3)
            train_groups(engine, GROUPS[2:])
        weights.append(model)
    assert_same(weights[0], weights[1], bitwise=True)


def test_a_wrapper_that_is_kept_keeps_no_engine_and_goes_on_in_the_next() -> None:
    plain, _ = plainly(LLAMA, 0.0, GROUPS, adamw, 0.5)
    model = LLAMA.build(0.0)
    engine, optimizer, *_ = harmony_ds.initialize(model=model, optimizer=adamw(model.parameters()), config=CONFIG)
    train_groups(engine, GROUPS[:2])
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    engine, again, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=CONFIG)
    assert again.optimizer is optimizer.optimizer
    train_groups(engine, GROUPS[2:])
    engine.destroy()
    assert_same(model, plain, bitwise=True)
