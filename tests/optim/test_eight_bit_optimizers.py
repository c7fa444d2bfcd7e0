"""Optimizers that keep their state in 8 bits, of torchao and bitsandbytes: stepped pack by pack, with one step's bits."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import CheckpointError, HarmonyEngine
from harmony_ds.assembly.needs import describe_optimizer
from harmony_ds.offload.wrappers import inner_tensors, is_wrapper
from harmony_ds.optim.host_optimizer import HostOptimizer
from tests.engine.drive import config_of, engine_for, loop_plainly, loop_with, random_rows, squares, weights_of
from tests.families import build_seeded
from tests.inside import assembly_of

WIDTH, ACCUMULATION = 64, 3
OPTIMIZERS = [
    "torchao.optim.AdamW8bit",
    "torchao.optim.AdamW4bit",
    "torchao.optim.AdamWFp8",
    "bitsandbytes.optim.AdamW8bit",
    "bitsandbytes.optim.Lion8bit",
    "bitsandbytes.optim.PagedAdamW8bit",
]
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """torchao compiles its step for every shape, which takes many seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def net() -> nn.Module:
    """Weights of 4,096 elements, from which on these optimizers quantize, and biases that they do not."""
    return build_seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))


def made(name: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    module, _, kind = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    optimizer: torch.optim.Optimizer = getattr(importlib.import_module(module), kind)(parameters, lr=1e-2, **options)
    return optimizer


def batches(steps: range) -> list[Tensor]:
    return [random_rows(step * ACCUMULATION + place, 2, WIDTH) for step in steps for place in range(ACCUMULATION)]


def train_engine(engine: HarmonyEngine, steps: range) -> None:
    loop_with(engine, batches(steps), squares)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    loop_plainly(model, batches(steps), ACCUMULATION, squares, lambda _: optimizer)


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, with the tensors inside of others under names of their own."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if is_wrapper(value):
            found.update({f"{key}.{name}": inner for name, inner in inner_tensors(value).items()})
        else:
            found[key] = value
    return found


def assert_same_states(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    ours, theirs = (list(map(flat, optimizer.state.values())) for optimizer in (actual, expected))
    assert len(ours) == len(theirs) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_packs_are_updated_one_by_one_as_by_one_step_and_a_resumed_run_goes_on(name: str, tmp_path: Path) -> None:
    plain = net()
    expected = made(name, plain.parameters())
    train_plain(plain, expected, range(4))

    model = net()
    with engine_for(model, partial(made, name), config_of(ACCUMULATION)) as engine:
        optimizer = assembly_of(engine).runtime.optimizer
        assert optimizer is not None and not optimizer.steps_whole
        train_engine(engine, range(2))
        engine.save_checkpoint(tmp_path)
    model = net()
    with engine_for(model, partial(made, name), config_of(ACCUMULATION)) as engine:
        engine.load_checkpoint(tmp_path)
        train_engine(engine, range(2, 4))
        assert_same_states(engine.optimizer, expected)
    assert all(torch.equal(weight, plain.state_dict()[key]) for key, weight in weights_of(model).items())


@pytest.mark.parametrize("libraries", [("torchao", "bitsandbytes"), ("bitsandbytes", "torchao")])
def test_a_librarys_state_is_refused_by_the_other_librarys_class_of_that_name(
    libraries: tuple[str, str], tmp_path: Path
) -> None:
    first, second = (f"{library}.optim.AdamW8bit" for library in libraries)
    with engine_for(net(), partial(made, first), config_of(ACCUMULATION)) as engine:
        train_engine(engine, range(1))
        engine.save_checkpoint(tmp_path)
    theirs, ours = (f"{library}.AdamW8bit" for library in libraries)
    with (
        engine_for(net(), partial(made, second), config_of(ACCUMULATION)) as engine,
        pytest.raises(CheckpointError, match=f"its optimizer is {theirs} and this engine's {ours}"),
    ):
        engine.load_checkpoint(tmp_path)


def test_only_a_class_that_has_been_imported_is_made_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torchao.optim.AdamW8bit"
    model = net()
    with engine_for(model, partial(made, name), config_of(ACCUMULATION)) as engine:
        train_engine(engine, range(1))
        engine.save_checkpoint(tmp_path)
        monkeypatch.delitem(sys.modules, "torchao.optim.subclass_8bit")
        with pytest.raises(CheckpointError, match=r"torchao.optim.subclass_8bit:OptimState8bit.*import its package"):
            engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torchao.optim.AdamW8bit", {}),
        ("bitsandbytes.optim.AdamW8bit", {}),
        ("bitsandbytes.optim.AdamW", {"optim_bits": 8}),  # as a Trainer makes it
    ],
    ids=str,
)
def test_the_state_takes_a_quarter_of_adams(name: str, options: dict[str, Any]) -> None:
    model = net()
    optimizer = made(name, model.parameters(), **options)
    host = HostOptimizer(optimizer, dict(model.named_parameters()))
    planned = describe_optimizer(None, optimizer, ())
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert planned.state_bytes(torch.float32) == 2 * numbers
    assert host.unallocated_bytes() == 2 * numbers

    train_plain(model, optimizer, range(1))
    biases, maps, counters = 4 * 2 * 4 * WIDTH, 4 * 2 * 4 * 256, 8 * 4
    scales = 2 * 4 * numbers // 256
    assert 2 * numbers < host.state_bytes() <= 2 * numbers + scales + biases + maps + counters


def test_options_for_single_parameters_let_bitsandbytes_step_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer: Any = made("bitsandbytes.optim.AdamW8bit", model.parameters())
    host = HostOptimizer(optimizer, dict(model.named_parameters()))
    assert not host.steps_whole
    monkeypatch.setitem(optimizer.mng.pid2config, id(next(model.parameters())), {"optim_bits": 32})
    assert host.steps_whole
