"""A tiny model, a tokenizer of twelve words, and rows of text, all made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS = ["<pad>", "<eos>", "<unk>", *"the a cat dog sat ran here there very".split()]
VOCABULARY = 61


def llama(labels: int | None = None) -> nn.Module:
    """Return a Llama of three layers, the same at every call; with `labels`, a classifier."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, use_cache=False, pad_token_id=0, eos_token_id=1, **sizes)
    if labels is None:
        return LlamaForCausalLM(config)
    config.num_labels = labels
    return LlamaForSequenceClassification(config)


def tokenizer() -> Any:
    """Return a tokenizer with a token for each of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
    )


def token_rows(count: int = 22) -> list[dict[str, Tensor]]:
    """Return rows of 5 to 9 tokens, of which some do not count for the loss."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row in range(count):
        ids = torch.randint(3, VOCABULARY, (5 + row % 5,), generator=generator)
        labels = ids.clone()
        labels[: row % 3] = -100
        rows.append({"input_ids": ids, "labels": labels, "length": len(ids)})
    return rows


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch of rows, padded to the longest."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True),
    }
