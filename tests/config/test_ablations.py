"""The list of mechanisms that can be switched off."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harmony_ds.config import HarmonySettings, load_config
from harmony_ds.config.ablations import ABLATIONS, Ablation

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "harmony": {"device": "cpu", "seed": 5},
}


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda ablation: ablation.name)
def test_each_one_changes_a_valid_config_and_nothing_but_its_own_keys(ablation: Ablation) -> None:
    before, after = load_config(CONFIG), load_config(ablation.applied(CONFIG))
    changed = {
        field.name
        for field in dataclasses.fields(HarmonySettings)
        if getattr(before.harmony, field.name) != getattr(after.harmony, field.name)
    }

    assert changed == set(ablation.harmony)
    assert CONFIG["harmony"] == {"device": "cpu", "seed": 5}
    assert (after.harmony.device, after.harmony.seed) == ("cpu", 5)


def test_everything_is_all_switches_together() -> None:
    switches = [one.harmony for one in ABLATIONS[:-1] if not one.device and "stash" not in one.harmony]

    assert ABLATIONS[-1].harmony == {key: value for harmony in switches for key, value in harmony.items()}


def test_only_updates_on_an_accelerator_change_bits() -> None:
    assert all(("residency" in one.harmony) == one.rounds_on_cuda for one in ABLATIONS)
