"""Quantized bases on a device that is not the host, with late copies: plain PyTorch's bits; nothing of them stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import quantized
from tests.engine.drive import WHOLE, config_of, loop, seed_of
from tests.engine.test_quantized import ACCUMULATION, GROUPS, adamw_of, assert_swapped_once_a_pass, trained_by
from tests.oracle import train_plainly
from tests.simdevice.test_engine_late import late_devices, late_engine

pytestmark = pytest.mark.fixed_times
KINDS = [kind for kind in quantized.KINDS if kind != "bitsandbytes int8"]
SETTINGS: list[dict[str, Any]] = [{}, {"residency": 2}, {"devices": 2}]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Let bitsandbytes' kernels for any device, which it compiles anew for each call here, run as they are."""
    with torch.compiler.set_stance("force_eager"):
        yield


Trained = tuple[list[list[float]], dict[str, Tensor]]


def trained(kind: str, **harmony: Any) -> Trained:
    """Return losses and trained weights of an engine on late devices, whose peak is within the plan.

    What is swapped in are the packed bytes, once a pack and pass, whichever device they go to; resident packs come once.
    """
    model = quantized.build(kind)
    optimizer = adamw_of(model)
    device = late_devices(harmony.get("devices", 1), seed=1)
    config = config_of(ACCUMULATION, None, {"pack_layers": 1, **harmony})
    with late_engine(model, config, make=lambda _: optimizer, device=device) as engine:
        losses = loop(engine, GROUPS)
        engine.finish_updates()
        report, swaps = engine.memory_report(), engine.swap_report()
    assert report.device_peak_bytes <= report.planned_peak_bytes
    if "residency" not in harmony and "pack_layers" not in harmony:
        assert_swapped_once_a_pass(kind, model, swaps)
    return losses, trained_by(model)


def assert_equal(one: Trained, other: Trained) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_base_is_rebuilt_over_the_bytes_that_arrived(kind: str) -> None:
    plain = quantized.build(kind)
    expected = train_plainly(plain, GROUPS, adamw_of(plain), clip=None, seed_of=seed_of)
    assert_equal(trained(kind, **SETTINGS[KINDS.index(kind) % len(SETTINGS)]), (expected, trained_by(plain)))


def test_int8_leaves_nothing_of_the_base_in_the_modules() -> None:
    """Its forward pass moves weights into an attribute of the module, which would keep packs that were evicted.

    Its kernels off the CPU quantize activations, too: engines are compared with an engine.
    """
    whole = trained("bitsandbytes int8", pack_layers=WHOLE)
    for harmony in SETTINGS:
        assert_equal(trained("bitsandbytes int8", **harmony), whole)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("bitsandbytes int8", 24), ("bitsandbytes NF4, double", 24), ("buffers in groups, read in backward", 36)],
)
def test_the_peak_is_a_part_of_the_base(kind: str, layers: int) -> None:
    model = quantized.build(kind, layers=layers)
    base = quantized.stored_bytes(kind, model)
    with late_engine(
        model, config_of(ACCUMULATION, None, {"pack_layers": 1}), make=lambda _: adamw_of(model)
    ) as engine:
        loop(engine, GROUPS[:1])
        engine.finish_updates()
        assert engine.memory_report().device_peak_bytes < base / 2
