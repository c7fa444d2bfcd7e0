"""The engine's answers about its settings: its own batch sizes and rank, and DeepSpeed's getters."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import pytest
import torch

from harmony_ds import HarmonyEngine
from harmony_ds.config import load_config
from harmony_ds.config.deepspeed_getters import ANSWERED_BY_DEEPSPEED, DEEPSPEED_NAMES
from harmony_ds.config.engine_settings import EngineSettings

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_prefetch_bucket_size": 7},
    "amp": {"enabled": False},  # DeepSpeed would refuse the block
    "harmony": {"device": "cpu", "unknown_keys": "warn"},
    "from_elsewhere": 1,
}
BROKEN_IN_DEEPSPEED = {"compile_zero_optimization_stage", "swap_tensor_config"}


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(load_config({**CONFIG, **more}))


def test_the_data_parallel_rank_is_the_process_s_own() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1}, 2)
    assert EngineSettings(config).get_data_parallel_rank() == 0
    assert EngineSettings(config, 1, 2).get_data_parallel_rank() == 1


def test_the_name_of_the_programs_own_optimizer_comes_first_as_in_deepspeed() -> None:
    ours = settings()
    ours.client_optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)

    assert ours.optimizer_name() == "SGD"


def test_deepspeeds_view_follows_a_changed_batch_size() -> None:
    ours = settings()
    before = ours._config
    assert ours._config is before

    ours.set_train_batch_size(8)
    assert (ours._config.train_batch_size, ours._config.gradient_accumulation_steps) == (8, 4)


def test_every_getter_answers() -> None:
    ours = settings()
    for name in DEEPSPEED_NAMES - BROKEN_IN_DEEPSPEED:
        answer = getattr(ours, name)
        if callable(answer):
            answer()


def test_other_names_are_no_attributes() -> None:
    there = {"zero_optimization", "fp16_enabled", "steps_per_print", "zero_use_cpu_optimizer"}
    assert there <= DEEPSPEED_NAMES
    assert not {"forward", "step", "save_checkpoint", "allreduce_bucket"} & DEEPSPEED_NAMES
    with pytest.raises(AttributeError, match="no_such_getter"):
        _ = settings().no_such_getter


def test_every_getter_of_deepspeeds_that_reads_its_config_alone_is_in_the_table() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = vars(EngineSettings).keys() | vars(HarmonyEngine).keys()
    for name, getter in vars(DeepSpeedEngine).items():
        if isfunction(getter) and getter.__code__.co_argcount == 1 and "_config" in getter.__code__.co_names:
            assert name in ANSWERED_BY_DEEPSPEED or name in own or name.startswith("_"), name
