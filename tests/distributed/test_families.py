"""Several processes train families of Hugging Face models to the bits of plain PyTorch."""

from __future__ import annotations

import pytest

from tests.distributed.processes import run
from tests.distributed.training import Training, differences, train_all, train_plainly
from tests.families import FAMILIES

_TIED = frozenset("gpt2 gemma3 gemma4 opt bert roberta t5 bart whisper mamba".split())
"""Embeddings and head are one parameter, whose gradient comes from two packs: its additions are regrouped."""


def _training(place: int, name: str) -> Training:
    """With dropout; clipping, half precision, shares and both ways to reduce in turn. What is regrouped is compared
    in fp32, without Adam, which makes large numbers of gradients that are nothing but rounding, and clipped: after a long
    step of gemma4's, the last bit of an embedding is the fourth digit of plain PyTorch's next gradients.
    """
    tied = name in _TIED
    return Training(
        model=name,
        steps=2,
        clip=0.05 if tied or place % 2 else 0.0,
        bf16=place % 3 == 2 and not tied,
        optimizer="SGD" if tied else "AdamW",
        harmony={"weights": "whole" if place // 2 % 2 else "share", "reduce": "device" if place // 4 % 2 else "host"},
    )


@pytest.mark.parametrize(("size", "some"), [(2, slice(None)), (3, slice(None)), (4, slice(1, None, 4))])
def test_families_are_trained_as_in_plain_pytorch(size: int, some: slice) -> None:
    chosen = [_training(place + size, family.name) for place, family in enumerate(FAMILIES)][some]
    found = run(size, train_all, chosen, limit_s=400)
    told = {}
    for place, training in enumerate(chosen):
        relative = 2e-6 if training.model in _TIED else 0.0
        of_ranks = [results[place] for results in found]
        told[training.model] = differences(of_ranks, train_plainly(training, size), relative)
    assert not {model: what for model, what in told.items() if what}
