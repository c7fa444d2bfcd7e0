"""Models that were built under DeepSpeed's own `zero.Init`: their parameters get their whole values back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from harmony_ds.errors import ModelError


def make_whole(model: nn.Module) -> None:
    """Give every parameter that DeepSpeed has partitioned its values back, one by one, in host memory.

    One process holds all of each: nothing is copied unless DeepSpeed has put it on an accelerator.

    Raises:
        ModelError: a parameter's values are not in memory (NVMe), or not all in this process.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            values = _values(name, parameter)
            for key in [key for key, value in vars(parameter).items() if _is_deepspeeds(key, value)]:
                delattr(parameter, key)
            parameter.data = values


def _values(name: str, parameter: Any) -> Tensor:
    if parameter.ds_status.name == "AVAILABLE" and parameter.shape == parameter.ds_shape:
        whole: Tensor = parameter.data  # gathered now
        return whole if whole.is_meta else whole.cpu()
    held: Tensor | None = getattr(parameter, "ds_tensor", None)
    in_memory = 0 if held is None else held.numel()
    if held is None or in_memory < parameter.ds_numel:
        raise ModelError(
            f"{name} was built under deepspeed.zero.Init, and {in_memory} of its {parameter.ds_numel} numbers are in this "
            "process's memory: build the model in one process and without NVMe offload, or without zero.Init "
            "(harmony_ds.zero.Init takes its place)."
        )
    return held.detach().narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape).cpu()


def _is_deepspeeds(key: str, value: object) -> bool:
    module = str(getattr(getattr(value, "func", value), "__module__", ""))
    return (
        key.startswith("ds_") or key in ("is_external_param", "nvme_swapper") or module.partition(".")[0] == "deepspeed"
    )
