"""The familiar loop with `loss.item()` after every micro-batch, every tenth, never: what it gives, says and costs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, plainly
from tests.engine.test_ledger import layer_bytes
from tests.oracle import assert_same

LLAMA = family("llama")
STEPS, MICRO_BATCHES = 2, 20
GROUPS = groups_of(LLAMA, STEPS, MICRO_BATCHES)
LOOKED = "looked at before its accumulation boundary"


@pytest.fixture(scope="module")
def expected() -> tuple[nn.Module, list[list[float]]]:
    return plainly(LLAMA, 0.0, GROUPS, adamw, 0.5)


@pytest.mark.parametrize("every", [1, 10, 0], ids=["every", "every tenth", "never"])
def test_values_the_warning_and_the_ledger(every: int, expected: tuple[nn.Module, list[list[float]]]) -> None:
    plain, losses = expected
    model = LLAMA.build(0.0)
    seen: dict[tuple[int, int], float] = {}
    with (
        warnings.catch_warnings(record=True) as caught,
        engine_for(model, adamw, config_of(MICRO_BATCHES, 0.5, {"pack_layers": 1})) as engine,
    ):
        warnings.simplefilter("always")
        for step, group in enumerate(GROUPS):
            pending = []
            for i, batch in enumerate(group):
                loss = engine(**batch).loss
                if every and i % every == 0:
                    seen[step, i] = loss.item()
                engine.backward(loss)
                engine.step()
                pending.append(loss)
            assert [loss.item() for loss in pending] == losses[step]
        report = engine.swap_report()

    looks = len(range(0, MICRO_BATCHES, every)) if every else 0
    assert len(seen) == STEPS * looks
    assert all(value == losses[step][i] for (step, i), value in seen.items())
    assert len([w for w in caught if LOOKED in str(w.message)]) == (1 if looks else 0)
    assert_same(model, plain, bitwise=True)

    # A look swaps every layer in once more. If all were looked at, the step's own forward pass has nothing left to do.
    layers = layer_bytes(model, 4)
    forward = 0 if looks == MICRO_BATCHES else sum(layers[:-1])
    assert report.host_to_device["weights"] == looks * sum(layers) + forward + sum(layers)
    assert report.device_to_host["gradients"] == sum(layers)
    assert report.micro_batches == MICRO_BATCHES
    assert (report.ratio == 1.0) is (looks == 0)


def test_what_a_look_costs_does_not_depend_on_when_it_is_taken() -> None:
    swapped = set()
    for position in (0, 7, MICRO_BATCHES - 1):
        with engine_for(LLAMA.build(0.0), adamw, config_of(MICRO_BATCHES, 0.5, {"pack_layers": 2})) as engine:
            for i, batch in enumerate(GROUPS[0]):
                loss = engine(**batch).loss
                if i == position:
                    with pytest.warns(RuntimeWarning, match=LOOKED):
                        assert torch.isfinite(loss)
                engine.backward(loss)
                engine.step()
            swapped.add(engine.swap_report().swap_bytes)
    assert len(swapped) == 1
