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
    assert (before.accumulation_dtype == after.accumulation_dtype) == ablation.exact_on("cpu")
    assert CONFIG["harmony"] == {"device": "cpu", "seed": 5}
    assert (after.harmony.device, after.harmony.seed) == ("cpu", 5)


def test_everything_is_all_switches_that_do_not_round() -> None:
    everything = ABLATIONS[-1]
    switches = [a.harmony for a in ABLATIONS[:-1] if a.exact_on("cpu") and not a.device and "stash" not in a.harmony]

    assert everything.harmony == {key: value for harmony in switches for key, value in harmony.items()}


def test_what_makes_no_difference_is_told() -> None:
    by_name = {ablation.name: ablation for ablation in ABLATIONS}
    fp32 = {"bf16": {"enabled": False}}

    assert by_name["grouping"].applies_to({}, "cpu")
    assert by_name["bf16-gradients"].applies_to(CONFIG, "cpu")
    assert not by_name["bf16-gradients"].applies_to(fp32, "cuda")
    assert not by_name["bf16-gradients"].applies_to({}, "cuda")
    assert by_name["pinned-memory"].applies_to(fp32, "cuda")
    assert not by_name["pinned-memory"].applies_to(fp32, "cpu")


def test_only_a_dtype_and_updates_on_an_accelerator_change_bits() -> None:
    inexact = {device: {a.name for a in ABLATIONS if not a.exact_on(device)} for device in ("cpu", "cuda")}

    assert inexact == {"cpu": {"bf16-gradients"}, "cuda": {"bf16-gradients", "residency", "everything"}}
