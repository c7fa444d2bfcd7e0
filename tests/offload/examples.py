"""Small models, decomposed and moved into host slabs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harmony_ds.decomposer import Decomposition, find_layers
from harmony_ds.device import CpuDevice
from harmony_ds.offload.host_store import HostStore
from tests.families import build_seeded


def odd_sizes(layers: int = 3) -> nn.Module:
    """Layers of 3 x 5 and 5 elements: nothing but padding makes them start at multiples of 64 bytes."""
    return build_seeded(lambda: nn.Sequential(*(nn.Linear(5, 3 if i == layers - 1 else 5) for i in range(layers))))


@dataclass(frozen=True)
class Stored:
    """A model in host slabs."""

    model: nn.Module
    decomposition: Decomposition
    store: HostStore
    device: CpuDevice


def stored(model: nn.Module, dtype: torch.dtype = torch.float32) -> Stored:
    device = CpuDevice()
    decomposition = find_layers(model)
    return Stored(model, decomposition, HostStore(model, decomposition, dtype, device), device)


def gradients_for(parameters: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    """Return a random gradient for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
