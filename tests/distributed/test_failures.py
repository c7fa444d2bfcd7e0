"""Failures of one process reach all others, and unsupported things are refused with several processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harmony_ds
from benchmarks.kill.several import break_process
from harmony_ds.distributed import board
from harmony_ds.errors import HarmonyError, PeerFailedError, UsageError
from harmony_ds.offload import host_memory
from harmony_ds.offload.host_memory import HostRoom
from tests.distributed.processes import run, run_to_end
from tests.distributed.training import (
    Training,
    batch,
    build,
    config_of,
    differences,
    engine_of,
    train_plainly,
    train_with,
)
from tests.inside import assembly_of

MLP = Training()
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def batches(count: int = 2) -> list[dict[str, Any]]:
    return [batch("mlp", dist.get_rank() * 10 + i) for i in range(count)]


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is looked at
        return type(error).__name__, str(error)
    return "", ""


# ---- an exception in one process


def burst(engine: Any, where: str) -> None:
    """From now on a layer fails in process 1: the first time that it is called, or that it is called again."""
    calls, rank = 0, engine.global_rank

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == (1 if where == "forward" else 3):
            raise RuntimeError("the layer has burst")
        return torch.tanh(x)

    engine.module.layers[1][2].forward = forward


def fails_in_a_layer(clip: float, places: Sequence[str]) -> list[Any]:
    """In each of the places of a step of its own."""
    engine = engine_of(Training(clip=clip))
    engine.train_batch(batches())
    found = []
    for where in places:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        burst(engine, where)
        seen = error_of(lambda: engine.train_batch(batches()))
        engine.module.layers[1][2].forward = torch.tanh
        same = all(torch.equal(before[name], p) for name, p in engine.module.named_parameters())
        dist.barrier()
        found.append((seen, same, error_of(lambda: engine.train_batch(batches()))))
    engine.destroy()
    return found


def test_an_exception_reaches_all_and_nothing_is_updated() -> None:
    for rank, found in enumerate(run(3, fails_in_a_layer, 0.05, ("forward", "backward"))):
        for seen, same, again in found:
            assert seen[0] == ("RuntimeError" if rank == 1 else "PeerFailedError"), found
            assert "burst" in seen[1]
            assert rank == 1 or "rank 1" in seen[1]
            assert same
            assert again == ("", ""), "with clipping nobody had updated anything: all go on"


def test_an_exception_without_clipping_ends_all_or_comes_before_the_first_update() -> None:
    """Which of both depends on how far updates are, which run beside the backward pass: it is the same for all."""
    found = [of_rank for [of_rank] in run(2, fails_in_a_layer, 0.0, ("backward",))]
    for rank, (seen, same, again) in enumerate(found):
        assert seen[0] == ("RuntimeError" if rank == 1 else "PeerFailedError"), found
        assert again[0] in ("EngineFailedError", "PeerFailedError") or (same and again == ("", "")), found
    assert len({again[0] == "" for _, _, again in found}) == 1, found


class Records(logging.Handler):
    """What has been logged, which nobody else handles."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fails_before_it_says_its_norm(read: str) -> Any:
    """Process 1's update thread fails when all weights are updated; process 0 then asks for what needs its norm."""
    records, has_returned = Records(), threading.Event()
    logging.getLogger("concurrent.futures").addHandler(records)
    engine = engine_of(MLP)
    engine.train_batch(batches())
    engine.finish_updates()
    progress = assembly_of(engine).world._progress
    if engine.global_rank == 1:

        def burst(number: int, part: float) -> None:
            has_returned.wait()
            raise RuntimeError("the norm has burst")

        progress.post_norm_part = burst
    engine.train_batch(batches())
    has_returned.set()  # process 0 has its loss, too
    seen = error_of(getattr(engine, read))
    again = error_of(lambda: engine.train_batch(batches()))
    return seen, again, records.texts


