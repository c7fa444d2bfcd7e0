"""Several servers: processes of one machine that are told they are on different ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import harmony_ds
from harmony_ds.distributed import join
from harmony_ds.distributed.agreement import Agreement
from harmony_ds.distributed.board import Board
from harmony_ds.distributed.servers import ServersAgreement
from harmony_ds.distributed.shared_memory import make_file
from harmony_ds.errors import PeerFailedError
from tests.distributed.processes import run, run_to_end
from tests.distributed.test_failures import error_of
from tests.distributed.training import (
    Result,
    Training,
    batch,
    config_of,
    differences,
    engine_of,
    train_all,
    train_plainly,
    train_with,
)

pytestmark = pytest.mark.fixed_times

DEVICE = {"reduce": "device"}
TRAININGS = (
    Training(clip=0.05),
    Training(loop="familiar"),
    Training(model="experts", clip=0.01),
    Training(bf16=True, clip=0.05, harmony={"weights": "share"}),
    Training(model="llama", steps=2, harmony={"weights": "share", "pack_layers": None, "device_memory_gib": 0.02}),
    Training(optimizer="SGD", harmony={"grouping": False, "weights": "share"}, accumulation=1),
    Training(bf16=True, clip=0.05, disk=("offload_optimizer", "offload_param")),
)
PLACES = ("ab", "abc", "aabb", "abab")


def _place_on_servers(places: str) -> None:
    """Put this process on the server that the letter of its rank names."""
    name = places[dist.get_rank()]
    join._host = lambda: name  # type: ignore[assignment]


def _ranks(places: str) -> list[list[int]]:
    return [[rank for rank, one in enumerate(places) if one == server] for server in dict.fromkeys(places)]


def _trained(places: str, several: Sequence[Training]) -> list[Result]:
    _place_on_servers(places)
    return train_all(several)


@pytest.mark.parametrize("places", PLACES)
def test_servers_train_to_the_bits_of_plain_pytorch(places: str) -> None:
    found = run(len(places), _trained, places, TRAININGS, limit_s=200)
    told = {}
    for index, training in enumerate(TRAININGS):
        right = train_plainly(training, len(places), _ranks(places))
        told[str(training)] = differences([of_rank[index] for of_rank in found], right)
    assert not {training: what for training, what in told.items() if what}


def _bytes(places: str) -> list[dict[str, int]]:
    """With one micro-batch for a step, and with four."""
    _place_on_servers(places)
    found = []
    for accumulation in (1, 4):
        engine = engine_of(Training(accumulation=accumulation, harmony=DEVICE))
        for _ in range(2):
            engine.train_batch([batch("mlp", i) for i in range(accumulation)])
        report = engine.plan_report()
        all_of_it = 4 * sum(p.numel() for p in engine.module.parameters())
        engine.destroy()
        found.append({"planned": report.planned.sent, "counted": report.sent_bytes, "all": all_of_it})
    return found


@pytest.mark.parametrize("places", ["ab", "aabb"])
def test_each_piece_goes_to_every_other_server_once_a_step(places: str) -> None:
    for one, more in run(len(places), _bytes, places):
        assert one == more
        # To the others of its server what is theirs, and to the other server its own sum.
        assert one["counted"] == one["planned"] == one["all"]


def _started_apart(places: str) -> dict[str, Any]:
    """Every process with weights, and buffers, of its own."""
    _place_on_servers(places)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(19, 19), nn.BatchNorm1d(19), nn.Linear(19, 1))
    model[1].running_mean.fill_(float(dist.get_rank()))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    config = {**config_of(Training(bf16=True), dist.get_world_size()), "optimizer": {"type": "AdamW", "params": {}}}
    engine, *_ = harmony_ds.initialize(model=model, config=config)
    held = {name: harmony_ds.utils.safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}
    mean = model[1].running_mean.clone()
    engine.destroy()
    return {"first": first, "held": held, "mean": mean}


def test_all_servers_begin_with_the_weights_and_buffers_of_the_first() -> None:
    found = run(4, _started_apart, "aabb")
    for told in found:
        assert all(torch.equal(value, found[0]["first"][name]) for name, value in told["held"].items())
        assert torch.equal(told["mean"], found[0]["first"]["1.running_mean"])
    assert not torch.equal(found[3]["first"]["0.weight"], found[0]["first"]["0.weight"])


def _saved_and_gone_on(places: str, folder: str) -> list[Result]:
    _place_on_servers(places)
    training = Training(clip=0.05, steps=2)
    engine = engine_of(training)
    train_with(engine, training)
    engine.save_checkpoint(folder)
    expected = train_with(engine, replace(training, begin=2))
    engine.destroy()
    engine = engine_of(training)
    engine.load_checkpoint(folder)
    found = train_with(engine, replace(training, begin=2))
    engine.destroy()
    return [expected, found]


def test_a_checkpoint_of_several_servers_goes_on_to_the_bits(tmp_path: Any) -> None:
    for expected, found in run(4, _saved_and_gone_on, "aabb", str(tmp_path)):
        assert not differences([found], [expected])


class _OneServer(ServersAgreement):
    """A server that is alone."""

    def _gather(self, message: Any) -> list[Any]:
        return [message]


def test_processes_agree_on_more_than_a_row_of_the_board_holds() -> None:
    file = make_file()
    boards = [Board(file, rank, [os.getpid()] * 2, 0, timeout_s=20.0) for rank in range(2)]
    groups: list[Any] = [object(), None]  # that of the first process is not called
    several = [
        _OneServer(Agreement(board), board.rank, [[0, 1]], group, nullcontext)
        for board, group in zip(boards, groups, strict=True)
    ]
    rows = [bytes([rank]) * 12_000 for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(one.agree, "test", row) for one, row in zip(several, rows, strict=True)]
        assert [one.result(30) for one in found] == [rows, rows]
    for board in boards:
        board.close()
    os.close(file)


# ---- failures


def _fails(places: str) -> list[tuple[str, str, bool]]:
    """In each step but the first another process raises an error; all go on after it."""
    _place_on_servers(places)
    engine = engine_of(Training(clip=0.05))
    data = [batch("mlp", i) for i in range(2)]
    engine.train_batch(data)
    layer = engine.module.layers[1][2]

    def bursts(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the layer has burst")

    found = []
    for rank in range(len(places)):
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        if dist.get_rank() == rank:
            layer.forward = bursts
        told = error_of(lambda: engine.train_batch(data))
        found.append((*told, all(torch.equal(before[name], p) for name, p in engine.module.named_parameters())))
        layer.__dict__.pop("forward", None)
        engine.train_batch(data)
    engine.destroy()
    return found


def test_an_exception_reaches_all_servers_and_nothing_is_updated() -> None:
    for other, found in enumerate(run(4, _fails, "aabb")):
        for rank, (name, message, same) in enumerate(found):
            assert name == ("RuntimeError" if other == rank else "PeerFailedError")
            assert "burst" in message and (other == rank or f"rank {rank}" in message)
            assert same


def _dies(places: str, rank: int) -> tuple[str, str]:
    _place_on_servers(places)
    engine = engine_of(Training())
    data = [batch("mlp", i) for i in range(2)]
    engine.train_batch(data)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: engine.train_batch(data))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_process_that_ends_ends_all_servers(rank: int) -> None:
    ended = run_to_end(4, _dies, "aabb", rank)
    for other, one in enumerate(ended):
        if other == rank:
            assert one.code == -signal.SIGKILL
            continue
        assert one.error is None
        assert one.result[0] in (PeerFailedError.__name__, "RuntimeError", "DistBackendError"), one
    beside = ended[rank ^ 1].result
    assert beside[0] == "PeerFailedError" and f"rank {rank}" in beside[1]


def _other_settings(places: str, harmony: dict[str, Any]) -> tuple[str, str]:
    _place_on_servers(places)
    return error_of(lambda: engine_of(Training(bf16=True, harmony=harmony)).destroy())


def test_uneven_servers_and_a_host_that_all_share_are_refused() -> None:
    for name, message in run(3, _other_settings, "aab", {}):
        assert name == "UnsupportedError" and "a 2, b 1" in message
    for harmony in ({"reduce": "host"}, {"split_masters": True}):
        for name, message in run(2, _other_settings, "ab", harmony):
            assert name == "UnsupportedError" and "2 servers" in message


def _other_calls(places: str) -> tuple[str, str]:
    _place_on_servers(places)
    engine = engine_of(Training())
    data = [batch("mlp", i) for i in range(2)]
    engine.train_batch(data)
    other = places[dist.get_rank()] == "b"
    return error_of(lambda: engine.eval_batch(iter(data)) if other else engine.train_batch(data))


def test_servers_that_do_different_things_are_told() -> None:
    for name, message in run(4, _other_calls, "aabb"):
        assert name == "UsageError"
        assert "ranks [0, 1]" in message and "ranks [2, 3]" in message
