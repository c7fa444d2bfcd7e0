"""The table of keys: complete and right against the DeepSpeed that is installed, and docs/config.md made from it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DtypeEnum, HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from harmony_ds.config import load_config
from harmony_ds.config.forms import DTYPES
from harmony_ds.config.key import Effect
from harmony_ds.config.keys import BLOCKS, BY_PATH, KEYS, names_in
from harmony_ds.config.optimizers import NOT_RUN
from tests.docs.config_tables import tables, with_tables

DOCS = Path(__file__).parents[2] / "docs" / "config.md"
MODELS = {
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}
OPEN_MODELS = {"comms_logger": CommsLoggerConfig, "compile": CompileConfig, "hybrid_engine": HybridEngineConfig}


class Recording(dict[str, Any]):
    """Notes the keys that somebody asks for. Copies note into the same set."""

    asked: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return KeysOf(self)


class KeysOf:
    def __init__(self, owner: Recording) -> None:
        self.owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self.owner

    def __iter__(self) -> Any:
        return dict.__iter__(self.owner)


def test_the_table_has_every_key_that_deepspeed_asks_for_and_no_other() -> None:
    Recording.asked = set()
    DeepSpeedConfig(Recording(train_batch_size=1))
    asked = Recording.asked - {"sequence_parallel_size", "bfloat16", "allgather_size"}
    listed = names_in("") - {"harmony", "bfloat16"}
    not_parsed_there = {"data_parallel_size", "sequence_parallel_size"}  # read in deepspeed.initialize

    assert asked >= {"train_batch_size", "fp16", "zero_optimization", "wall_clock_breakdown", "aio"}
    assert asked == listed - not_parsed_there


def fields_of(model: Any) -> dict[str, Any]:
    found = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=False)
        for known in {name, field.alias or name}:
            found[known] = default.value if isinstance(default, Enum) else default
    return found


@pytest.mark.parametrize("block", MODELS)
def test_a_block_has_the_names_and_defaults_of_deepspeeds_model(block: str) -> None:
    fields = fields_of(MODELS[block])
    older = {key.path.split(".")[-1] for key in KEYS if key.older and key.path.startswith(block + ".")}

    assert names_in(block) - older == fields.keys()
    for name, default in fields.items():
        key = BY_PATH.get(f"{block}.{name}")
        if key is not None and not key.open:
            assert key.default == default, key.path


@pytest.mark.parametrize("block", OPEN_MODELS)
def test_the_switch_of_an_open_block_is_one_of_its_keys(block: str) -> None:
    key = BY_PATH[block]
    if key.effect is Effect.REFUSED:
        assert fields_of(OPEN_MODELS[block])[key.switch[0]] == key.switch[1]


def test_defaults_of_the_keys_at_the_top_are_deepspeeds() -> None:
    theirs, ours = DeepSpeedConfig({"train_batch_size": 1}), load_config({"train_batch_size": 1}).values
    same = (
        "gradient_clipping steps_per_print wall_clock_breakdown memory_breakdown dump_state prescale_gradients "
        "gradient_predivide_factor gradient_allreduce_op communication_data_type managed_gradient_accumulation "
        "dataloader_drop_last log_level disable_allgather disable_python_gc zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer"
    ).split()
    for name in same:
        assert ours[name] == getattr(theirs, name), name
    for name in ("partition_activations", "cpu_checkpointing", "number_checkpoints", "profile"):
        theirs_there = getattr(theirs.activation_checkpointing_config, name)
        assert ours[f"activation_checkpointing.{name}"] == theirs_there
    assert ours["checkpoint.load_universal"] == theirs.load_universal_checkpoint
    assert ours["zero_optimization.overlap_comm"] == theirs.zero_config.overlap_comm
    assert ours["data_types.keep_in_fp32_modules"] == theirs.keep_in_fp32_modules


def test_values_are_read_as_deepspeed_reads_them() -> None:
    source: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": "true", "loss_scale": "64", "min_loss_scale": 2.0},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e8,
            "stage3_max_reuse_distance": "100",
            "cpu_offload": True,
        },
        "csv_monitor": {"enabled": "yes", "job_name": "x"},
    }
    theirs, ours = DeepSpeedConfig(dict(source)), load_config(source)

    assert (ours.micro_batch, ours.gradient_accumulation_steps) == (2, theirs.gradient_accumulation_steps)
    assert ours.gradient_clipping == theirs.gradient_clipping
    blocks = {
        "fp16": theirs.float16_config,
        "csv_monitor": theirs.monitor_config.csv_monitor,
        "zero_optimization": theirs.zero_config,
        "zero_optimization.offload_optimizer": theirs.zero_config.offload_optimizer,
    }
    for block, model in blocks.items():
        for name in type(model).model_fields:
            value = getattr(model, name, None)
            if f"{block}.{name}" in ours.values and name not in ("leaf_module", "cpu_offload"):
                assert ours.values[f"{block}.{name}"] == value, (block, name)


def test_names_of_dtypes_are_deepspeeds() -> None:
    known = {str(name): one.name for one in DtypeEnum for name in one._all_values[1:] if one.name != "int8"}

    assert known == DTYPES


def test_optimizers_that_are_not_run_are_deepspeeds() -> None:
    assert set(DEEPSPEED_OPTIMIZERS) - NOT_RUN.keys() == {"adam", "adamw", "adagrad", "lion"}


def test_every_key_is_listed_once_and_explained() -> None:
    assert len(BY_PATH) == len(KEYS)
    assert not BLOCKS & BY_PATH.keys()
    for key in KEYS:
        assert key.note or key.effect is Effect.SAME, key.path


def test_the_table_in_the_docs_is_up_to_date() -> None:
    text = DOCS.read_text(encoding="utf-8")

    assert with_tables(text) == text, "python -m tests.docs.config_tables"
    made = "".join(tables().values())
    assert all(f"| `{key.path.removeprefix('harmony.')}` |" in made for key in KEYS)
