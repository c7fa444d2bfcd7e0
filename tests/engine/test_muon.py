"""DeepSpeed's Muon, which a ds_config cannot name here, as an optimizer object: its steps are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from tests.engine.drive import config_of, engine_for, family, groups_of, means_of, seed_of
from tests.oracle import assert_same, train_plainly

LLAMA = family("llama")


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

    own = list(parameters)
    groups = [
        {"params": [p for p in own if (p.ndim == 2) is matrices], "use_muon": matrices, "lr": 0.01}
        for matrices in (True, False)
    ]
    made: torch.optim.Optimizer = SingleDeviceMuonWithAuxAdam(groups)
    return made


@pytest.mark.parametrize("clip", [None, 0.5])
def test_muon_beside_adam(clip: float | None) -> None:
    groups = groups_of(LLAMA, 2, 3)
    with torch.compiler.set_stance("force_eager"):  # it compiles its iteration, for minutes
        plain = LLAMA.build(0.1)
        losses = train_plainly(plain, groups, muon(plain.parameters()), clip=clip, seed_of=seed_of)
        model = LLAMA.build(0.1)
        with engine_for(model, muon, config_of(3, clip, {"pack_layers": 1})) as engine:
            assert [engine.train_batch(iter(group)).item() for group in groups] == means_of(losses)
        assert_same(model, plain, bitwise=True)
