"""Tiny variants of the Hugging Face families that people fine-tune (variants.json), and a micro-batch for each.

Nothing is downloaded: models are made from configurations, with random weights. Sizes: width 32, 2 or 3 layers, 96 words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Any]
WORDS = 96
IMAGE, VISION_START, VISION_END = WORDS - 4, WORDS - 2, WORDS - 1
IGNORED = -100


@dataclass(frozen=True)
class Variant:
    """A model, made by `build`, and its micro-batch number `index` by `batch(index)`."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


def variants() -> Iterator[Variant]:
    """Yield all of them, some also with LoRA."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for one in table["variants"]:
        settings = {**table["bases"].get(one.get("base"), {}), **one["settings"]}
        build = partial(built, getattr(transformers, one["auto"]), one["model_type"], settings)
        yield Variant(one["name"], one["kind"], build, BATCHES[one["batch"]])
        if one.get("lora"):
            yield Variant(f"{one['name']} with LoRA", one["kind"], partial(with_lora, build), BATCHES[one["batch"]])


def built(auto: Any, model_type: str, settings: dict[str, Any]) -> nn.Module:
    """Return the model in training mode; the same bits at each call."""
    torch.manual_seed(20)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config.use_cache = False
    model: nn.Module = auto.from_config(config, attn_implementation="eager" if model_type == "big_bird" else None)
    return model.train()


def with_lora(build: Callable[[], nn.Module]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = build()
    torch.manual_seed(21)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)).train()


def random(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def words(index: int, rows: int = 2, length: int = 12, least: int = 3) -> Tensor:
    """Return (rows, length) ids, without special ones."""
    return torch.randint(least, WORDS - 4, (rows, length), generator=random(index))


def classes(index: int) -> Tensor:
    return torch.randint(0, 2, (2,), generator=random(index))


def causal(index: int) -> Batch:
    ids = words(index, length=12 - 2 * (index % 2))
    mask = torch.ones_like(ids)
    mask[1, -2:] = index % 2
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def masked(index: int) -> Batch:
    batch = causal(index)
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[:, ::3] = batch["input_ids"][:, ::3]
    return {**batch, "labels": labels}


def sound(index: int) -> Batch:
    return {"input_values": torch.randn(2, 1200, generator=random(index)), "labels": words(index, length=3)}


def speech(index: int, *shape: int) -> Batch:
    return {"input_features": torch.randn(2, *shape, generator=random(index)), "labels": words(index, length=6)}


def pictures_and_text(index: int) -> Batch:
    """Return text about two pictures of 4 x 4 patches, which come to four words each (Qwen-VL)."""
    ids = words(index, length=14)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = VISION_START, IMAGE, VISION_END
    kinds = (ids == IMAGE).int()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=random(index)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": kinds,
        "labels": ids.masked_fill(kinds.bool(), IGNORED),
    }


BATCHES: dict[str, Callable[[int], Batch]] = {
    "causal": causal,
    "masked": masked,
    "classified": lambda index: {**causal(index), "labels": classes(index)},
    "translated": lambda index: {**causal(index), "labels": words(index + 500, length=8)},
    "image": lambda n: {"pixel_values": torch.randn(2, 3, 32, 32, generator=random(n)), "labels": classes(n)},
    "sound": sound,
    "sound_class": lambda index: {**sound(index), "labels": classes(index)},
    "speech": lambda index: speech(index, 8, 120),
    "speech_rows": lambda index: speech(index, 40, 8),
    "pictures_and_text": pictures_and_text,
}
