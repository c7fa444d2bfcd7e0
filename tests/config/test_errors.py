"""Configs that are refused before anything is built, with the key, what is wrong and what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch import nn

import harmony_ds
from harmony_ds import ConfigError, ModelError
from harmony_ds.config import Section, load_config
from harmony_ds.config.optimizers import NOT_RUN, refuse_what_is_not_run

pytestmark = pytest.mark.fixed_times

MICRO = {"train_micro_batch_size_per_gpu": 2}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.1}}
NAN, INF = float("nan"), float("inf")


def zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **more}}


def fp16(**more: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **more}}


# What DeepSpeed refuses in the same words is among the rows of tests/compatibility.
MALFORMED: list[tuple[dict[Any, Any], str]] = [
    # unknown keys
    ({"gradient_cliping": 1.0}, r'unknown key "gradient_cliping" in the ds_config. Did you mean "gradient_clipping"\?'),
    ({"optimiser": OPTIMIZER}, r'unknown key "optimiser" in the ds_config. Did you mean "optimizer"\?'),
    ({"qqqqq": 1}, r'unknown key "qqqqq" in the ds_config. Known keys: .*train_batch_size'),
    ({3: 1}, 'unknown key "3" in the ds_config'),
    (zero(stge=2), r'unknown key "stge" in zero_optimization. Did you mean "stage"\?'),
    (zero(offload_optimizer={"devise": "cpu"}), 'unknown key "devise" in zero_optimization.offload_optimizer'),
    ({"fp16": {"enable": True}}, r'unknown key "enable" in fp16. Did you mean "enabled"\?'),
    (
        {"data_types": {"grad_acum_dtype": "fp32"}},
        'unknown key "grad_acum_dtype" in data_types. Did you mean "grad_acc',
    ),
    ({"optimizer": {**OPTIMIZER, "parms": {}}}, r'unknown key "parms" in optimizer. Did you mean "params"\?'),
    (
        {"checkpoint": {"tag_validate": "Warn"}},
        'unknown key "tag_validate" in checkpoint. Did you mean "tag_validation"',
    ),
    ({"harmony": {"pack_layer": 2}}, r'unknown key "pack_layer" in harmony. Did you mean "pack_layers"\?'),
    ({"harmony": {"zzz": 2}}, r'unknown key "zzz" in harmony. Known keys: device, device_memory_gib'),
    ({"warmup_steps": 3}, 'Did you mean "scheduler.params.warmup_num_steps".*"harmony": {"unknown_keys": "warn"}'),
    ({"lr": 3}, 'Did you mean "optimizer.params.lr"'),
    ({"optimizer": {"type": "AdamW", "torch_adam": True}}, 'Did you mean "optimizer.params.torch_adam"'),
    ({"harmony": {"unknown_keys": "warn", "pack_layer": 2}}, 'unknown key "pack_layer" in harmony'),
    # numbers in quotes
    ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "optimizer.params.lr\" is the text '1e-4': write the"),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": ["0.9", 0.99]}}},
        "optimizer.params.betas\" is the text '0.9'",
    ),
    # batch sizes
    ({"train_micro_batch_size_per_gpu": None}, "Either train_batch_size or train_micro_batch_size_per_gpu needs"),
    ({"train_micro_batch_size_per_gpu": 0}, '"train_micro_batch_size_per_gpu" is 0, and has to be greater than 0'),
    (
        {"train_micro_batch_size_per_gpu": 2.0},
        '"train_micro_batch_size_per_gpu": Input should be a valid integer, not 2.0',
    ),
    ({"train_batch_size": 0}, '"train_batch_size" is 0, and has to be greater than 0'),
    ({"train_batch_size": "8"}, "\"train_batch_size\": Input should be a valid integer, not '8'"),
    ({"gradient_accumulation_steps": -1}, '"gradient_accumulation_steps" is -1, and has to be greater than 0'),
    (
        {"gradient_accumulation_steps": [4]},
        r'"gradient_accumulation_steps": Input should be a valid integer, not \[4\]',
    ),
    # clipping
    ({"gradient_clipping": -1.0}, '"gradient_clipping": Input should be greater than or equal to 0, not -1.0'),
    ({"gradient_clipping": "one"}, "\"gradient_clipping\": Input should be a valid number, .*, not 'one'"),
    ({"gradient_clipping": True}, '"gradient_clipping": Input should be a valid number, .*, not True'),
    ({"gradient_clipping": NAN}, '"gradient_clipping": Input should be a finite number, not nan'),
    # optimizer and scheduler
    ({"optimizer": "AdamW"}, '"optimizer": Input should be an object, not .*Write {"type": "AdamW"'),
    ({"optimizer": {"type": 3}}, '"optimizer.type": Input should be a valid string, not 3. Write {"type": "AdamW"'),
    ({"optimizer": {"type": "AdamW", "params": [0.1]}}, r'"optimizer.params": Input should be an object, not \[0.1\]'),
    ({"scheduler": {"params": {}}}, '"scheduler.type": Field required, .*Write {"type"'),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "please switch to .* 'gradient_clipping'"),
    # "auto" that was not filled in
    (
        {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
        '"optimizer.params.lr" still says "auto"',
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"b": "auto", "a": "auto", "c": 1}}},
        '"scheduler.params.b", "scheduler.params.a" still say "auto": Hugging Face',
    ),
    (
        {
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
        },
        '"gradient_clipping", "bf16.enabled", "optimizer.params.lr" still say "auto": .* write values',
    ),
    ({"gradient_clipping": "auto"}, '"gradient_clipping" still says "auto": Hugging Face\'s Trainer .* write a value'),
    # precision
    ({"fp16": True}, '"fp16": Input should be an object, not True'),
    ({"bf16": {"enabled": "maybe"}}, "\"bf16.enabled\": Input should be a valid boolean, .*, not 'maybe'"),
    (fp16(loss_scale=True), "fp16.loss_scale must be a number, not bool"),
    (fp16(loss_scale="big"), "fp16.loss_scale must be a number"),
    (fp16(loss_scale=INF), "fp16.loss_scale must be a finite number"),
    (fp16(min_loss_scale=0), "fp16.min_loss_scale must be > 0 when dynamic loss scaling is enabled"),
    (fp16(initial_scale_power="high"), "\"fp16.initial_scale_power\": Input should be a valid integer, .*, not 'high'"),
    (fp16(fp16_master_weights_and_grads=True), "masters are fp32, or bf16 by"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, '"zero_optimization"'),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}, **zero()}, "requires bf16_master_weights_and_grads"),
    ({"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}, **zero()}, '"enabled": true'),
    ({"data_types": {"grad_accum_dtype": "fp64"}}, "grad_accum_dtype\": Input should be .*'fp32'.* not 'fp64'"),
    (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "data_types": {"grad_accum_dtype": "fp16"},
            **zero(),
        },
        'grad_accum_dtype is "fp16" but masters are torch.bfloat16: leave it out',
    ),
    ({"data_types": {"param_dtype": "bf16"}}, "param_dtype='bf16' conflicts with the enabled precision mode"),
    ({"data_types": {"buffer_dtype": "fp64"}}, "buffer_dtype\": Input should be .*'fp32'.* not 'fp64'"),
    # zero_optimization
    ({"zero_optimization": 2}, '"zero_optimization": Input should be an object, not 2'),
    (zero(contiguous_gradients="perhaps"), "zero_optimization.contiguous_gradients.*valid boolean"),
    (zero(reduce_bucket_size=0), '"zero_optimization.reduce_bucket_size": Input should be greater than 0, not 0'),
    (zero(offload_optimizer={"device": "gpu"}), "Input should be 'none', 'cpu' or 'nvme', not 'gpu'"),
    (
        zero(offload_param={"device": "nvme"}),
        'offload_param.device is "nvme": name a folder on the disk in zero_optimization.offload_param.nvme_path',
    ),
    (zero(offload_optimizer={"device": "cpu", "ratio": 1.5}), "Input should be less than or equal to 1, not 1.5"),
    (zero(offload_optimizer={"device": "cpu", "pin_memory": "x"}), "offload_optimizer.pin_memory.*valid boolean"),
    (zero(zenflow={"topk_ratio": 0.1}), '"zero_optimization.zenflow": its updates are stale'),
    (zero(mics_shard_size=8), '"zero_optimization.mics_shard_size": DeepSpeed 0.19.8 refuses it, too'),
    (zero(zero_quantized_nontrainable_weights=True), "weights are not quantized"),
    # values of other keys
    ({"gradient_allreduce_op": "max"}, "\"gradient_allreduce_op\": Input should be 'mean' or 'sum'"),
    ({"communication_data_type": "fp64"}, r"Supported data types: \['fp16', 'bf16', 'fp32'\]. Got: fp64"),
    ({"checkpoint": {"tag_validation": "sometimes"}}, "Input should be 'WARN', 'IGNORE' or 'FAIL', not 'sometimes'"),
    ({"steps_per_print": "often"}, "\"steps_per_print\": Input should be a valid integer, not 'often'"),
    ({"log_level": "loud"}, "\"log_level\": Input should be 'debug'"),
    ({"csv_monitor": {"enabled": True, "output_path": 3}}, '"csv_monitor.output_path": Input should be a valid string'),
    # what is not supported
    ({"amp": {"enabled": True}}, '"amp": Apex AMP is not supported: use "bf16", "fp16" or "torch_autocast"'),
    ({"torch_autocast": {"enabled": True}}, '"torch_autocast.dtype" is null: write "bfloat16", or "float16"'),
    (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "bf16": {"enabled": True}},
        '"torch_autocast" to float16 is for fp32 weights, and these are torch.bfloat16',
    ),
    ({"tensor_parallel": {"autotp_size": 2}}, '"tensor_parallel": tensor parallelism is not supported'),
    ({"compile": {"deepcompile": True}}, '"compile": DeepCompile is not supported: call engine.compile'),
    ({"hybrid_engine": {"enabled": True}}, '"hybrid_engine": .* engine.generate'),
    ({"data_efficiency": {"enabled": True}}, '"data_efficiency": sample the data yourself'),
    ({"flops_profiler": {"enabled": True, "profile_step": "1"}}, "flops_profiler.profile_step"),
    ({"flops_profiler": {"top_modules": 0}}, "flops_profiler.top_modules"),
    ({"sparse_attention": {"mode": "fixed"}}, '"sparse_attention": sparse attention is not supported'),
    ({"compression_training": {"weight_quantization": {}}}, "compression training is not supported"),
    ({"elasticity": {"enabled": True}}, "elastic training is not supported"),
    ({"sequence_parallel_size": 2}, "sequence parallelism is not supported"),
    # what is found in other projects
    (
        {"deepspeed_config": {"zero_stage": 3}, "num_processes": 8},
        "accelerate's file, not a ds_config: .*launch --config_file",
    ),
    ({"curriculum_learning": {"enabled": True}}, '"curriculum_learning": order the data yourself, and leave it out'),
    ({"autotuning": {"enabled": True, "fast": False}}, '"autotuning": use harmony-ds plan'),
    (
        {"monitor_config": {"tensorboard": {}}},
        'unknown key "monitor_config" in the ds_config. Did you mean "tensorboard"',
    ),
    # our own block
    ({"harmony": 3}, '"harmony": Input should be an object, not 3'),
    (
        {"harmony": {"micro_batch": 0}},
        '"harmony.micro_batch" cannot be 0. Rows .*: "config" .*, "auto" .*, a number of at least 1, or {"forward"',
    ),
    ({"harmony": {"micro_batch": {"forward": 4}}}, '"harmony.micro_batch" cannot be {.forward.: 4}. Rows'),
    ({"harmony": {"micro_batch": 4, "plan": "p.json"}}, "harmony.plan says how layer calls are cut"),
    ({"harmony": {"stash": "disk"}}, "\"harmony.stash\": Input should be 'auto', 'device' or 'host', not 'disk'"),
    ({"harmony": {"device": 0}}, '"harmony.device": Input should be a valid string, not 0. "cpu", "cuda"'),
    ({"harmony": {"seed": "x"}}, "\"harmony.seed\": Input should be a valid integer, not 'x'"),
    (
        {"harmony": {"pack_layers": 0}},
        '"harmony.pack_layers": Input should be greater than or equal to 1, not 0. Layer calls',
    ),
    ({"harmony": {"pack_layers": True}}, '"harmony.pack_layers": Input should be a valid integer, not True'),
    ({"harmony": {"gradient_slabs": 0}}, '"harmony.gradient_slabs": Input should be greater than or equal to 1, not 0'),
    ({"harmony": {"device_memory_gib": 0}}, '"harmony.device_memory_gib": Input should be greater than 0, not 0'),
    (
        {"harmony": {"device_memory_gib": "4"}},
        "gib\": Input should be a valid number, not '4'. Device memory .* in GiB",
    ),
    (
        {"harmony": {"device_memory_gib": 1e300}},
        '"harmony.device_memory_gib": Input should be less than or equal to 1073741824, not 1e.300',
    ),
    ({"harmony": {"device_memory_gib": NAN}}, '"harmony.device_memory_gib": Input should be a finite number, not nan'),
    (
        {"harmony": {"layers": "h.*"}},
        r'"harmony.layers": Input should be a list, not .*A list of shell patterns .*such as',
    ),
    ({"harmony": {"layers": ["h.*", 3]}}, r"\"harmony.layers\": Input should be a valid string, not \['h.\*', 3\]"),
    ({"harmony": {"prefetch": 1}}, '"harmony.prefetch": Input should be a valid boolean, not 1'),
    ({"harmony": {"grouping": "off"}}, "\"harmony.grouping\": Input should be a valid boolean, not 'off'"),
    (
        {"harmony": {"residency": "some"}},
        '"harmony.residency" cannot be .some.. Packs .*"auto" .*, "kept" .*, "off", or a number',
    ),
    ({"harmony": {"plan": 3}}, '"harmony.plan": Input should be a valid string, not 3. A file with a saved plan'),
]


@pytest.mark.parametrize(("more", "message"), MALFORMED, ids=lambda value: str(value)[:60])
def test_a_malformed_config_is_an_error_that_names_the_key(more: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**MICRO, **more})


SEVERAL: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"optimiser": OPTIMIZER, "fp16": {"enable": True}},
        [
            '(1) unknown key "optimiser"',
            'optimizer"? (2) unknown key "enable" in fp16. Did you mean "enabled"? ("harmony"',
        ],
    ),
    (
        {"gradient_clipping": "one", "steps_per_print": "often", "harmony": {"stash": "disk", "micro_batch": 0}},
        ["4 faults", '"gradient_clipping": Input', '"steps_per_print": Input', '"harmony.stash": Input', "cannot be 0"],
    ),
    (
        {
            "qqqqq": 1,
            "amp": {"enabled": True},
            "fp16": {"enabled": "auto"},
            "gradient_clipping": -1,
            "elasticity": True,
        },
        ["5 faults", '"amp": Apex', '"elasticity": ', '"qqqqq"', '"fp16.enabled" still says "auto"', "or equal to 0"],
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": ["0.9", "0.99"]}}},
        ["3 faults", "(1) \"optimizer.params.lr\" is the text '1e-4'", "the text '0.9'", "the text '0.99'"],
    ),
]


@pytest.mark.parametrize(("more", "messages"), SEVERAL, ids=lambda value: str(value)[:60])
def test_everything_that_is_wrong_with_a_config_is_said_at_once(more: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**MICRO, **more})
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        {"train_batch_size": 7},
        {"bf16": {"enabled": True}, **fp16()},
        zero(cpu_offload=True, offload_optimizer={"device": "cpu"}),
    ],
    ids=str,
)
def test_a_contradiction_is_an_assertion_error_and_a_value_error(more: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        load_config({**MICRO, **more})
    with pytest.raises(ValueError, match=r"\w+"):
        load_config({**MICRO, **more})


@pytest.mark.parametrize("name", ["Lamb", "OneBitAdam", "MuAdam", "MuSGD"])
def test_an_optimizer_that_is_not_run_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f'"optimizer.type": {name} is not run: {NOT_RUN[name.lower()][:20]}'):
        refuse_what_is_not_run(Section(name))


def test_unknown_keys_are_ignored_and_named_on_request() -> None:
    source = {**MICRO, "from_elsewhere": {"a": 1}, "fp16": {"zzz": 2}, "harmony": {"unknown_keys": "warn"}}
    assert load_config(source).without_meaning == ("fp16.zzz", "from_elsewhere")


@pytest.mark.parametrize("level", ["error", "ERROR", "Warning"])
def test_a_log_level_is_taken_in_any_case_as_deepspeed_does(level: str) -> None:
    assert load_config({**MICRO, "log_level": level}).values["log_level"] == level.lower()


# ---- arguments of initialize, and names that only the optimizer or the scheduler know


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def adamw(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, **params}}}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net, r"model must be a torch.nn.Module, not type: <class '.*Net'>"),
        ("gpt2", r"model must be a torch.nn.Module, not str: 'gpt2'"),
        (7, "model must be a torch.nn.Module, not int: 7"),
    ],
)
def test_an_argument_that_is_no_model_is_named(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        harmony_ds.initialize(model=model, config=MICRO)


def test_a_model_in_the_place_of_the_programs_arguments_is_named() -> None:
    with pytest.raises(TypeError, match=r"the first argument of initialize is args, .* and not the model \(Net\)"):
        harmony_ds.initialize(Net(), MICRO)  # type: ignore[arg-type]


def test_an_engine_in_the_place_of_a_model_is_named() -> None:
    engine, *_ = harmony_ds.initialize(model=Net(), config={**MICRO, **adamw()})
    try:
        with pytest.raises(ModelError, match="model is an engine already, of a Net"):
            harmony_ds.initialize(model=engine, config=MICRO)
    finally:
        engine.destroy()


def test_an_argument_that_is_no_config_is_named() -> None:
    with pytest.raises(ConfigError, match="a valid base64. Received: 7, which is of type int".replace(".", r"\.")):
        harmony_ds.initialize(model=Net(), config=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (adamw(learning_rate=0.1), '"optimizer.params" does not take "learning_rate". Did you mean "lr"'),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 0.1}}}, '"momentun". Did you mean "momentum"'),
        (adamw(ep=1e-8, beta=(0.9, 0.99)), r'2 faults: \(1\) .* "ep". Did you mean "eps"\? \(2\) .* "beta"'),
        ({"optimizer": {"type": "AdmW"}}, "AdmW is not a supported DeepSpeed Optimizer, did you mean AdamW"),
        ({**adamw(), "scheduler": {"type": "WarmupLr"}}, "scheduler WarmupLr. Did you mean WarmupLR"),
        (
            {**adamw(), "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 2}}},
            '"scheduler.params" does not take "warmup_steps". Did you mean "warmup_num_steps"',
        ),
    ],
    ids=str,
)
def test_a_misspelled_parameter_gets_the_nearest_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harmony_ds.initialize(model=Net(), config={**MICRO, **more, "harmony": {"device": "cpu"}})


def test_a_config_error_is_deepspeeds_too_where_deepspeed_is_loaded() -> None:
    code = """
import sys, pickle
from harmony_ds import ConfigError
assert type(ConfigError("a")) is ConfigError and "deepspeed" not in sys.modules
import deepspeed
try:
    raise ConfigError("b")
except deepspeed.DeepSpeedConfigError as error:
    assert isinstance(error, ConfigError) and str(error) == "b" and type(error).__name__ == "ConfigError"
    assert isinstance(pickle.loads(pickle.dumps(error)), ConfigError)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
