"""Tiny variants of the Hugging Face families that people fine-tune, and a micro-batch for each.

Nothing is downloaded: models are made from configurations, with random weights. Sizes: width 32, 2 or 3 layers, 96 words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
)

Batch = dict[str, Any]
WORDS = 96
IGNORED = -100


@dataclass(frozen=True)
class Variant:
    """A model, made by `build`, and its micro-batch number `index` by `batch(index)`."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


def random(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def words(index: int, rows: int = 2, length: int = 12, least: int = 3) -> Tensor:
    """(rows, length) ids, without special ones."""
    return torch.randint(least, WORDS - 4, (rows, length), generator=random(index))


# ---- micro-batches


def causal(index: int, length: int = 12) -> Batch:
    ids = words(index, length=length - 2 * (index % 2))
    mask = torch.ones_like(ids)
    mask[1, -2:] = index % 2
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def masked(index: int, length: int = 12) -> Batch:
    batch = causal(index, length)
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[:, ::3] = batch["input_ids"][:, ::3]
    return {**batch, "labels": labels}


def classified(index: int) -> Batch:
    return {**causal(index), "labels": torch.randint(0, 2, (2,), generator=random(index))}


def translated(index: int) -> Batch:
    batch = causal(index)
    return {**batch, "labels": words(index + 500, length=8)}


def image(index: int, size: int = 32) -> Batch:
    pixels = torch.randn(2, 3, size, size, generator=random(index))
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (2,), generator=random(index))}


def sound(index: int, samples: int = 1200, ctc: bool = True) -> Batch:
    values = torch.randn(2, samples, generator=random(index))
    labels = words(index, length=3) if ctc else torch.randint(0, 2, (2,), generator=random(index))
    return {"input_values": values, "labels": labels}


def speech(index: int, frames: int = 120) -> Batch:
    features = torch.randn(2, 8, frames, generator=random(index))
    return {"input_features": features, "labels": words(index, length=6)}


def speech_rows(index: int) -> Batch:
    features = torch.randn(2, 40, 8, generator=random(index))
    return {"input_features": features, "labels": words(index, length=6)}


IMAGE, VIDEO, VISION_START, VISION_END = WORDS - 4, WORDS - 3, WORDS - 2, WORDS - 1


def seen(index: int) -> Batch:
    """Text about two pictures of 4 x 4 patches, which come to four words each (Qwen-VL)."""
    ids = words(index, length=14)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = VISION_START, IMAGE, VISION_END
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=random(index))
    grid = torch.tensor([[1, 4, 4]] * 2)
    kinds = (ids == IMAGE).int()
    labels = ids.masked_fill(kinds.bool(), IGNORED)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
        "labels": labels,
    }


# ---- models

TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
SEQ2SEQ = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 2,
}
AUDIO = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 8),
    "conv_stride": (5, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": False,
    "mask_time_length": 4,
    "mask_time_prob": 0.3,
    "mask_feature_length": 4,
    "mask_feature_prob": 0.2,
    "mask_feature_min_masks": 0,
    "ctc_loss_reduction": "mean",
    "num_labels": 2,
}
QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 10,
}


def built(auto: Any, model_type: str, settings: dict[str, Any], **more: Any) -> nn.Module:
    """The model of `model_type` in training mode; the same bits at each call."""
    torch.manual_seed(20)
    config = AutoConfig.for_model(model_type, **{**settings, **more})
    config.use_cache = False
    model: nn.Module = auto.from_config(config, attn_implementation="eager" if model_type in _EAGER else None)
    return model.train()


_EAGER = ("big_bird",)


def with_lora(build: Callable[[], nn.Module]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = build()
    torch.manual_seed(21)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)).train()


Spec = tuple[str, str, dict[str, Any]]
"""A name, a model type, and settings beside those of its kind."""

