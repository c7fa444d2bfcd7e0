"""The paper's four models, in the sizes that it trains and in sizes that a CPU trains in a moment.

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


class ConvLayer(nn.Module):
    """A 3 x 3 convolution and its ReLU; `halve` pools behind it. (B, C, S, S) -> (B, width, S, S) or half of S."""

    def __init__(self, channels: int, width: int, halve: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, width, 3, padding=1)
        # Without it the activations of a deep stack vanish, and arithmetic on denormal numbers is slow on CPUs.
        nn.init.kaiming_normal_(self.convolution.weight, nonlinearity="relu")
        self.halve = halve

    def forward(self, images: Tensor) -> Tensor:
        images = F.relu(self.convolution(images))
        return F.max_pool2d(images, 2) if self.halve else images


class Vgg(nn.Module):
    """VGG with any number of convolutions in its five stages.

    Args:
        depths: convolutions per stage; (2, 2, 3, 3, 3) is VGG-16, and 80 more in each VGG-416.
        widths: channels per stage.
        hidden: of the two fully connected layers before the last.
    """

    def __init__(
        self, depths: tuple[int, ...], widths: tuple[int, ...], hidden: int, classes: int, pixels: int
    ) -> None:
        super().__init__()
        layers, channels = [], 3
        for depth, width in zip(depths, widths, strict=True):
            for place in range(depth):
                layers.append(ConvLayer(channels, width, halve=place == depth - 1))
                channels = width
        self.features = nn.ModuleList(layers)
        sizes = (channels * (pixels >> len(depths)) ** 2, hidden, hidden, classes)
        self.classifier = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of images (B, 3, pixels, pixels) with labels (B,)."""
        for layer in self.features:
            images = layer(images)
        hidden = images.flatten(1)
        for layer in self.classifier[:-1]:
            hidden = F.relu(layer(hidden))
        return F.cross_entropy(self.classifier[-1](hidden), labels)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalization beside a shortcut; the first may halve the image."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.normalization1 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.normalization2 = nn.BatchNorm2d(width)
        same = channels == width and stride == 1
        self.shortcut = None if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.normalization1(self.convolution1(images)))
        hidden = self.normalization2(self.convolution2(hidden))
        return F.relu(hidden + (images if self.shortcut is None else self.shortcut(images)))


class Stem(nn.Module):
    """What ResNet does to images before its blocks; `large` ones are made four times smaller."""

    def __init__(self, width: int, large: bool) -> None:
        super().__init__()
        size, stride = (7, 2) if large else (3, 1)
        self.convolution = nn.Conv2d(3, width, size, stride, padding=size // 2, bias=False)
        self.normalization = nn.BatchNorm2d(width)
        self.large = large

    def forward(self, images: Tensor) -> Tensor:
        images = F.relu(self.normalization(self.convolution(images)))
        return F.max_pool2d(images, 3, 2, padding=1) if self.large else images


class ResNet(nn.Module):
    """ResNet of basic blocks.

    Args:
        depths: blocks per stage; (2, 2, 2, 2) is ResNet-18, and (128, 128, 128, 128) ResNet-1026.
        widths: channels per stage.
    """

    def __init__(self, depths: tuple[int, ...], widths: tuple[int, ...], classes: int, large: bool) -> None:
        super().__init__()
        self.stem = Stem(widths[0], large)
        blocks, channels = [], widths[0]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for place in range(depth):
                blocks.append(BasicBlock(channels, width, 2 if stage and not place else 1))
                channels = width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of images (B, 3, S, S) with labels (B,)."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden.mean((2, 3))), labels)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and the micro-batches that it takes.

    Attributes:
        build: the model in training mode, on the default device.
        batch: from rows, torch device and random source to a micro-batch.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, str, torch.Generator | None], Batch]

    def seeded(self) -> nn.Module:
        """The same weights at every call."""
        torch.manual_seed(0)
        return self.build().train()

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.build().train()

    def batches(self, rows: int, count: int, seed: int = 1) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(rows, "cpu", generator) for _ in range(count)]


def gpt2(layers: int, hidden: int, heads: int, tokens: int, vocabulary: int, name: str | None = None) -> Model:
    """Language model, its head not tied to its embedding (as in the original's runs), without dropout."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers,
                n_embd=hidden,
                n_head=heads,
                n_positions=tokens,
                vocab_size=vocabulary,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
                tie_word_embeddings=False,
            )
        )

    def batch(rows: int, device: str, generator: torch.Generator | None) -> Batch:
        ids = torch.randint(vocabulary, (rows, tokens), generator=generator, device=device)
        return {"input_ids": ids, "labels": ids}

    return Model(name or f"GPT-2, {layers} layers", build, batch)


def bert(layers: int, hidden: int, heads: int, tokens: int, vocabulary: int, name: str | None = None) -> Model:
    """Sequence classification, without dropout."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        config: Any = BertConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=tokens,
            vocab_size=vocabulary,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=2,
        )
        return BertForSequenceClassification(config)

    def batch(rows: int, device: str, generator: torch.Generator | None) -> Batch:
        return {
            "input_ids": torch.randint(vocabulary, (rows, tokens), generator=generator, device=device),
            "labels": torch.randint(2, (rows,), generator=generator, device=device),
        }

    return Model(name or f"BERT, {layers} layers", build, batch)


def _images(pixels: int, classes: int) -> Callable[[int, str, torch.Generator | None], Batch]:
    def batch(rows: int, device: str, generator: torch.Generator | None) -> Batch:
        return {
            "images": torch.randn(rows, 3, pixels, pixels, generator=generator, device=device),
            "labels": torch.randint(classes, (rows,), generator=generator, device=device),
        }

    return batch


def vgg(more: int, narrow: int, pixels: int, hidden: int, classes: int, name: str) -> Model:
    """VGG-16 with `more` convolutions in each stage and channels divided by `narrow`."""
    depths = tuple(depth + more for depth in (2, 2, 3, 3, 3))
    widths = tuple(width // narrow for width in (64, 128, 256, 512, 512))
    return Model(name, lambda: Vgg(depths, widths, hidden, classes, pixels), _images(pixels, classes))


def resnet(depth: int, narrow: int, pixels: int, classes: int, name: str) -> Model:
    """`depth` blocks in each of four stages, channels divided by `narrow`."""
    widths = tuple(width // narrow for width in (64, 128, 256, 512))
    large = pixels >= 128
    return Model(name, lambda: ResNet((depth,) * 4, widths, classes, large), _images(pixels, classes))


SMALL = {
    "BERT": bert(8, 256, 4, 64, 1024),
    "GPT-2": gpt2(8, 256, 4, 64, 1024),
    "VGG": vgg(3, 2, 32, 256, 10, "VGG, 31 layers"),
    "ResNet": resnet(3, 2, 16, 10, "ResNet, 26 layers"),
}
"""By architecture: what is measured."""
