"""The engine's answers about its settings: its own batch sizes and rank, and DeepSpeed's getters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harmony_ds.config import load_config
from harmony_ds.distributed import SingleProcess
from harmony_ds.engine.settings import Settings, deepspeed_names

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


class SecondOfTwo(SingleProcess):
    rank, size = 1, 2


def settings(**more: Any) -> Settings:
    return Settings(load_config({**CONFIG, **more}), SingleProcess())


def test_the_data_parallel_rank_is_the_process_s_own() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1}, 2)
    assert Settings(config, SingleProcess()).get_data_parallel_rank() == 0
    assert Settings(config, SecondOfTwo()).get_data_parallel_rank() == 1


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
    for name in deepspeed_names().keys() - BROKEN_IN_DEEPSPEED:
        answer = getattr(ours, name)
        if callable(answer):
            answer()


def test_other_names_are_no_attributes() -> None:
    there = {"zero_optimization", "fp16_enabled", "steps_per_print", "zero_use_cpu_optimizer"}
    assert there <= deepspeed_names().keys()
    assert not {"forward", "step", "save_checkpoint", "allreduce_bucket"} & deepspeed_names().keys()
    with pytest.raises(AttributeError, match="no_such_getter"):
        _ = settings().no_such_getter
