"""The ds_config's flops_profiler: DeepSpeed's counts of a plain forward pass, and a step as without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from torch import nn

from tests import quantized
from tests.engine.drive import Groups, adamw, config_of, engine_for, family, groups_of, loop, train_groups

ACCUMULATION = 2


def attributes_of(model: nn.Module) -> list[set[str]]:
    return [{*vars(module)} for module in model.modules()]


def profiling(file: Path | None = None, **more: Any) -> dict[str, Any]:
    return {"flops_profiler": {"enabled": True, "output_file": None if file is None else str(file), **more}}


def counts_in(table: str) -> list[str]:
    """Return the lines of a table that count: of the whole model, and of each module in detail, without latencies."""
    total = re.findall(r"^(?:params|fwd MACs|fwd flops) .*GPU: .*$", table, re.MULTILINE)
    return total + re.findall(r"[\d.]+ \w* ?= [\d.]+% Params, [\d.]+ \w+ = [\d.]+% MACs", table)


def plain_table(model: nn.Module, batch: Any, file: Path) -> str:
    """Return what DeepSpeed's profiler prints of a forward pass in plain PyTorch."""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(**batch)
    profiler.stop_profile()
    profiler.print_model_profile(output_file=str(file))
    profiler.end_profile()
    return file.read_text()


@pytest.mark.parametrize("profile_step", [0, 1])
def test_the_table_is_deepspeeds_of_a_plain_forward_pass(profile_step: int, tmp_path: Path) -> None:
    one = family("llama")
    groups = groups_of(one, 3, ACCUMULATION)
    config = config_of(ACCUMULATION, 1.0, {"pack_layers": 1}, **profiling(tmp_path / "ours", profile_step=profile_step))
    with engine_for(one.build(0.0), adamw, config) as engine:
        loop(engine, groups)
    table = (tmp_path / "ours").read_text()
    expected = plain_table(one.build(0.0), groups[profile_step][0], tmp_path / "theirs")
    assert f"Profile Summary at step {profile_step + 1}:" in table
    assert len(counts_in(table)) > 20 and counts_in(table) == counts_in(expected)
    assert re.search(r"samples/second: +[\d.]+", table)


@pytest.mark.parametrize("train", [loop, train_groups])
def test_it_is_printed_once_and_the_steps_are_those_without_it(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout draws the same numbers, batch normalization's statistics are as before, and modules get nothing."""
    groups: Groups = [[{"x": torch.randn(2, 3, 8, 8)} for _ in range(ACCUMULATION)] for _ in range(3)]
    results = []
    for more in ({}, profiling()):
        model = Pictures()
        before = attributes_of(model)
        with engine_for(model, adamw, config_of(ACCUMULATION, 1.0, **more)) as engine:
            inside = attributes_of(model)
            losses = train(engine, groups)
            assert attributes_of(model) == inside
            engine.finish_updates()
        assert attributes_of(model) == before
        results.append((losses, model.state_dict()))
    (without, plain), (with_table, profiled) = results
    assert with_table == without
    assert all(torch.equal(profiled[name], one) for name, one in plain.items())
    assert capsys.readouterr().out.count("DeepSpeed Flops Profiler") == 1


class Pictures(nn.Module):
    """Convolutions with batch normalization and dropout; its `extra_repr` is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5)) for _ in range(3)
        )
        self.extra_repr = lambda: "by hand"  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


def test_what_is_asked_for_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    asked = profiling(module_depth=2, top_modules=1, detailed=False, recompute_fwd_factor=1.0)
    with engine_for(quantized.build("bitsandbytes NF4"), None, config_of(1, None, **OPTIMIZER, **asked)) as engine:
        loop(engine, [[quantized.batch(step)] for step in range(2)])
    table = capsys.readouterr().out
    assert "depth 1:" in table and "depth 2:" not in table
    assert "Detailed Profile" not in table
    assert "3 * fwd flops per GPU / bwd latency" in table
    assert all(line.count(": '") == 1 for line in table.splitlines() if line.startswith("    MACs"))


OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}


def test_a_model_that_fails_while_it_is_counted_is_left_as_it_was() -> None:
    model = Pictures()
    with engine_for(model, adamw, config_of(1, **profiling(profile_step=1))) as engine:
        loop(engine, [[{"x": torch.randn(2, 3, 8, 8)}]])
        before = attributes_of(model)
        with pytest.raises(AssertionError):
            engine(x=torch.randn(2, 2, 8, 8))
        assert attributes_of(model) == before
        assert nn.functional.relu.__module__ == "torch.nn.functional"
        loop(engine, [[{"x": torch.randn(2, 3, 8, 8)}]])
