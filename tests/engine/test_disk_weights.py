"""Weights on a disk: `offload_param: {"device": "nvme"}`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds import HarmonyEngine
from harmony_ds.device import CpuDevice
from harmony_ds.offload import disk_weights
from tests.checkpoint.runs import assert_equal
from tests.engine.drive import config_of, engine_for, family, groups_of, loop, train_groups, weights_of
from tests.engine.test_disk import STATE, WEIGHTS, on
from tests.engine.test_split_masters import ADAM, BF16
from tests.inside import assembly_of, moves_of

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")


def file_of(engine: HarmonyEngine) -> Any:
    return assembly_of(engine).store.disk_weights.file


def test_host_memory_is_counted_while_a_thread_takes_chunks_in_turn(tmp_path: Path) -> None:
    class Counted(torch.Tensor):
        def numel(self) -> int:
            weights._chunks.rotate(-1)
            return super().numel()

    weights = disk_weights.DiskWeights(str(tmp_path), CpuDevice(), 4096)
    weights._chunks[0] = weights._chunks[0][0].as_subclass(Counted), None
    assert weights.host_bytes == len(weights._chunks) * 4096
    weights.close()


@contextmanager
def engine_at(
    where: dict[str, Any], precision: dict[str, Any], clip: float | None, frozen: str
) -> Iterator[HarmonyEngine]:
    model = LLAMA.build(0.1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen in name)
    config = config_of(3, clip, {"pack_layers": 2}, **precision, **where, optimizer=ADAM)
    with engine_for(model, None, config) as engine:
        yield engine


@pytest.mark.parametrize(
    ("precision", "clip", "state", "trained", "chunk"),
    [
        (BF16, 0.5, False, "", 2**24),
        (BF16, None, True, "", 640),
        (BF16, None, False, "q_proj", 640),  # as LoRA: most weights are frozen
        (BF16, 0.5, True, "q_proj", 2**24),
        ({}, None, False, "", 640),
        ({}, 0.5, True, "", 640),
    ],
)
def test_losses_and_weights_are_those_of_memory_whoever_reads_between_steps(
    precision: Any, clip: Any, state: bool, trained: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_weights, "CHUNK_BYTES", chunk)
    results = []
    for where in (on(tmp_path, (*WEIGHTS, *STATE[: int(state)])), {}):
        with engine_at(where, precision, clip, trained) as engine:
            seen = [*loop(engine, groups_of(LLAMA, 10, 3))]
            seen.append([engine.eval_batch(iter(groups_of(LLAMA, 1, 3)[0])).item()])
            seen.append([weight.sum().item() for weight in engine.module.state_dict().values()])
            seen += loop(engine, groups_of(LLAMA, 10, 3))
            held = engine.memory_report()
            assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left after a kill
            assert (held.host_bytes["weights"] == 0 < held.disk_bytes) == bool(where)
        results.append((seen, weights_of(engine.module)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("trained", ["", "q_proj"])
def test_a_step_reads_what_it_swaps_in_and_writes_what_it_updates(trained: str, tmp_path: Path) -> None:
    with engine_at(on(tmp_path, WEIGHTS), BF16, None, trained) as engine:
        train_groups(engine, groups_of(LLAMA, 1, 3))
        engine.finish_updates()
        moves = moves_of(file_of(engine))
        train_groups(engine, groups_of(LLAMA, 1, 3))
        engine.finish_updates()
        swaps, count = engine.swap_report(), sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
        assert swaps.ratio == 1.0  # weights once per pack and pass
        assert moves() == (swaps.host_to_device["weights"], 2 * count)


def test_16_bit_weights_that_are_their_own_masters_are_stepped_in_the_file(tmp_path: Path) -> None:
    results = []
    for zero in (on(tmp_path, WEIGHTS)["zero_optimization"], {"stage": 2}):
        precision = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
        with engine_at({"zero_optimization": zero}, precision, None, "") as engine:
            train_groups(engine, groups_of(LLAMA, 4, 3))
            results.append(weights_of(engine.module))
    assert_equal(*results)


def test_evaluation_reads_each_layer_once(tmp_path: Path) -> None:
    with engine_at(on(tmp_path, WEIGHTS), BF16, None, "") as engine, torch.inference_mode():
        moves = moves_of(file_of(engine))
        engine.eval()
        engine(**LLAMA.batch(0))
        weights = sum(slab.nbytes for slab in assembly_of(engine).store._slabs)
        assert moves()[0] == weights
        assert engine.eval_batch(iter(groups_of(LLAMA, 1, 3)[0])).isfinite()  # measures first, with gradients
