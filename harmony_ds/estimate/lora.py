"""Give a model on the meta device LoRA adapters: its own parameters are frozen, those of the adapters train.

Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models (ICLR 2022).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from harmony_ds.errors import ConfigError


def add_adapters(model: nn.Module, rank: int) -> None:
    """Put an adapter of `rank` beside every linear layer of `model` but its head, by peft, and freeze the rest, in place.

    Raises:
        ConfigError: peft is not installed, the model has no linear layers, or the rank exceeds the sides of all of them.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("--lora puts adapters into the model by peft: pip install peft") from error
    layers = linear_layers(model)
    most = max(min(layer.in_features, layer.out_features) for layer in layers.values())
    if rank > most:
        raise ConfigError(
            f"--lora {rank} is more than the rank of any linear layer of {type(model).__name__}, which is {most} at most: "
            "such adapters have more parameters than what they stand beside. Take a lower one, such as --lora 16."
        )
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, target_modules=list(layers)), model)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of `model` by name, without the head that makes logits of them.

    Raises:
        ConfigError: there are none.
    """
    find_head: Any = getattr(model, "get_output_embeddings", None)  # Hugging Face's models have it
    head = None if find_head is None else find_head()
    modules = model.named_modules()
    found = {name: module for name, module in modules if isinstance(module, nn.Linear) and module is not head}
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no linear layers (torch.nn.Linear) that adapters could stand beside."
        )
    return found