CAUSAL: list[Spec] = [
    ("gpt2", "gpt2", {}),
    ("gpt-neo", "gpt_neo", {"attention_types": [[["global", "local", "global"], 1]]}),
    ("gptj", "gptj", {"rotary_dim": 4}),
    ("gpt-neox", "gpt_neox", {}),
    ("opt", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("bloom", "bloom", {}),
    ("falcon", "falcon", {}),
    ("mpt", "mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    ("codegen", "codegen", {"rotary_dim": 4}),
    ("stablelm", "stablelm", {"num_key_value_heads": 4}),
    ("persimmon", "persimmon", {}),
    ("phi", "phi", {}),
    ("xglm", "xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    ("biogpt", "biogpt", {}),
]
CAUSAL_GROUPED: list[Spec] = [
    ("llama", "llama", {}),
    (
        "llama with dynamic NTK",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    ("mistral", "mistral", {"sliding_window": 6}),
    ("mixtral", "mixtral", EXPERTS),
    ("qwen2", "qwen2", {}),
    ("qwen2-moe", "qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ("qwen3", "qwen3", {}),
    ("qwen3-moe", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ("phi3", "phi3", {}),
    ("phi3 with longrope", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 10}),
    (
        "phimoe with longrope",
        "phimoe",
        {**EXPERTS, "rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.0}},
    ),
    ("gemma", "gemma", {}),
    ("gemma2", "gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 6}),
    ("gemma3", "gemma3_text", {"query_pre_attn_scalar": 8, "sliding_window": 6}),
    ("olmo2", "olmo2", {}),
    ("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("starcoder2", "starcoder2", {}),
    ("cohere", "cohere", {}),
    ("granite", "granite", {}),
    ("granitemoe", "granitemoe", EXPERTS),
    ("glm4", "glm4", {}),
    ("smollm3", "smollm3", {}),
    ("nemotron", "nemotron", {}),
    ("ernie4.5", "ernie4_5", {}),
    (
        "deepseek-v3",
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "head_dim": 4,
            "num_key_value_heads": 4,
        },
    ),
    ("mamba", "mamba", {"state_size": 4}),
]
ENCODERS: list[Spec] = [
    ("bert", "bert", {}),
    ("roberta", "roberta", {}),
    ("distilbert", "distilbert", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    ("albert", "albert", {"embedding_size": 16}),
    ("electra", "electra", {"embedding_size": 16}),
    ("deberta-v2", "deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}),
    ("mpnet", "mpnet", {}),
    ("modernbert", "modernbert", {"local_attention": 4}),
    ("big-bird", "big_bird", {"attention_type": "original_full"}),
]
FUNNEL: list[Spec] = [
    (
        "funnel",
        "funnel",
        {"vocab_size": WORDS, "block_sizes": [1, 1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48},
    )
]
TRANSLATORS: list[Spec] = [
    ("bart", "bart", {}),
    ("mbart", "mbart", {}),
    ("pegasus", "pegasus", {}),
    ("marian", "marian", {}),
    ("m2m-100", "m2m_100", {}),
    (
        "nllb-moe",
        "nllb-moe",
        {"num_experts": 4, "expert_capacity": 8, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
]
T5S: list[Spec] = [
    ("t5", "t5", {}),
    ("mt5", "mt5", {}),
    ("longt5", "longt5", {"encoder_attention_type": "local", "local_radius": 4}),
    (
        "switch-transformers",
        "switch_transformers",
        {"num_experts": 4, "expert_capacity": 8, "num_sparse_encoder_layers": 1},
    ),
]
PICTURES: list[Spec] = [
    ("vit", "vit", {}),
    ("beit", "beit", {}),
    ("dinov2", "dinov2", {}),
]
OWN_PICTURES: list[Spec] = [
    (
        "swin",
        "swin",
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4, "image_size": 32},
    ),
    (
        "swinv2",
        "swinv2",
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4, "image_size": 32},
    ),
    ("convnext", "convnext", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    ("resnet", "resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    ("mobilenet-v2", "mobilenet_v2", {"depth_multiplier": 0.25, "image_size": 32}),
]
SOUNDS: list[Spec] = [
    ("wav2vec2", "wav2vec2", {}),
    ("hubert", "hubert", {}),
    ("wavlm", "wavlm", {}),
    ("unispeech", "unispeech", {}),
    ("unispeech-sat", "unispeech-sat", {}),
    ("sew", "sew", {"squeeze_factor": 2}),
    ("data2vec-audio", "data2vec-audio", {}),
]
QWENS: list[Spec] = [
    ("qwen2-vl", "qwen2_vl", {"vision_config": QWEN_VISION}),
    ("qwen2.5-vl", "qwen2_5_vl", {"vision_config": {**QWEN_VISION, "hidden_size": 32}}),
    ("qwen3-vl", "qwen3_vl", {"vision_config": QWEN_VISION}),
]
WHISPER = {
    **SEQ2SEQ,
    "num_mel_bins": 8,
    "max_source_positions": 60,
    "max_target_positions": 32,
    "apply_spec_augment": True,
    "mask_time_prob": 0.3,
    "mask_time_length": 4,
    "mask_feature_prob": 0.3,
    "mask_feature_length": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
LISTENERS: list[tuple[str, str, dict[str, Any], Callable[[int], Batch]]] = [
    ("whisper with SpecAugment", "whisper", WHISPER, speech),
    (
        "speech-to-text",
        "speech_to_text",
        {
            **SEQ2SEQ,
            "input_feat_per_channel": 8,
            "input_channels": 1,
            "conv_channels": 16,
            "max_source_positions": 64,
            "max_target_positions": 32,
        },
        speech_rows,
    ),
]


def _of(
    kind: str, auto: Any, specs: list[Spec], settings: dict[str, Any], batch: Callable[[int], Batch]
) -> Iterator[Variant]:
    for name, model_type, more in specs:
        yield Variant(name, kind, partial(built, auto, model_type, settings, **more), batch)


def _qwens() -> Iterator[Variant]:
    text = {**GROUPED, "rope_parameters": MROPE, "rope_scaling": MROPE}
    for name, model_type, more in QWENS:
        settings = {"text_config": text, **QWEN_IDS, **more}
        build = partial(built, AutoModelForImageTextToText, model_type, settings)
        yield Variant(name, "text about pictures", build, seen)
        yield Variant(f"{name} with LoRA", "text about pictures", partial(with_lora, build), seen)


def variants() -> list[Variant]:
    """All of them."""
    found = [
        *_of("causal", AutoModelForCausalLM, CAUSAL, TEXT, causal),
        *_of("causal", AutoModelForCausalLM, CAUSAL_GROUPED, GROUPED, causal),
        *_of("masked", AutoModelForMaskedLM, ENCODERS, TEXT, masked),
        *_of("masked", AutoModelForMaskedLM, FUNNEL, {}, masked),
        *_of("classified", AutoModelForSequenceClassification, ENCODERS[:1], TEXT, classified),
        *_of("translated", AutoModelForSeq2SeqLM, TRANSLATORS, SEQ2SEQ, translated),
        *_of("translated", AutoModelForSeq2SeqLM, T5S, T5, translated),
        *_of("pictures", AutoModelForImageClassification, PICTURES, VISION, image),
        *_of("pictures", AutoModelForImageClassification, OWN_PICTURES, {"num_labels": 2}, image),
        *_of("sounds", AutoModelForCTC, SOUNDS, AUDIO, sound),
        *_of("sounds", AutoModelForAudioClassification, SOUNDS[:1], AUDIO, partial(sound, ctc=False)),
        *_qwens(),
    ]
    for name, model_type, settings, batch in LISTENERS:
        found.append(Variant(name, "speech", partial(built, AutoModelForSpeechSeq2Seq, model_type, settings), batch))
    adapted = [one for one in found if one.name in ("gpt2", "llama", "phi3 with longrope", "t5")]
    return found + [Variant(f"{v.name} with LoRA", v.kind, partial(with_lora, v.build), v.batch) for v in adapted]
