"""What several processes move, counted in the collectives themselves and on the links, is what the plan says."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from harmony_ds.parallel import exchange as exchange_module
from tests.parallel.processes import run
from tests.parallel.training import Training, data_of, differences, engine_of, number_of, train_plainly, train_with

_ONE = Training(model="llama", harmony={"pack_layers": 2, "device_memory_gib": 0.02, "reduce": "device"})


def _moved(accumulations: tuple[int, ...], clip: float, **settings: Any) -> list[dict[str, Any]]:
    """In one of several processes: what the second step of a training moves."""
    told = []
    for accumulation in accumulations:
        harmony = {**_ONE.harmony, **settings}
        training = Training(model=_ONE.model, harmony=harmony, accumulation=accumulation, clip=clip)
        engine = engine_of(training)
        rank, size = engine.global_rank, engine.world_size
        counted = _count_collectives(rank)
        for step in range(2):
            counted["sent"] = 0
            numbers = [number_of(training, size, rank, step, i) for i in range(accumulation)]
            engine.train_batch([data_of(training, number) for number in numbers])
        counted["undo"]()
        plan, swaps = engine.plan_report(), engine.swap_report()
        told.append(
            {
                "in the collectives": counted["sent"],
                "planned": plan.planned.sent,
                "counted": plan.sent_bytes,
                "planned swaps": plan.planned.total,
                "counted swaps": plan.swapped_bytes,
                "ratio": swaps.ratio,
                "weights in": plan.planned.weights_in,
                "gradients": sum(p.numel() * 4 for p in engine.module.parameters()),
            }
        )
        engine.destroy()
    return told


def _count_collectives(rank: int) -> dict[str, Any]:
    """Counts, from here on, what leaves this process by torch's collectives over tensors."""
    exchange = dist.all_to_all_single
    counted: dict[str, Any] = {"sent": 0}

    def counting(received: Tensor, sent: Tensor, there: list[int], away: list[int], group: Any) -> Any:
        counted["sent"] += (sent.numel() - away[rank]) * sent.element_size()
        return exchange(received, sent, there, away, group=group)

    gather = exchange_module._all_gather

    def counting_shares(whole: Tensor, own: Tensor, group: Any) -> Any:
        counted["sent"] += (whole.numel() - own.numel()) * own.element_size()
        return gather(whole, own, group=group)

    def undo() -> None:
        dist.all_to_all_single = exchange
        exchange_module._all_gather = gather

    exchange_module._all_gather = counting_shares
    dist.all_to_all_single = counting  # type: ignore[assignment]
    counted["undo"] = undo
    return counted


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_cross_once_a_step_whatever_the_accumulation(size: int) -> None:
    of_ranks = run(size, _moved, (1, 4, 16), 0.0)
    for told in of_ranks:
        for one in told:
            assert one["in the collectives"] == one["counted"] == one["planned"]
            assert one["counted swaps"] == one["planned swaps"]
            assert one["ratio"] == 1.0
        assert len({one["counted"] for one in told}) == 1  # accumulation is no reason to send more
    for accumulation in range(3):
        sent = sum(told[accumulation]["counted"] for told in of_ranks)
        assert sent == (size - 1) * of_ranks[0][0]["gradients"]


def test_clipping_sends_no_more() -> None:
    (clipped,), _ = run(2, _moved, (2,), 0.01)
    (plain,), _ = run(2, _moved, (2,), 0.0)
    assert clipped["counted"] == plain["counted"] == clipped["planned"]


@pytest.mark.parametrize("size", [2, 3])
def test_weights_that_are_shared_cross_the_link_once_for_all(size: int) -> None:
    shared = run(size, partial(_moved, weights="share"), (1, 4), 0.0)
    whole = run(size, partial(_moved, weights="whole"), (1, 4), 0.0)
    for rank in range(size):
        for own, all_of_it in zip(shared[rank], whole[rank], strict=True):
            assert own["in the collectives"] == own["counted"] == own["planned"]
            assert own["counted swaps"] == own["planned swaps"]
            assert own["ratio"] == 1.0
            gathered = own["counted"] - all_of_it["counted"]
            assert gathered == all_of_it["weights in"] - own["weights in"]
            left_over = own["weights in"] - all_of_it["weights in"] / size
            assert 0 <= left_over < 0.02 * all_of_it["weights in"]
        assert shared[rank][0]["counted"] == shared[rank][1]["counted"]  # accumulation is no reason to send more


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_are_reduced_on_the_host_leave_whole_and_cross_nothing_else(size: int) -> None:
    there = run(size, partial(_moved, reduce="host"), (1, 4), 0.01)
    before = run(size, partial(_moved, reduce="device"), (1, 4), 0.01)
    for rank in range(size):
        for own, pieces in zip(there[rank], before[rank], strict=True):
            assert own["in the collectives"] == own["counted"] == own["planned"] == 0
            assert own["counted swaps"] == own["planned swaps"]
            assert own["ratio"] == 1.0
            assert own["weights in"] == pieces["weights in"]
    for accumulation in range(2):  # the pieces of all processes are what each swaps out
        all_pieces = sum(told[accumulation]["counted swaps"] - told[accumulation]["weights in"] for told in before)
        whole = there[0][accumulation]["counted swaps"] - there[0][accumulation]["weights in"]
        assert 0 <= all_pieces - whole < 0.01 * whole  # each is aligned


def _kept(folder: str) -> dict[str, Any]:
    """In one of several processes: a training by a plan in which the first pack is kept from forward to backward."""
    training = Training(clip=0.05, harmony={"pack_layers": 2})
    engine = engine_of(training)
    engine.train_batch([data_of(training, number_of(training, 2, engine.global_rank, 0, i)) for i in range(2)])
    plan, swapped = engine.plan, engine.plan_report().swapped_bytes
    kept = replace(plan, policy=replace(plan.policy, kept=(0,)))
    file = Path(folder) / "plan.json"
    if engine.global_rank == 0:  # which the other one waits for in `initialize`
        file.write_text(kept.to_json())
    engine.destroy()
    engine = engine_of(replace(training, harmony={"pack_layers": None, "plan": str(file)}))
    result = train_with(engine, training)
    report = engine.plan_report()
    engine.destroy()
    return {
        "result": result,
        "counted": report.swapped_bytes,
        "planned": report.planned.total,
        "saved": swapped - report.swapped_bytes,
        "pack": plan.packs[0].weight_bytes,
    }


def test_a_pack_is_kept_from_forward_to_backward_by_several_devices(tmp_path: Path) -> None:
    told = run(2, _kept, str(tmp_path))
    assert not differences([one["result"] for one in told], train_plainly(Training(clip=0.05), 2))
    for one in told:
        assert one["counted"] == one["planned"]
        assert one["saved"] == one["pack"] > 0
