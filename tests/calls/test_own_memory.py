"""Which tensors in one memory have elements in common."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from harmony_ds.calls.own_memory import may_overlap


def a_view(generator: random.Random, base: Tensor) -> Tensor:
    for _ in range(generator.randrange(5)):
        if not base.dim() or not base.numel():
            break
        dim = generator.randrange(base.dim())
        size = base.shape[dim]
        match generator.randrange(6):
            case 0:
                base = base.select(dim, generator.randrange(size))
            case 1:
                base = base.transpose(dim, generator.randrange(base.dim()))
            case 2:
                base = base.unfold(dim, min(2, size), 1)
            case 3:
                base = base.unsqueeze(dim).expand(*base.shape[:dim], 2, *base.shape[dim:])
            case 4:
                begin = generator.randrange(size)
                base = base[(slice(None),) * dim + (slice(begin, None, generator.randrange(1, 3)),)]
            case _:
                begin = generator.randrange(size)
                base = base.narrow(dim, begin, generator.randrange(size - begin + 1))
    return base


def test_what_is_said_to_have_nothing_in_common_has_nothing() -> None:
    generator = random.Random(0)
    apart = 0
    for _ in range(20_000):
        base = torch.arange(48).view(2, 4, 6) if generator.random() < 0.7 else torch.arange(30).view(5, 6)
        a, b = a_view(generator, base), a_view(generator, base)
        if not may_overlap(a, b):
            apart += 1
            assert set(a.flatten().tolist()).isdisjoint(b.flatten().tolist()), (
                a.shape,
                a.stride(),
                b.shape,
                b.stride(),
            )
    assert apart > 1_000
