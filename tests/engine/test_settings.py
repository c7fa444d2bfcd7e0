"""Answers of the engine about its own settings."""

from __future__ import annotations

from harmony_ds.config import load_config
from harmony_ds.engine.settings import Settings
from harmony_ds.parallel import SingleProcess


class SecondOfTwo(SingleProcess):
    rank, size = 1, 2


def test_the_data_parallel_rank_is_the_process_s_own() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1}, 2)
    assert Settings(config, SingleProcess()).get_data_parallel_rank() == 0
    assert Settings(config, SecondOfTwo()).get_data_parallel_rank() == 1
