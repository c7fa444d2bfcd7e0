"""Bytes of several processes, counted in collectives and on the links, equal the plan's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from harmony_ds.distributed import exchange as exchange_module
from tests.distributed.processes import run
from tests.distributed.training import Training, data_of, differences, engine_of, number_of, train_plainly, train_with

_ONE = Training(model="llama", harmony={"pack_layers": 2, "device_memory_gib": 0.02, "reduce": "device"})


def _counted_bytes(several: Sequence[Training]) -> list[dict[str, Any]]:
    """In one of several processes: what the second step of each training moves."""
    told = []
    for training in several:
        engine = engine_of(training)
        rank, size = engine.global_rank, engine.world_size
        counted = _count_collectives(rank)
        for step in range(2):
            counted["sent"] = 0
            numbers = [number_of(training, size, rank, step, i) for i in range(training.accumulation)]
            engine.train_batch([data_of(training, number) for number in numbers])
        counted["undo"]()
        plan, swaps = engine.plan_report(), engine.swap_report()
        assert counted["sent"] == plan.sent_bytes == plan.planned.sent
        assert plan.swapped_bytes == plan.planned.total
        assert swaps.ratio == 1.0
        gradients = sum(p.numel() * 4 for p in engine.module.parameters())
        weights_in = plan.planned.weights_in
        told.append(
            {"sent": plan.sent_bytes, "out": plan.swapped_bytes - weights_in, "in": weights_in, "gradients": gradients}
        )
        engine.destroy()
    return told


def _count_collectives(rank: int) -> dict[str, Any]:
    """Count from now on the bytes that this process sends by torch's collectives over tensors."""
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
def test_each_setting_sends_the_planned_bytes_and_accumulation_and_clipping_no_more(size: int) -> None:
    ways = {"device": {"weights": "whole"}, "share": {"weights": "share"}, "host": {"reduce": "host"}}
    rows = [(way, *more) for way in ways for more in ((1, 0.0), (4, 0.01))]
    several = [
        replace(_ONE, harmony={**_ONE.harmony, **ways[way]}, accumulation=accumulation, clip=clip)
        for way, accumulation, clip in rows
    ]
    found = run(size, _counted_bytes, several, limit_s=200)
    for of_rank in found:
        for few, many in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert (few["sent"], few["in"]) == (many["sent"], many["in"])
    of_ways = {way: [of_rank[2 * place] for of_rank in found] for place, way in enumerate(ways)}

    assert sum(one["sent"] for one in of_ways["device"]) == (size - 1) * found[0][0]["gradients"]
    for own, all_of_it in zip(of_ways["share"], of_ways["device"], strict=True):
        assert own["sent"] - all_of_it["sent"] == all_of_it["in"] - own["in"]
        left_over = own["in"] - all_of_it["in"] / size
        assert 0 <= left_over < 0.02 * all_of_it["in"]
    for own, pieces in zip(of_ways["host"], of_ways["device"], strict=True):
        assert own["sent"] == 0
        assert own["in"] == pieces["in"]
    # The pieces of all processes are what each swaps out where sums are the host's; each piece is aligned.
    all_pieces, whole = sum(one["out"] for one in of_ways["device"]), of_ways["host"][0]["out"]
    assert 0 <= all_pieces - whole < 0.01 * whole


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
