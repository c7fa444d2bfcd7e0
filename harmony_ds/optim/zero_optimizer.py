"""The object that `engine.optimizer` is: the optimizer that steps, with the names of DeepSpeed's ZeRO optimizer."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, SupportsIndex

import torch

from harmony_ds.config.engine_settings import EngineSettings
from harmony_ds.errors import UnsupportedError

_ReadSettings = Callable[[EngineSettings], Any]


def _of_zero_config(name: str) -> _ReadSettings:
    """Return the answer that is the value of `name` in DeepSpeed's zero_optimization block."""
    return attrgetter(f"_config.zero_config.{name}")


def _always(value: Any) -> _ReadSettings:
    """Return the answer that is `value` in every training without parallelism but that of data."""
    return lambda _: value


_ANSWERS: dict[str, _ReadSettings] = {
    "clip_grad": lambda settings: settings.now.gradient_clipping,
    "dtype": lambda settings: settings.now.compute_dtype,
    "gradient_accumulation_dtype": lambda settings: settings.now.accumulation_dtype,
    "master_weights_and_grads_dtype": lambda settings: settings.now.master_dtype,
    "low_precision_master_weights_and_grads": lambda settings: settings.now.master_dtype != torch.float32,
    "check_grad_overflow": lambda settings: settings.now.skip_overflow,
    "gradient_accumulation_steps": lambda settings: settings.gradient_accumulation_steps(),
    "communication_data_type": lambda settings: settings.communication_data_type,
    "offload_param": lambda settings: getattr(settings.zero_offload_param(), "device", None) == "cpu",
    "cpu_offload": lambda settings: settings.zero_cpu_offload(),
    "offload_optimizer": lambda settings: settings.zero_cpu_offload(),
    "zero_stage_string": lambda settings: f"ZeRO-{settings.zero_optimization_stage()}",
    "partition_gradients": lambda settings: settings.zero_optimization_partition_gradients(),
    "bf16_master_weights_and_gradients": lambda settings: settings.bf16_master_weights_and_gradients(),
    "fp16_master_weights_and_gradients": lambda settings: settings.fp16_master_weights_and_gradients(),
    "bf16_optimizer_states": lambda settings: settings.bf16_optimizer_states(),
    "reduce_bucket_size": _of_zero_config("reduce_bucket_size"),
    "allgather_bucket_size": _of_zero_config("allgather_bucket_size"),
    "contiguous_gradients": _of_zero_config("contiguous_gradients"),
    "sub_group_size": _of_zero_config("sub_group_size"),
    "reduce_scatter": _of_zero_config("reduce_scatter"),
    "elastic_checkpoint": _of_zero_config("elastic_checkpoint"),
    "ignore_unused_parameters": _of_zero_config("ignore_unused_parameters"),
    "external_loss_scale": _always(None),
    "torch_autocast_gradscaler": _always(None),
    "mpu": _always(None),
    "model_parallel_group": _always(None),
    "ep_process_group": _always(None),
    "expert_dp_process_group": _always(None),
    "optimizer_swapper": _always(None),
    "custom_loss_scaler": _always(False),
    "has_moe_layers": _always(False),
    "zenflow": _always(False),
    "use_muon": _always(False),
    "swap_optimizer": _always(False),
    "model_parallel_world_size": _always(1),
    "sequence_parallel_size": _always(1),
    "model_parallel_rank": _always(0),
    "gradient_average": _always(True),
}
"""Names of DeepSpeed's ZeRO optimizer that the ds_config answers."""
_OF_SCALER = {"cur_scale": "cur_scale", "loss_scale": "loss_scale", "dynamic_loss_scale": "dynamic"}
"""Names that an attribute of the loss scaler answers."""
_SET_BY = {"clip_grad": "gradient_clipping", "cur_scale": "fp16.loss_scale", "loss_scale": "fp16.loss_scale"}
"""Names that a program may want to set, and the key of the ds_config that sets each."""
_READ_ONLY = {"optimizer", "overflow", "loss_scaler", *_OF_SCALER, *_ANSWERS}


class ZeroOptimizer:
    """The optimizer that steps, under its own names and DeepSpeed's; to `isinstance`, one of its class, and equal to it.

    It does not keep its engine alive, and copies and pickles are of the optimizer that steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: EngineSettings,
        scaler: Any,
        has_overflowed: Callable[[], bool | None],
    ) -> None:
        """`has_overflowed`: whether the last step was skipped for inf or NaN in its gradients; None: the engine is gone."""
        vars(self).update(optimizer=optimizer, loss_scaler=scaler, _settings=settings, _has_overflowed=has_overflowed)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["optimizer"])

    def __getattr__(self, name: str) -> Any:
        settings, optimizer = vars(self)["_settings"], vars(self)["optimizer"]
        if name == "overflow":
            return bool(vars(self)["_has_overflowed"]())
        if name in _ANSWERS:
            return _ANSWERS[name](settings)
        if name in _OF_SCALER:
            return getattr(vars(self)["loss_scaler"], _OF_SCALER[name])
        try:
            return getattr(optimizer, name)
        except AttributeError:
            raise AttributeError(
                f"{type(optimizer).__name__} has no {name!r}, and of the names of DeepSpeed's ZeRO optimizer this is none "
                "that means something here: see the names that are left out in docs/compatibility.md."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _READ_ONLY:
            raise _read_only(f"engine.optimizer.{name}", _SET_BY.get(name, "the keys that decide it"))
        setattr(vars(self)["optimizer"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["optimizer"], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(vars(self)["optimizer"]), *_READ_ONLY, *(n for n in vars(ZeroOptimizer) if n[0] != "_")})

    def __eq__(self, other: object) -> bool:
        return vars(self)["optimizer"] is unwrap_optimizer(other)

    def __hash__(self) -> int:
        return hash(vars(self)["optimizer"])

    def __repr__(self) -> str:
        return repr(vars(self)["optimizer"])

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return vars(self)["optimizer"].__reduce_ex__(protocol)

    def needs_scaler(self) -> bool:
        """Return whether losses have to be scaled, by `engine.backward` or `engine.scale`."""
        return bool(self.dtype == torch.float16)

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        rate: float = vars(self)["optimizer"].param_groups[0]["lr"]
        return rate

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in vars(self)["optimizer"].param_groups:
            group["lr"] = lr

    def override_loss_scale(self, loss_scale: float) -> None:
        """Raise UnsupportedError: the loss scale is the ds_config's."""
        raise _read_only("the loss scale (optimizer.override_loss_scale)", "fp16.loss_scale")


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a `ZeroOptimizer`; anything else as it is."""
    return vars(optimizer)["optimizer"] if type(optimizer) is ZeroOptimizer else optimizer


def _read_only(name: str, keys: str) -> UnsupportedError:
    return UnsupportedError(f"{name} can be read and not be set: set {keys} in the ds_config before initialize.")
