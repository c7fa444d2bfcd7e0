"""Models that were built under DeepSpeed's own `zero.Init`, which leaves each process a part of every parameter."""

from __future__ import annotations

from torch import nn


def gather_partitioned_parameters(model: nn.Module) -> None:
    """Give every parameter that DeepSpeed has partitioned its whole values back, one by one, in host memory."""
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not partitioned:
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    for parameter in partitioned:
        with GatheredParameters([parameter]):
            values = parameter.detach().to("cpu", copy=True)
        for name, value in list(vars(parameter).items()):
            if _is_from_deepspeed(name, value):
                delattr(parameter, name)
        parameter.data = values


def _is_from_deepspeed(name: str, value: object) -> bool:
    """Return whether DeepSpeed has put this attribute, or method, on a parameter."""
    if name.startswith("ds_") or name in ("is_external_param", "nvme_swapper"):
        return True
    function = getattr(value, "func", value)  # of a functools.partial
    module = str(getattr(function, "__module__", ""))
    return module.partition(".")[0] == "deepspeed"
