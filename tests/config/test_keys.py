"""The keys of a ds_config against the DeepSpeed that is installed, and docs/config.md made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DtypeEnum, HybridEngineConfig

from harmony_ds.config import load_config
from harmony_ds.config.check import ds_config_type, paths_of
from harmony_ds.config.harmony import HARMONY_KEYS
from harmony_ds.config.keys import RULES, rule_of
from harmony_ds.config.optimizers import NOT_RUN
from tests.docs.config_tables import all_keys, tables, with_tables

DOCS = Path(__file__).parents[2] / "docs" / "config.md"
PATHS = set(paths_of(ds_config_type()))
TOP = {path.split(".")[0] for path in PATHS}
REFUSED = {path for path, rule in RULES.items() if rule.effect == "refused"}


class Recording(dict[str, Any]):
    """A dict that notes the keys that are read. Copies note into the same set."""

    read: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
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


def test_every_key_that_deepspeed_reads_is_known_and_no_other() -> None:
    Recording.read = set()
    DeepSpeedConfig(Recording(train_batch_size=1))
    not_parsed_there = {"data_parallel_size", "sequence_parallel_size"}  # read in deepspeed.initialize
    known = TOP | {path for path in REFUSED if "." not in path}

    assert Recording.read >= {"train_batch_size", "fp16", "zero_optimization", "wall_clock_breakdown", "aio"}
    assert Recording.read - not_parsed_there - {"bfloat16", "allgather_size"} == known - not_parsed_there - {
        "harmony",
        "bfloat16",
    }


def test_every_rule_is_about_a_key_that_deepspeed_has_or_had() -> None:
    older = {path for path in REFUSED if "." not in path or path.split(".")[1].startswith(("mics", "zeropp"))}
    known = {".".join(path.split(".")[:depth]) for path in PATHS for depth in range(1, 5)}

    assert RULES.keys() - older <= known


@pytest.mark.parametrize(
    ("block", "model"), [("compile", CompileConfig), ("hybrid_engine", HybridEngineConfig)], ids=str
)
def test_the_switch_of_a_refused_block_is_one_of_its_keys(block: str, model: Any) -> None:
    name, default = RULES[block].switch
    assert model.model_fields[name].default == default
    assert "enabled" in CommsLoggerConfig.model_fields


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
    for block, config in (("activation_checkpointing", "activation_checkpointing_config"), ("timers.throughput", "")):
        names = [path.rpartition(".")[2] for path in PATHS if path.startswith(f"{block}.")]
        for name in names:
            assert ours[f"{block}.{name}"] == getattr(getattr(theirs, config or "timers_config"), name)
    assert ours["checkpoint.load_universal"] == theirs.load_universal_checkpoint
    assert ours["checkpoint.tag_validation"] == theirs.checkpoint_config["tag_validation"].upper()
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
        "zero_optimization.offload_optimizer": theirs.zero_config.offload_optimizer,
        "zero_optimization": theirs.zero_config,
    }
    for block, model in blocks.items():
        for name in model.model_dump():
            if f"{block}.{name}" in ours.values:
                assert ours.values[f"{block}.{name}"] == getattr(model, name), (block, name)
    assert ours.values["zero_optimization.max_reuse_distance"] == 100


def test_a_rule_holds_for_all_names_of_a_key_and_all_keys_of_a_block() -> None:
    assert rule_of("zero_optimization.stage3_max_live_parameters") is RULES["zero_optimization.max_live_parameters"]
    assert rule_of("bfloat16.immediate_grad_update") is RULES["bf16.immediate_grad_update"]
    assert rule_of("aio.block_size") is RULES["aio"]
    assert rule_of("flops_profiler.profile_step") is not rule_of("flops_profiler.detailed")
    assert rule_of("fp16.enabled") is None


def test_names_of_dtypes_are_deepspeeds() -> None:
    from harmony_ds.config import model

    theirs = {name for one in DtypeEnum for name in one._all_values[1:] if one.name != "int8"}
    assert theirs == set(get_args(model._Dtype))


def test_optimizers_that_are_not_run_are_deepspeeds() -> None:
    assert set(DEEPSPEED_OPTIMIZERS) - NOT_RUN.keys() == {"adam", "adamw", "adagrad", "lion", "muon"}


def test_the_docs_have_every_key_of_ours_and_the_full_tables_every_key() -> None:
    text = DOCS.read_text(encoding="utf-8")

    assert with_tables(text) == text, "python -m tests.docs.config_tables"
    assert all(f"| `{name}` |" in tables()["ours"] for name in HARMONY_KEYS)
    full = all_keys()
    assert all(f"| `{path}` |" in full for path in {*PATHS, *RULES})
