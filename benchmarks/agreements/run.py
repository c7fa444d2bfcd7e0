"""What would a step's messages between processes cost if torch.distributed carried them?

    OMP_NUM_THREADS=1 python -m benchmarks.agreements.run [--processes 2 4] [--rounds 25]

The processes of a server agree (`world.agree`, and `any`, `max`, `all`, `first`, which call it) through shared memory, and
may add up gradients there. Under torchrun, with gloo, on CPUs, three things are measured:

    counts      the agreements of one training step, by what they are about
    agreements  the time of one agreement: through shared memory, and through torch's collectives and its TCPStore
    gradients   the time to add up one pack's gradients, which lie on the host: in shared memory, and by gloo

All ways take turns, round by round; times are medians of the rounds, in which all processes start together. `extra` is what
a way costs above shared memory in all agreements of a step, as a share of a step of 100 ms. A store's `get` that blocks
cannot be interrupted when a process fails, and prints two warnings whenever its time is up; the store that is `polled` can.
Writes benchmarks/results/agreements.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import harmony_ds
from benchmarks.common import MIB, Stack, answers_of, quiet, write_results
from harmony_ds.decomposer.graph import piece_of
from harmony_ds.device import CpuDevice
from harmony_ds.distributed import World, join_world

STEP_MS = 100
LAYERS, MICRO_BATCHES = 8, 8
CALLS = 40  # of one way in one round
PAYLOAD = bytes(50)  # as long as a pack's flags of which parameters have a gradient
ROW_BYTES = 1024
PACK_MIB = (4, 32, 128)
BASE = "shared memory (ours)"


def count_agreements(weights: str) -> dict[str, int]:
    """Return the agreements of the third step of a training, by their kinds without numbers."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {}},
        "harmony": {"device": "cpu", "pack_layers": 1, "weights": weights},
    }
    engine, *_ = harmony_ds.initialize(model=Stack(nn.Linear(64, 64) for _ in range(LAYERS)), config=config)
    counts: Counter[str] = Counter()
    agree = World.agree

    def counted(world: World, kind: str, payload: bytes = b"") -> list[bytes]:
        counts["".join(letter for letter in kind if not letter.isdigit()).replace("  ", " ").strip()] += 1
        return agree(world, kind, payload)

    World.agree = counted  # type: ignore[method-assign]
    for _ in range(3):
        counts.clear()
        engine.train_batch([(torch.ones(2, 64),)] * MICRO_BATCHES)
    World.agree = agree  # type: ignore[method-assign]
    engine.destroy()
    return dict(counts)


def ways_to_agree(world: World, store: dist.TCPStore) -> dict[str, Callable[[], object]]:
    """Return functions that each hand a short message from every process to every other."""
    rank, size = world.rank, world.size
    group = dist.new_group(backend="gloo")
    row = torch.zeros(ROW_BYTES, dtype=torch.uint8)
    sent, received = row.repeat(size), row.repeat(size)
    number = torch.zeros(1)
    messages: list[Any] = [None] * size
    rounds = {"blocking": 0, "polled": 0}

    def post(way: str) -> list[str]:
        """Write this process's message, delete the one that all have read, and return the keys of the others'."""
        done = rounds[way] = rounds[way] + 1
        store.set(f"{way} {done} {rank}", PAYLOAD)
        if done > 2:
            store.delete_key(f"{way} {done - 2} {rank}")
        return [f"{way} {done} {other}" for other in range(size) if other != rank]

    def poll_store() -> None:
        keys = post("polled")
        while not store.check(keys):
            time.sleep(2e-5)
        store.multi_get(keys)

    return {
        BASE: lambda: world.agree("reduce pack 1", PAYLOAD),
        "gloo all_gather_object": lambda: dist.all_gather_object(messages, ("reduce pack 1", PAYLOAD), group=group),
        "gloo all_reduce, one number": lambda: dist.all_reduce(number, group=group),
        "gloo all_to_all, 1 KiB rows": lambda: dist.all_to_all_single(received, sent, group=group),
        "gloo monitored_barrier": lambda: dist.monitored_barrier(group, timeout=timedelta(seconds=100)),
        "TCPStore, blocking get": lambda: store.multi_get(post("blocking")),
        "TCPStore, polled": poll_store,
    }


