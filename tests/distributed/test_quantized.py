"""Two processes with adapters on a quantized base: plain PyTorch's bits, with packed bytes in memory that both share."""

from __future__ import annotations

import pytest

from tests.distributed.processes import run
from tests.distributed.training import Training, differences, train, train_plainly


@pytest.mark.parametrize("weights", ["share", "whole"])
@pytest.mark.parametrize("kind", ["integer parameter", "bitsandbytes NF4", "integer buffers", "float8 parameter"])
def test_two_processes_train_adapters_on_a_quantized_base(kind: str, weights: str) -> None:
    training = Training(model=kind, steps=2, clip=0.5, harmony={"weights": weights})
    found = run(2, train, training)
    assert not differences(found, train_plainly(training, 2))