@pytest.mark.parametrize("read", ["finish_updates", "get_global_grad_norm", "destroy"])
def test_a_process_that_ends_before_it_says_its_norm_is_an_error_of_whoever_needs_that(read: str) -> None:
    first, second = run(2, fails_before_it_says_its_norm, read)
    assert first[0][0] == "PeerFailedError" and "the norm has burst" in first[0][1], first
    assert second[0] == ("RuntimeError", "the norm has burst")
    for _, again, logged in (first, second):
        assert again[0] in ("PeerFailedError", "EngineFailedError", "UsageError" if read == "destroy" else "")
        assert not logged, "an error was swallowed by a callback"


def fails_while_measuring() -> Any:
    engine = engine_of(MLP)
    data = batches()
    if engine.global_rank == 0:
        del data[0]["y"]
    seen = error_of(lambda: engine.train_batch(data))
    again = error_of(lambda: engine.train_batch(batches()))
    engine.destroy()
    return seen, again


def test_an_exception_while_the_model_is_measured_reaches_all() -> None:
    first, second = run(2, fails_while_measuring)
    assert first[0][0] == "TypeError" and second[0][0] == "PeerFailedError" and "'y'" in second[0][1]
    assert first[1] == second[1] == ("", "")


# ---- a process that is gone, or stopped


def waits_for_the_other(how: str) -> Any:
    """Return the errors that the other processes raise when something happens to process 1."""
    engine = engine_of(replace(MLP, harmony={"reduce": "device"}))
    for _ in range(2):
        engine.train_batch(batches())
    pids = torch.zeros(dist.get_world_size(), dtype=torch.long)
    pids[dist.get_rank()] = pid = os.getpid()
    dist.all_reduce(pids)
    if engine.global_rank == 1:
        if how == "leaves":
            return "left"
        if how == "is killed":
            os.kill(pid, signal.SIGKILL)
        others_live = " || ".join(f"kill -0 {other} 2>/dev/null" for other in pids.tolist() if other != pid)
        goes_on = f"while {others_live}; do sleep 0.1; done; kill -CONT {pid}"
        subprocess.Popen(["sh", "-c", goes_on])  # so that the test ends
        os.kill(pid, signal.SIGSTOP)
    else:
        assembly_of(engine).world._board._timeout_s = 4.0
    return error_of(lambda: [engine.train_batch(batches()) for _ in range(3)])


@pytest.mark.parametrize(
    ("how", "code", "more"), [("is killed", -signal.SIGKILL, ""), ("leaves", 0, ""), ("stops", 0, "within 4 s")]
)
def test_the_others_notice_a_process_that_is_gone_or_stopped(how: str, code: int, more: str) -> None:
    ended = run_to_end(3, waits_for_the_other, how)
    assert ended[1].code == code
    for rank in (0, 2):
        seen = ended[rank].result
        assert seen[0] == "PeerFailedError" and "rank 1" in seen[1] and more in seen[1], seen
    if how == "stops":
        # It finds what they have told, or that they have ended, and not that they were silent while it was stopped itself.
        kind, text = ended[1].result
        assert kind == "PeerFailedError" and ("rank 1" in text or "ended" in text), (kind, text)


def loses_its_connections() -> tuple[str, str]:
    """Process 2 shuts its connections; process 0 gives up and ends while the two others still wait for an end."""
    engine = engine_of(replace(MLP, harmony={"reduce": "device"}))
    engine.train_batch(batches())
    engine.finish_updates()
    board._END_SECONDS = 0.1 if engine.global_rank == 0 else 5.0
    dist.barrier()
    if engine.global_rank == 2:
        break_process("sockets")
    return error_of(lambda: [engine.train_batch(batches()) for _ in range(3)])


def test_a_process_that_ended_as_it_lost_connections_is_not_named_without_that_reason() -> None:
    first, second, third = (one.result for one in run_to_end(3, loses_its_connections))
    assert "Connection" in first[1], first
    for seen in (second, third):
        assert seen[0] == "PeerFailedError" and "rank 0" in seen[1], seen
        assert "its connections to the others are broken" in seen[1] and "Connection" in seen[1], seen


