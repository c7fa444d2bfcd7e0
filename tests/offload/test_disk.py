"""Masters and optimizer state on a disk, `offload_optimizer: {"device": "nvme"}`; and weights, `offload_param`."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds import EngineFailedError, HarmonyEngine
from harmony_ds.device import CpuDevice
from harmony_ds.errors import ConfigError, HostMemoryError
from harmony_ds.offload import disk, disk_weights
from tests.checkpoint.runs import Setup, assert_equal, engine_of, train, train_and_resume
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, loop, train_groups, weights_of
from tests.engine.test_split_masters import ADAM, BF16, both, by_alias, by_name, in_place, momentum, values_of
from tests.inside import assembly_of, moves_of

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
STATE, WEIGHTS = ("offload_optimizer",), ("offload_param",)
BLOCKS = pytest.mark.parametrize("blocks", [(*STATE, *WEIGHTS), STATE, WEIGHTS])


def on(folder: Path, blocks: tuple[str, ...] = STATE) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"stage": 2, **dict.fromkeys(blocks, nvme)}}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("optimizer", [None, adamw, momentum])
@pytest.mark.parametrize("precision", [BF16, {}])
def test_weights_masters_and_states_are_those_of_memory(
    precision: dict[str, Any], optimizer: Any, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:  # many blocks of a parameter
        monkeypatch.setattr(disk.DiskMasters, "block", 128)
    results = []
    for where in (on(tmp_path), {}):
        config = config_of(3, 0.5, {"pack_layers": 2}, **precision, **where)
        if optimizer is None:
            config["optimizer"] = ADAM
        with engine_for(LLAMA.build(0.1), optimizer, config) as engine:
            loop(engine, groups_of(LLAMA, 4, 3))
            results.append(values_of(engine))
            held = engine.memory_report()
            if where:
                assert held.host_bytes["masters"] == held.host_bytes["optimizer"] == 0 < held.disk_bytes
                assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left after a kill
    assert_equal(*results)


def test_a_step_reads_and_writes_masters_and_state_once(tmp_path: Path) -> None:
    model = LLAMA.build(0.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    with engine_for(model, None, config_of(2, None, **BF16, **on(tmp_path), optimizer=ADAM)) as engine:
        moves = moves_of(assembly_of(engine).store.disk.file)
        for read in (4 * count, 12 * count):  # at first, there is no state
            train_groups(engine, groups_of(LLAMA, 1, 2))
            engine.finish_updates()
            assert moves() == (read, 12 * count)


@pytest.mark.parametrize(("name", "kept"), [("Lion", "exp_avg"), ("Adagrad", "exp_avg_sq")])
def test_deepspeeds_optimizers_of_one_state_keep_no_other(name: str, kept: str, tmp_path: Path) -> None:
    chosen = {"optimizer": {"type": name, "params": {"lr": 0.01}}}
    for engine in both((config_of(2, None, **BF16, **where, **chosen) for where in (on(tmp_path), {})), None):
        train_groups(engine, groups_of(LLAMA, 2, 2))
        engine.finish_updates()
        held, count = engine.memory_report(), sum(parameter.numel() for parameter in engine.module.parameters())
        assert all(state.keys() == {"step", kept} for state in engine.optimizer.state.values())
        assert held.host_bytes["optimizer"] == (0 if held.disk_bytes else 4 * count)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


@pytest.mark.parametrize("optimizer", [adamw, adagrad])
def test_state_that_was_there_or_is_loaded_goes_to_the_disk(optimizer: Any, tmp_path: Path) -> None:
    for engine in both((config_of(2, None, **BF16, **where) for where in (on(tmp_path), {})), optimizer):
        train_groups(engine, groups_of(LLAMA, 2, 2))
        saved = copy.deepcopy(engine.optimizer.state_dict())
        train_groups(engine, groups_of(LLAMA, 2, 2))
        engine.optimizer.load_state_dict(saved)
        train_groups(engine, groups_of(LLAMA, 1, 2))


def test_a_checkpoint_from_before_the_first_step_is_loaded_many_times(tmp_path: Path) -> None:
    setup = Setup(optimizer=None, config={**BF16, "optimizer": ADAM, **on(tmp_path / "disk")})
    with engine_of(setup) as engine:
        engine.save_checkpoint(str(tmp_path / "saved"))
        for _ in range(3):
            train(engine, setup, range(2))
            engine.load_checkpoint(str(tmp_path / "saved"))
        train(engine, setup, range(1))


@BLOCKS
@pytest.mark.parametrize("write", [by_alias, in_place, by_name])
def test_what_is_written_by_hand_between_steps_is_trained_on(write: Any, blocks: Any, tmp_path: Path) -> None:
    for engine in both(config_of(2, None, **BF16, **where, optimizer=ADAM) for where in (on(tmp_path, blocks), {})):
        parameter = engine.module.model.layers[1].mlp.up_proj.weight
        for group in groups_of(LLAMA, 3, 2):
            train_groups(engine, [group])
            write(parameter)


@BLOCKS
@pytest.mark.parametrize(("saved", "resumed"), [(True, True), (True, False), (False, True)])
def test_checkpoints_are_those_of_memory(tmp_path: Path, saved: bool, resumed: bool, blocks: Any) -> None:
    def setup(is_on_disk: bool) -> Setup:
        where = on(tmp_path / "disk", blocks) if is_on_disk else {}
        return Setup(optimizer=None, config={**BF16, "optimizer": ADAM, **where})

    assert_equal(*train_and_resume(setup(saved), setup(resumed), tmp_path / "saved", values_of))


@BLOCKS
def test_a_full_disk_is_an_error_before_training_with_both_numbers(
    blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    config = config_of(1, None, **BF16, **on(tmp_path, blocks), optimizer=ADAM)
    with (
        pytest.raises(HostMemoryError, match=rf"{blocks[0]} take [\d,]+ bytes.*its nvme_path.* has [\d,]+ free"),
        engine_for(LLAMA.build(0.0), None, config),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def failing(call: Any, place: int) -> Any:
    """Return `call`, whose transfer number `place` fails or ends short; the one before it stops half-way, which is none."""
    number = 0

    def transfer(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal number
        number += 1
        if number == place:
            buffers = [buffers[0][: max(1, len(buffers[0]) // 2)]]
        elif number > place and place % 3:
            code = (errno.EIO, errno.ENOSPC)[place % 2]
            raise OSError(code, os.strerror(code))
        elif number > place:
            return 0
        moved: int = call(descriptor, buffers, offset)
        return moved

    return transfer


FAULTS = [
    pytest.param(call, place, marks=() if place in (0, 7) else pytest.mark.deep)
    for place in range(12)
    for call in ("preadv", "pwritev")
]


@BLOCKS
@pytest.mark.parametrize(("call", "place"), FAULTS)
def test_a_fault_of_the_disk_comes_up_as_itself_and_training_goes_on_from_the_checkpoint(
    call: str, place: int, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.DiskMasters, "block", 256)
    monkeypatch.setattr(disk_weights, "CHUNK_BYTES", 2048)
    setup = Setup(optimizer=None, config={**BF16, "optimizer": ADAM, **on(tmp_path / "disk", blocks)})
    with engine_of(setup) as engine:
        train(engine, setup, range(4))
        expected = values_of(engine)
    with engine_of(setup) as engine:
        train(engine, setup, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        fault = r"Input/output error|No space left|file on the disk ends"
        with monkeypatch.context() as broken:
            broken.setattr(os, call, failing(getattr(os, call), place))
            with pytest.raises(OSError, match=fault):
                train(engine, setup, range(2, 4))
        if blocks == STATE or call == "pwritev":  # a swap-in changes nothing
            with pytest.raises(EngineFailedError, match=fault):
                train(engine, setup, range(2, 3))
    with engine_of(setup, fresh=False) as engine:
        engine.load_checkpoint(str(tmp_path / "saved"))
        train(engine, setup, range(2, 4))
        assert_equal(values_of(engine), expected)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
        ({"harmony": {"device": "cpu", "split_masters": True}}, "split_masters"),
        ({"optimizer": {"type": "Rprop", "params": {}}}, "Rprop keeps"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.nvme_path"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = {**config_of(1, None, **BF16, **on(tmp_path), optimizer=ADAM), **changes}
    with pytest.raises(ConfigError, match=says), engine_for(LLAMA.build(0.0), None, config):
        pass


# ---- weights


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
