"""A tiny language model, its data and its command line, for these scripts."""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "optim": "adamw_torch",
}


def model() -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
        )
    )


def rows(count: int = 16) -> Dataset:
    ids = [[1 + (7 * row + column) % 63 for column in range(12)] for row in range(count)]
    return Dataset.from_list([{"input_ids": one, "attention_mask": [1] * 12, "labels": one} for one in ids])


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "the", "dog", "cat", "sat", "ran", "here", "there"]
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    parser.add_argument("--output_dir", required=True)
    return parser.parse_args()