# ---- processes that differ


def differ() -> dict[str, tuple[str, str]]:
    """Each difference in an engine of its own."""
    rank = dist.get_rank()
    found = {
        "gradient_clipping": error_of(lambda: engine_of(Training(clip=0.1 * rank))),
        "The model": error_of(lambda: engine_of(Training(model="mlp" if rank else "experts"))),
    }
    steps: dict[str, Callable[[Any], Any]] = {
        "": lambda engine: engine.train_batch(batches(2 - rank)),
        "'lr'": lambda engine: engine.train_batch(batches()),
        "different things": lambda engine: engine.eval_batch(batches()) if rank else engine.train_batch(batches()),
    }
    for named, step in steps.items():
        engine = engine_of(MLP)
        if named == "'lr'":
            engine.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        found[named] = error_of(lambda step=step, engine=engine: step(engine))
        dist.barrier()
    return found


def test_differences_are_named_in_every_process() -> None:
    for found in run(2, differ):
        for named, (kind, text) in found.items():
            assert kind in ("UsageError", "PeerFailedError"), (kind, text)
            assert named in text, text
    assert issubclass(UsageError, HarmonyError) and issubclass(PeerFailedError, HarmonyError)


# ---- what is not there


def doors() -> dict[str, tuple[str, str]]:
    """Every way to change, or to look at, what processes share; each in an engine that has taken a step."""
    from harmony_ds import utils

    def add(engine: Any, weight: Any) -> None:
        with torch.no_grad():
            weight.add_(1.0)

    def gathered(engine: Any, weight: Any) -> None:
        with harmony_ds.zero.GatheredParameters([weight], modifier_rank=0):
            torch.nn.init.constant_(weight, 2.0 + engine.global_rank)

    def gradient(engine: Any, weight: Any) -> None:
        engine.backward(engine(**batches()[0]))
        assert weight.grad is not None

    def penalty(engine: Any, weight: Any) -> None:
        for one in batches():
            engine.backward(engine(**one) + weight.square().sum())
            engine.step()

    several: dict[str, Callable[[Any, Any], Any]] = {
        "add_": add,
        "data=": lambda engine, weight: setattr(weight, "data", torch.zeros_like(weight)),
        "GatheredParameters": gathered,
        "load_state_dict": lambda engine, weight: engine.module.load_state_dict(build("mlp").state_dict()),
        "fp32_param": lambda engine, weight: utils.safe_set_full_fp32_param(weight, torch.zeros_like(weight)),
        "optimizer_state": lambda engine, weight: utils.safe_set_full_optimizer_state(
            weight, torch.zeros_like(weight), "exp_avg"
        ),
        "grad": gradient,
        "penalty": penalty,
        "grad=": lambda engine, weight: setattr(weight, "grad", torch.ones_like(weight)),
        "step hook": lambda engine, weight: engine.optimizer.register_step_post_hook(lambda *_: None),
    }

    def through(door: Callable[[Any, Any], Any]) -> None:
        engine = engine_of(MLP)
        engine.train_batch(batches())
        door(engine, engine.module.head.weight)
        engine.train_batch(batches())

    return {name: error_of(lambda door=door: through(door)) for name, door in several.items()}


def test_side_effects_in_every_process_are_refused_by_name() -> None:
    for found in run(2, doors):
        for name, (kind, text) in found.items():
            assert kind == "UnsupportedError" or "UnsupportedError" in text or "not there with 2" in text, (name, text)


def refusals() -> dict[str, tuple[str, str]]:
    def engine(optimizer: Any = torch.optim.AdamW, **harmony: Any) -> Any:
        model, config = build("mlp"), config_of(Training(harmony=harmony), 2)
        return harmony_ds.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    summed = {**config_of(MLP, 2), "gradient_allreduce_op": "sum", "optimizer": SGD}
    return {
        "residency": error_of(lambda: engine(residency=1)),
        "Mine": error_of(lambda: engine(Mine)),
        "Adafactor": error_of(lambda: engine(torch.optim.Adafactor)),
        "gradient_allreduce_op": error_of(lambda: harmony_ds.initialize(model=build("mlp"), config=summed)),
        "mpu": error_of(lambda: harmony_ds.initialize(model=build("mlp"), mpu=object(), config={})),
    }


