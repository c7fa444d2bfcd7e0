"""The ds_config as one pydantic model: DeepSpeed's models for its blocks, our types for keys that it leaves unchecked.

Importing this imports deepspeed.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.config import get_communication_data_type
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, create_model

from harmony_ds.config.harmony import HarmonySettings


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


def _activation_checkpointing() -> Any:
    """Return a model of this block, which DeepSpeed keeps in a plain object: its attributes are names and defaults."""
    block = vars(DeepSpeedActivationCheckpointingConfig({}))
    fields = {key: (bool if isinstance(value, bool) else Any, value) for key, value in block.items()}
    return create_model("ActivationCheckpointing", __base__=_Block, **fields)  # type: ignore[call-overload]


def _in_case(case: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: case(value) if isinstance(value, str) else value)


def _communicated(name: str) -> str:
    get_communication_data_type({"communication_data_type": name})  # raises
    return name.lower()


_ActivationCheckpointing = _activation_checkpointing()
_Dtype = Literal[
    "fp32", "float32", "float", "torch.float32", "bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half",
    "torch.float16",
]  # fmt: skip
_Level = Annotated[Literal["debug", "info", "warning", "error", "critical"], _in_case(str.lower)]
_Communicated = Annotated[StrictStr, AfterValidator(_communicated)]
_Interval = Annotated[StrictInt | None, BeforeValidator(lambda value: None if value == math.inf else value)]
"""accelerate writes infinity for "never"."""
_Norm = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(lambda v: str(v) if v is True else v)]
"""No flag, which pydantic would take for 1.0."""


class _Scheduler(_Block):
    type: StrictStr
    params: dict[str, Any] | None = None


class _OptimizerBlock(_Scheduler):
    legacy_fusion: bool = False


class _DataTypes(_Block):
    grad_accum_dtype: _Dtype | None = None
    param_dtype: _Dtype | None = None
    buffer_dtype: _Dtype | None = None
    keep_in_fp32_modules: Any = "auto"


class _TorchAutocast(_Block):
    enabled: bool = False
    dtype: _Dtype | None = None
    lower_precision_safe_modules: Any = None


class _Checkpoint(_Block):
    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], _in_case(str.upper)] = "WARN"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: dict[Literal["pipeline_stage"], bool] = {}
    checkpoint_serialization: bool = True
    writer: dict[str, Any] | None = None


class _FlopsProfiler(_Block):
    enabled: bool = False
    recompute_fwd_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    profile_step: Annotated[StrictInt, Field(ge=0)] = 1
    module_depth: Annotated[StrictInt, Field(ge=-1)] = -1
    top_modules: Annotated[StrictInt, Field(ge=1)] = 1
    detailed: bool = True
    output_file: StrictStr | None = None


class _Timers(_Block):
    throughput: DeepSpeedThroughputTimerConfig = DeepSpeedThroughputTimerConfig()


class DsConfig(_Block):
    """Every key of a ds_config but the refused ones, with DeepSpeed's defaults."""

    train_batch_size: StrictInt | None = None
    train_micro_batch_size_per_gpu: StrictInt | Literal["auto"] | None = None
    gradient_accumulation_steps: StrictInt | None = None
    managed_gradient_accumulation: bool = True
    gradient_clipping: _Norm = 1.0
    optimizer: _OptimizerBlock | None = None
    scheduler: _Scheduler | None = None
    fp16: DeepSpeedFP16Config = DeepSpeedFP16Config()
    bf16: DeepSpeedBF16Config | None = None
    bfloat16: DeepSpeedBF16Config = DeepSpeedBF16Config()
    torch_autocast: _TorchAutocast = _TorchAutocast()
    data_types: _DataTypes = _DataTypes()
    zero_optimization: DeepSpeedZeroConfig = DeepSpeedZeroConfig()
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    dataloader_drop_last: bool = False
    checkpoint: _Checkpoint = _Checkpoint()
    steps_per_print: _Interval = None
    log_level: _Level | None = None
    dump_state: bool = False
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    timers: _Timers = _Timers()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: CSVConfig = CSVConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], _in_case(str.lower)] = "mean"
    communication_data_type: _Communicated | None = None
    seq_parallel_communication_data_type: _Communicated | None = "fp32"
    disable_allgather: bool = False
    disable_python_gc: bool = False
    use_data_before_expert_parallelism: bool = False
    vocabulary_size: Any = None
    pipeline: dict[str, Any] | None = None
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    flops_profiler: _FlopsProfiler = _FlopsProfiler()
    activation_checkpointing: _ActivationCheckpointing = _ActivationCheckpointing()  # type: ignore[valid-type]
    aio: dict[str, Any] | None = None
    harmony: HarmonySettings = HarmonySettings()
