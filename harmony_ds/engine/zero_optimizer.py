"""What `engine.optimizer` is: the names of DeepSpeed's ZeRO optimizer around the optimizer that steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, SupportsIndex

import torch

from harmony_ds.config.settings import SCALER_NAMES
from harmony_ds.engine.loss_scaling import LossScaler
from harmony_ds.engine.settings import Settings
from harmony_ds.errors import UnsupportedError


class ShownNames:
    """What one of the objects on DeepSpeed's optimizer answers to, to be read."""

    def __init__(self, owner: str, names: Callable[[], dict[str, Any]]) -> None:
        vars(self).update(_owner=owner, _names=names)

    def __getattr__(self, name: str) -> Any:
        shown = vars(self)["_names"]()
        if name not in shown:
            raise AttributeError(
                f"optimizer.{vars(self)['_owner']} has no {name!r} here: losses are scaled by engine.backward() and "
                "engine.scale()."
            )
        return shown[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise _read_only(f"optimizer.{vars(self)['_owner']}.{name}", "fp16.loss_scale")

    def __dir__(self) -> list[str]:
        return sorted(vars(self)["_names"]())


def _scaler_names(scaler: LossScaler, dtype: torch.dtype) -> dict[str, Any]:
    state = scaler.state_dict()
    shown: dict[str, Any] = {"cur_scale": scaler.scale, "loss_scale": scaler.scale, "dynamic": state is not None}
    if state is not None:
        shown |= {theirs: state["settings"][ours] for ours, theirs in SCALER_NAMES.items()}
        shown |= {"cur_iter": state["step"], "cur_hysteresis": state["hysteresis"], "scale_factor": 2.0, "dtype": dtype}
        shown |= {"last_overflow_iter": state["last_overflow"], "raise_error_at_min_scale": True}
    return shown


def _loss_scale_config_names(scaler: LossScaler, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's `LossScaleConfig`, which its optimizers of stage 0 have; steps are counted where the scale moves."""
    state = scaler.state_dict()
    shown: dict[str, Any] = dict.fromkeys(("last_overflow_iter", "scale_factor", "scale_window", "min_loss_scale"))
    shown |= {"use_grad_scaling": dtype == torch.float16, "dynamic_loss_scale": state is not None}
    shown["cur_scale"] = scaler.scale
    if state is not None:
        rules = state["settings"]
        shown |= {"cur_iter": state["step"], "last_overflow_iter": state["last_overflow"], "scale_factor": 2.0}
        shown |= {"scale_window": rules["loss_scale_window"], "min_loss_scale": rules["min_loss_scale"]}
    return shown


def _key(path: str) -> Callable[[Settings], Any]:
    return lambda settings: settings.now.values[f"zero_optimization.{path}"]


def _is_fp16(settings: Settings) -> bool:
    return settings.now.compute_dtype == torch.float16


def _offloads(part: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.now.values[f"zero_optimization.{part}.device"] == "cpu"


_OF_SETTINGS: dict[str, Callable[[Settings], Any]] = {
    "clip_grad": lambda settings: settings.now.gradient_clipping,
    "gradient_accumulation_steps": Settings.gradient_accumulation_steps,
    "dtype": lambda settings: settings.now.compute_dtype,
    "gradient_accumulation_dtype": lambda settings: settings.now.accumulation_dtype,
    "communication_data_type": Settings.communication_data_type,
    "cpu_offload": _offloads("offload_optimizer"),
    "offload_optimizer": _offloads("offload_optimizer"),
    "offload_param": _offloads("offload_param"),
    "check_grad_overflow": lambda settings: _is_fp16(settings) or settings.now.skip_overflow,
    "zero_stage_string": lambda settings: f"ZeRO-{settings.now.values['zero_optimization.stage']}",
    "partition_gradients": lambda settings: settings.now.values["zero_optimization.stage"] >= 2,
    "reduce_bucket_size": _key("reduce_bucket_size"),
    "allgather_bucket_size": _key("allgather_bucket_size"),
    "contiguous_gradients": _key("contiguous_gradients"),
    "sub_group_size": _key("sub_group_size"),
    "reduce_scatter": _key("reduce_scatter"),
    "elastic_checkpoint": _key("elastic_checkpoint"),
    "ignore_unused_parameters": _key("ignore_unused_parameters"),
}
"""Names that the ds_config answers."""
_FIXED: dict[str, Any] = {
    "custom_loss_scaler": False,
    "external_loss_scale": None,
    "master_weights_and_grads_dtype": torch.float32,
    "torch_autocast_gradscaler": None,
    "mpu": None,
    "model_parallel_group": None,
    "model_parallel_rank": 0,
    "model_parallel_world_size": 1,
    "sequence_parallel_size": 1,
    "has_moe_layers": False,
    "ep_process_group": None,
    "expert_dp_process_group": None,
    "gradient_average": True,
    "zenflow": False,
    "use_muon": False,
    "swap_optimizer": False,
    "optimizer_swapper": None,
    "bf16_master_weights_and_gradients": False,
    "fp16_master_weights_and_gradients": False,
    "low_precision_master_weights_and_grads": False,
    "bf16_optimizer_states": False,
}
"""Names with one answer: one process, masters in fp32, no tensors on disks."""


class ZeroOptimizer:
    """The optimizer that steps, under its own names and DeepSpeed's; to `isinstance`, one of its class, and equal to it.

    It does not keep its engine alive, and copies and pickles are of the optimizer that steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, scaler: LossScaler) -> None:
        vars(self).update(
            optimizer=optimizer,
            overflow=False,
            loss_scaler=ShownNames("loss_scaler", partial(_scaler_names, scaler, settings.now.compute_dtype)),
            loss_scale_config=ShownNames(
                "loss_scale_config", partial(_loss_scale_config_names, scaler, settings.now.compute_dtype)
            ),
            _settings=settings,
            _scaler=scaler,
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["optimizer"])

    def __getattr__(self, name: str) -> Any:
        settings, optimizer = vars(self)["_settings"], vars(self)["optimizer"]
        if name in _OF_SETTINGS:
            return _OF_SETTINGS[name](settings)
        if name in _FIXED:
            return _FIXED[name]
        try:
            return getattr(optimizer, name)
        except AttributeError:
            raise AttributeError(
                f"{type(optimizer).__name__} has no {name!r}, and of the names of DeepSpeed's ZeRO optimizer this is none "
                "that means something here: see the names that are left out in docs/compatibility.md."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SHOWN:
            raise _read_only(f"engine.optimizer.{name}", _SET_BY.get(name, "the keys that decide it"))
        setattr(vars(self)["optimizer"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["optimizer"], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(vars(self)["optimizer"]), *_SHOWN, *(n for n in vars(ZeroOptimizer) if n[0] != "_")})

    def __eq__(self, other: object) -> bool:
        return vars(self)["optimizer"] is the_one_that_steps(other)

    def __hash__(self) -> int:
        return hash(vars(self)["optimizer"])

    def __repr__(self) -> str:
        return repr(vars(self)["optimizer"])

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return vars(self)["optimizer"].__reduce_ex__(protocol)

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied with now (1.0 without fp16)."""
        scale: float = vars(self)["_scaler"].scale
        return scale

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return vars(self)["_scaler"].state_dict() is not None

    def needs_scaler(self) -> bool:
        """Whether losses have to be scaled, by `engine.backward` or `engine.scale`."""
        return _is_fp16(vars(self)["_settings"])

    def get_lr(self) -> float:
        """The learning rate of the first parameter group."""
        rate: float = vars(self)["optimizer"].param_groups[0]["lr"]
        return rate

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every parameter group."""
        for group in vars(self)["optimizer"].param_groups:
            group["lr"] = lr

    def override_loss_scale(self, loss_scale: float) -> None:
        """Refused: the loss scale is the ds_config's.

        Raises:
            UnsupportedError: always.
        """
        raise _read_only("the loss scale (optimizer.override_loss_scale)", "fp16.loss_scale")


_SHOWN = {
    "optimizer", "overflow", "loss_scaler", "loss_scale_config",
    "cur_scale", "loss_scale", "dynamic_loss_scale", *_OF_SETTINGS, *_FIXED,
}  # fmt: skip
_SET_BY = {"clip_grad": "gradient_clipping", "cur_scale": "fp16.loss_scale", "loss_scale": "fp16.loss_scale"}


def note_overflow(optimizer: ZeroOptimizer, overflow: bool) -> None:
    """Whether the last step was skipped for inf or NaN in its gradients."""
    vars(optimizer)["overflow"] = overflow


def the_one_that_steps(optimizer: Any) -> Any:
    """What a `ZeroOptimizer` of another engine is around; anything else as it is."""
    return vars(optimizer)["optimizer"] if type(optimizer) is ZeroOptimizer else optimizer


def _read_only(name: str, keys: str) -> UnsupportedError:
    return UnsupportedError(f"{name} can be read and not be set: set {keys} in the ds_config before initialize.")