def test_unsupported_calls_are_refused_by_name() -> None:
    for found in run(2, refusals):
        for name, (kind, text) in found.items():
            assert kind in ("UnsupportedError", "OptimizerError"), (name, kind, text)
            assert name in text, text


# ---- reading is right in every process


def read_everything() -> Any:
    training = Training(clip=0.05, optimizer="AdamW")
    engine = engine_of(training)
    result = train_with(engine, training)
    own = {name: value.clone() for name, value in engine.module.state_dict().items()}
    early = {name: p.detach().sum() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        engine.module.eval()
        output = engine(**batch("mlp", 7))
        engine.module.train()
    loss = float(engine.eval_batch([batch("mlp", 30 + dist.get_rank() + 2 * i) for i in range(2)]))
    engine.destroy()
    engine.module.head.weight.data.add_(1.0 + dist.get_rank())  # the model is a plain one again
    dist.barrier()
    after = engine.module.head.weight.detach().clone()
    return result, own, early, output, loss, after


class GatheringModel(torch.nn.Module):
    """A model whose forward waits for the other processes', as in contrastive losses and Trainers that gather metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(7, 7), torch.nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x))).mean()
        count = torch.ones(())
        dist.all_reduce(count)
        return x * count


def gathers_in_forward() -> int:
    engine, *_ = harmony_ds.initialize(model=GatheringModel(), config={**config_of(MLP, 2), "optimizer": SGD})
    rank = engine.global_rank
    for rows in ((2, 2), (2, 5), (9, 5), (2, 2), (3, 12)):  # what is larger than all before is measured
        for _ in range(MLP.accumulation):
            engine.backward(engine(torch.ones(rows[rank], 7)))
            engine.step()
    steps: int = engine.global_steps
    engine.destroy()
    return steps


def test_a_model_that_waits_for_the_others_is_measured_by_all_as_often() -> None:
    assert run(2, gathers_in_forward) == [5, 5]


def test_reading_is_right_in_every_process() -> None:
    found = run(2, read_everything)
    right = train_plainly(Training(clip=0.05), 2)
    assert not differences([f[0] for f in found], right)
    model = build("mlp").eval()
    model.load_state_dict(right[0].weights)
    with torch.no_grad():
        losses = [model(**batch("mlp", 30 + k)) for k in range(4)]
    mean = (torch.stack([losses[0], losses[2]]).mean() + torch.stack([losses[1], losses[3]]).mean()) / 2
    for rank, (_, own, early, output, loss, after) in enumerate(found):
        assert all(torch.equal(own[name], value) for name, value in right[0].weights.items())
        assert all(torch.equal(early[name], value.detach().sum()) for name, value in right[0].weights.items())
        assert torch.equal(output, model(**batch("mlp", 7)).detach())
        assert loss == float(mean)
        assert torch.equal(after, right[0].weights["head.weight"].detach() + (1.0 + rank))


# ---- host memory


def has_no_room() -> list[tuple[str, str]]:
    """First process 0, which asks for all, and then process 1."""
    found, rooms, none = [], host_memory.host_rooms, [HostRoom(0, 0, "nothing is free")]
    for rank in range(2):
        host_memory.host_rooms = (lambda: none) if dist.get_rank() == rank else rooms  # type: ignore[assignment]
        found.append(error_of(lambda: engine_of(MLP).destroy()))
        dist.barrier()
    return found


def test_host_memory_is_asked_for_once_for_all_processes_of_a_server() -> None:
    (first, *others), (second, *more) = run(2, has_no_room)
    assert first[0] == "HostMemoryError" and second[0] == "PeerFailedError" and "rank 0" in second[1]
    assert "host memory" in second[1]
    assert others == more == [("", "")]
