"""Models that were built under DeepSpeed's own `zero.Init`: their parameters get their whole values back."""

from __future__ import annotations

from torch import nn


def make_whole(model: nn.Module) -> None:
    """Give every parameter that DeepSpeed has partitioned its values back, one by one, in host memory."""
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not partitioned:
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    for parameter in partitioned:
        with GatheredParameters([parameter]):
            values = parameter.detach().to("cpu", copy=True)
        for key in [key for key, value in vars(parameter).items() if _is_deepspeeds(key, value)]:
            delattr(parameter, key)
        parameter.data = values


def _is_deepspeeds(key: str, value: object) -> bool:
    module = str(getattr(getattr(value, "func", value), "__module__", ""))
    return (
        key.startswith("ds_") or key in ("is_external_param", "nvme_swapper") or module.partition(".")[0] == "deepspeed"
    )
