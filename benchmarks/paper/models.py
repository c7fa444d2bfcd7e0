"""The paper's four architectures in sizes that a CPU trains in a moment.

BERT and GPT-2 are transformers' own. VGG and ResNet are plain modules: nothing in them knows that they will be swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
MakeBatch = Callable[[int, torch.Generator], Batch]


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and the micro-batches that it takes: of so many rows, from a random source."""

    name: str
    build: Callable[[], nn.Module]
    batch: MakeBatch

    def seeded(self) -> nn.Module:
        """Return the model, with the same weights at every call."""
        torch.manual_seed(0)
        return self.build().train()

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.build().train()

    def batches(self, rows: int, count: int, seed: int = 1) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(rows, generator) for _ in range(count)]


def gpt2(layers: int, hidden: int, heads: int, tokens: int, vocabulary: int) -> Model:
    """Return a language model, its head not tied to its embedding (as in the original's runs), without dropout."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes: dict[str, Any] = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": tokens}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        rest = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **rest, use_cache=False, tie_word_embeddings=False))

    def batch(rows: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(vocabulary, (rows, tokens), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return Model(f"GPT-2, {layers} layers", build, batch)


def bert(layers: int, hidden: int, heads: int, tokens: int, vocabulary: int) -> Model:
    """Return a classifier of sequences, without dropout."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
        sizes |= {"intermediate_size": 4 * hidden, "max_position_embeddings": tokens, "vocab_size": vocabulary}
        dropout: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        return BertForSequenceClassification(BertConfig(**sizes, **dropout, num_labels=2))

    def batch(rows: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(vocabulary, (rows, tokens), generator=generator)
        return {"input_ids": ids, "labels": torch.randint(2, (rows,), generator=generator)}

    return Model(f"BERT, {layers} layers", build, batch)


class Classifier(nn.Module):
    """The loss of images (B, 3, S, S) with labels (B,), by layers that end in (B, classes)."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = images
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(hidden, labels)


def vgg(more: int, narrow: int, pixels: int, hidden: int, classes: int) -> nn.Module:
    """Return VGG-16 with `more` convolutions in each stage and channels divided by `narrow`."""
    layers: list[nn.Module] = []
    channels = 3
    for depth, width in zip((2, 2, 3, 3, 3), (64, 128, 256, 512, 512), strict=True):
        for place in range(depth + more):
            convolution = nn.Conv2d(channels, width // narrow, 3, padding=1)
            # Without it the activations of a deep stack vanish, and arithmetic on denormal numbers is slow on CPUs.
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            pooling = [nn.MaxPool2d(2)] if place == depth + more - 1 else []
            layers.append(nn.Sequential(convolution, nn.ReLU(), *pooling))
            channels = width // narrow
    sizes = (channels * (pixels >> 5) ** 2, hidden, hidden)
    heads = [nn.Sequential(nn.Flatten(), nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
    return Classifier([*layers, *heads, nn.Linear(hidden, classes)])


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalization beside a shortcut; the first may halve the image."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(a, width, 3, s, 1, bias=False) for a, s in ((channels, stride), (width, 1))]
        norms = [nn.BatchNorm2d(width) for _ in range(2)]
        self.body = nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1])
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.shortcut(images))


def resnet(depth: int, narrow: int, classes: int) -> nn.Module:
    """Return a ResNet of `depth` basic blocks in each of four stages, channels divided by `narrow`."""
    channels = 64 // narrow
    stem = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    layers: list[nn.Module] = [nn.Sequential(*stem)]
    for stage, width in enumerate((64, 128, 256, 512)):
        for place in range(depth):
            layers.append(BasicBlock(channels, width // narrow, 2 if stage and not place else 1))
            channels = width // narrow
    return Classifier([*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))])


def images(pixels: int, classes: int) -> MakeBatch:
    def batch(rows: int, generator: torch.Generator) -> Batch:
        pictures = torch.randn(rows, 3, pixels, pixels, generator=generator)
        return {"images": pictures, "labels": torch.randint(classes, (rows,), generator=generator)}

    return batch


SMALL = {
    "BERT": bert(8, 256, 4, 64, 1024),
    "GPT-2": gpt2(8, 256, 4, 64, 1024),
    "VGG": Model("VGG, 31 layers", lambda: vgg(3, 2, 32, 256, 10), images(32, 10)),
    "ResNet": Model("ResNet, 26 layers", lambda: resnet(3, 2, 10), images(16, 10)),
}
"""What is measured, by architecture."""