def ways_to_add(world: World, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return functions that each leave this process's piece of the sum of all gradients of `nbytes`, on the host."""
    size, numel = world.size, nbytes // 4
    world.make_slots(CpuDevice(), 2, nbytes)
    gradient = torch.ones(numel)
    piece = piece_of(numel, world.rank, size)
    mine = torch.empty(piece.stop - piece.start)
    received = torch.empty(numel)

    def add_in_slots() -> None:  # gradients are swapped out into the slot anyway, which is no part of this
        world.wait_free_slot(lambda: None)
        world.reduce_on_host("pack", {"": slice(0, numel)}, [""]).write({"": mine})

    def all_to_all() -> None:
        dist.all_to_all_single(received, gradient)
        torch.sum(received.view(size, -1), 0, out=mine)

    def reduce_scatter() -> None:
        dist.reduce_scatter(mine, list(gradient.split(len(mine))))

    return {
        BASE: add_in_slots,
        "gloo all_to_all, added by rank": all_to_all,
        "gloo reduce_scatter": reduce_scatter,
        "gloo all_reduce": lambda: dist.all_reduce(gradient),
    }


def medians(ways: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Return the milliseconds of one call of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                way()
            found[name].append((time.perf_counter() - begin) / calls * 1e3)
    return {name: statistics.median(several) for name, several in found.items()}


def measure(rounds: int) -> None:
    """Measure in one of the processes that torchrun has started; the first one prints the results."""
    quiet()
    harmony_ds.init_distributed("gloo")
    counts = {weights: count_agreements(weights) for weights in ("whole", "share")}
    world = join_world(["weight"], {}, on_cuda=False, reproducible=True)
    master = world.rank == 0
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if master else None
    port = world.compute_on_first("port", lambda: store.port if store is not None else 0)
    store = store or dist.TCPStore("127.0.0.1", port, None, False)
    found: dict[str, Any] = {"processes": world.size, "counts": counts}
    found["agreement_ms"] = medians(ways_to_agree(world, store), rounds, CALLS)
    found["gradients_ms"] = {
        mib: medians(ways_to_add(world, mib * MIB), max(3, rounds // 4), 3 if mib < 100 else 1) for mib in PACK_MIB
    }
    world.agree("measured")
    if master:
        print(json.dumps(found), flush=True)
    dist.barrier()
    world.leave()


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of one number of processes."""
    counts = {weights: sum(kinds.values()) for weights, kinds in found["counts"].items()}
    step = f"a step of {MICRO_BATCHES} micro-batches and {LAYERS} packs"
    yield f"{found['processes']} processes; agreements in {step}: {counts}"
    base = found["agreement_ms"][BASE]
    for name, ms in found["agreement_ms"].items():
        extra = [f"{weights} {count * (ms - base) / STEP_MS:+6.1%}" for weights, count in counts.items()]
        yield f"  {name:30} {ms * 1e3:8.0f} us   extra: {', '.join(extra)}"
    for mib, ways in found["gradients_ms"].items():
        told = "; ".join(f"{name} {ms:.1f} ms" for name, ms in ways.items())
        yield f"  {mib} MiB of gradients: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--measure", action="store_true", help="be one of the processes, under torchrun")
    options = parser.parse_args()
    if options.measure:
        measure(options.rounds)
        return
    rows = []
    for size in options.processes:
        words = ("--measure", "--rounds", options.rounds)
        (found,) = answers_of("benchmarks.agreements.run", *words, processes=size)
        rows.append(found)
        print("\n".join(lines(found)), flush=True)
    write_results("agreements", {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
