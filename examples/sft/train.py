"""Supervised fine-tuning by TRL: HarmonyMixin before SFTTrainer, and nothing else changes.

    python examples/sft/train.py                          # a small Llama from scratch, no download
    python examples/sft/train.py --model path/to/model    # a model that you have

Prompts are the first words of sentences from news articles (from the gensim package), completions what follows.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from harmony_ds.integrations.transformers import HarmonyMixin

PROMPT_WORDS = 6
VOCABULARY = 2048
END, PAD = "<|end|>", "<|pad|>"


class HarmonySFTTrainer(HarmonyMixin, SFTTrainer):
    """TRL's SFTTrainer, trained by harmony_ds."""


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train and save; return the logged losses."""
    options = parse_options(arguments)
    sentences = load_sentences()
    model, tokenizer = load_model(options, sentences)
    trainer = HarmonySFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(
            output_dir=str(options.out),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=8,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            max_length=options.tokens,
            logging_steps=1,
            bf16=False,
            gradient_checkpointing=False,  # the engine recomputes layers itself
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows_of(sentences),
        ds_config={"harmony": {"device_memory_gib": options.budget_gib}},
    )
    trainer.train()
    print(trainer.harmony_engine.swap_report())
    trainer.save_model()
    print(f"saved the model in {options.out}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Supervised fine-tuning by TRL.")
    parser.add_argument("--model", help="name or path of a causal language model (default: a new small Llama)")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample at most (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    # On a GPU, cuBLAS's workspaces and the allocator's segments take up to 0.38 GiB whatever the model.
    budget_gib = 0.75 if torch.cuda.is_available() else 0.02
    parser.add_argument("--budget-gib", type=float, default=budget_gib, help="device memory (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("outputs/sft"), help="for the model (default: %(default)s)")
    return parser.parse_args(arguments)


def load_model(options: argparse.Namespace, sentences: Sequence[str]) -> tuple[Any, Any]:
    """Return the model to fine-tune, in fp32, and its tokenizer."""
    if options.model is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(options.model)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(sentences, VOCABULARY, special_tokens=[END, PAD], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token=END, pad_token=PAD)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            max_position_embeddings=options.tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            use_cache=False,
        )
    )
    return model, tokenizer


def load_sentences() -> list[str]:
    """Return the sentences of 300 news articles."""
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise SystemExit("error: no text: the package gensim is not installed: pip install gensim")
    text = Path(spec.origin).parent / "test" / "test_data" / "lee_background.cor"
    return re.split(r"(?<=[.!?])\s+", text.read_text(encoding="utf-8").strip())


def rows_of(sentences: Sequence[str]) -> Dataset:
    """Return rows of "prompt" and "completion"."""
    words = [sentence.split() for sentence in sentences]
    return Dataset.from_list(
        [
            {"prompt": " ".join(one[:PROMPT_WORDS]), "completion": " " + " ".join(one[PROMPT_WORDS:])}
            for one in words
            if len(one) > PROMPT_WORDS
        ]
    )


if __name__ == "__main__":
    main()
