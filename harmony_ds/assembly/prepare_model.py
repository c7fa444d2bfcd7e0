"""Preparation of a model for an engine, or its refusal by name."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from harmony_ds.config import Config
from harmony_ds.errors import ModelError

_TRAINED = (torch.float32, torch.bfloat16, torch.float16)


def prepare_model(model: nn.Module, host_type: str, dtype: torch.dtype) -> None:
    """Check that `model` can be trained in `dtype`, and switch its own recomputation off.

    Args:
        host_type: the type of the torch.device that the model's tensors have to be on ("cpu", or "meta" for estimates).

    Raises:
        ModelError: it cannot be trained; the message names the parameter, buffer or module.
    """
    _check_on_host(model, host_type)
    _check_parameters(model, dtype)
    _check_buffers(model)
    _check_memory(model)
    _switch_off_checkpointing(model)


def _check_on_host(model: nn.Module, host_type: str) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and host_type != "meta":
            raise ModelError(
                f"{name} is on the meta device, without values: load the model by from_pretrained, or give it weights by "
                "model.load_state_dict(safetensors.torch.load_file(path), assign=True), or build it in host memory."
            )
        if tensor.device.type != host_type:
            raise ModelError(
                f"{name} is on {tensor.device}: the engine keeps the model in host memory and brings layers to the "
                "device itself. Pass the model before any .to(device) or .cuda()."
            )


def _check_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise ModelError for parameters that would be trained as something else than they are."""
    for name, parameter in model.named_parameters():
        is_frozen = not parameter.requires_grad
        if is_frozen and parameter.layout is torch.strided and not nn.parameter.is_lazy(parameter):
            continue  # where it is not of the compute dtype, it travels as its bytes
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            raise ModelError(
                f"{name} is a {type(parameter).__name__} of layout {parameter.layout}: the engine trains plain, dense "
                "parameters alone. Freeze quantized weights (requires_grad_(False)), and train adapters beside them."
            )
        if parameter.dtype not in _TRAINED:
            way = "Convert the model (model.float())"
            if parameter.is_complex():
                way = "Train real and imaginary parts (torch.view_as_real), and make it of them in forward"
            raise ModelError(
                f"{name} is of {parameter.dtype}, and the engine would compute with it in {dtype}: it trains "
                f"torch.float32, bfloat16 and float16 alone. {way}, or freeze it (requires_grad_(False)): what is frozen "
                "keeps its dtype."
            )
        if dtype == torch.float32 and parameter.dtype != dtype:
            raise ModelError(
                f"{name} is of {parameter.dtype}, and the engine would compute with it in torch.float32: convert the whole "
                'model to one dtype (model.float(), model.bfloat16()), or enable "bf16" or "fp16" in the ds_config '
                'without "torch_autocast".'
            )
        if parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{name} has a hook after the accumulation of its gradient (register_post_accumulate_grad_hook), which is "
                "complete only when its pack's group is: use register_hook, or read .grad between backward() and step()."
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"{name} has sparse gradients, which the engine does not swap: build it with sparse=False."
            )


def _check_buffers(model: nn.Module) -> None:
    """Raise ModelError for buffers that the engine cannot copy."""
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or buffer.is_nested:
            raise ModelError(
                f"the buffer {name} is of layout {buffer.layout}, and the engine copies dense ones alone: make it dense "
                "(to_dense()), or give it to forward as an argument."
            )


def _check_memory(model: nn.Module) -> None:
    """Raise ModelError if a trained parameter shares memory with another one or with a buffer.

    They would be trained apart: the engine moves each parameter to memory of its own.
    """
    in_storage: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor) in (nn.Parameter, Tensor) and tensor.numel() and not tensor.is_meta:
            in_storage[tensor.untyped_storage().data_ptr()].append((name, tensor))
    for neighbours in in_storage.values():
        reaching: list[tuple[str, Tensor]] = []  # of those before, beyond where the next one begins
        for name, tensor in sorted(neighbours, key=lambda named: _span(named[1]).start):
            reaching = [before for before in reaching if _span(before[1]).stop > _span(tensor).start]
            for other_name, other in reaching:
                if (tensor.requires_grad or other.requires_grad) and _share_elements(tensor, other):
                    raise ModelError(
                        f"{other_name} and {name} share memory, and the engine moves each to memory of its own: they would "
                        "be trained apart. Tie them as one parameter (module.weight = other.weight), or let each have its "
                        "own values (tensor.data = tensor.data.clone())."
                    )
            reaching.append((name, tensor))


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether an element of `one` is an element of `other`, where their spans of one storage overlap."""
    if (one.is_contiguous() and other.is_contiguous()) or one.dtype != other.dtype:
        return True
    places = torch.arange(max(_span(one).stop, _span(other).stop) // one.itemsize)
    at_one, at_other = (places.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (one, other))
    return bool(torch.isin(at_one, at_other).any())


def _span(tensor: Tensor) -> range:
    """Return the bytes of its storage from the first element of `tensor` to its last one."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(first * tensor.itemsize, (last + 1) * tensor.itemsize)


def cast_buffers(model: nn.Module, config: Config) -> None:
    """Cast floating-point buffers to the ds_config's `buffer_dtype`, but not those that the model keeps in fp32."""
    if config.buffer_dtype is None:
        return
    from deepspeed.runtime.keep_in_fp32 import buffers_to_keep_in_fp32, keep_in_fp32_pattern

    pattern = keep_in_fp32_pattern(model, config.values["data_types.keep_in_fp32_modules"], config.compute_dtype)
    kept = set() if pattern is None else {id(buffer) for buffer in buffers_to_keep_in_fp32(model, pattern)}
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.itemsize > 1 and id(buffer) not in kept:
            buffer.data = buffer.data.to(config.buffer_dtype)


def _switch_off_checkpointing(model: nn.Module) -> None:
    """Layers are recomputed anyway; transformers' own checkpointing would recompute them a second time."""
    for module in model.modules():
        if vars(module).get("gradient_checkpointing") is True:
            vars(module)["gradient_checkpointing"] = False
