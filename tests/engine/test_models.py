"""Models as people have them: with parameter groups and unused parameters, and asked to generate between steps."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.updater import Updater
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, train_groups
from tests.oracle import assert_same

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 3)


def test_unused_parameters_have_no_state_and_do_not_decay() -> None:
    one = family("UntouchedNet")
    model, before = one.build(0.0), dict(one.build(0.0).named_parameters())
    unused = [n for n in before if "ignored" in n or "unused" in n or n.startswith("blocks.2.")]
    with engine_for(model, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.9), config_of(2, 0.5)) as engine:
        train_groups(engine, groups_of(one, 2, 2))
        engine.finish_updates()
        assert len(engine.optimizer.state) == len(before) - len(unused)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in unused), name


def test_generate_leaves_training_unchanged_and_is_the_models_own() -> None:
    prompt = GROUPS[0][0]["input_ids"][:, :4]
    models = [LLAMA.build(0.1), LLAMA.build(0.1)]
    for model, generates in zip(models, (False, True), strict=True):
        with engine_for(model, adamw, config_of(3, 0.5, {"pack_layers": 1})) as engine:
            for group in GROUPS:
                engine.train_batch(iter(group))
                if generates:
                    engine.eval()
                    words = engine.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
                    expected = copy.deepcopy(model).generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
                    engine.train()
                    assert torch.equal(words, expected)
    assert_same(models[0], models[1], bitwise=True)


def test_an_evaluation_is_of_weights_that_the_step_before_has_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes until something waits for all of them."""
    waited, step, wait_all = threading.Event(), HostOptimizer.step, Updater.wait_all
    monkeypatch.setattr(HostOptimizer, "step", lambda *given: (waited.wait(60), step(*given)))
    with engine_for(LLAMA.build(0.0), adamw, config_of(3, 0.5, {"residency": "off"})) as engine:
        train_groups(engine, GROUPS[:1])
        monkeypatch.setattr(Updater, "wait_all", lambda updater: (waited.set(), wait_all(updater)))
        with torch.no_grad():
            seen = engine(**GROUPS[1][0]).loss
            engine.finish_updates()
            assert torch.equal(seen, engine(**GROUPS[1][0]).loss)
