"""How much host memory do several processes take together?

    OMP_NUM_THREADS=1 python -m benchmarks.memory.several

One Llama is trained for two steps by 1, 2 and 4 processes of this machine, each with a micro-batch of its own, under
torchrun. Every process tells its proportional set size (what it has for itself, and a part of what it shares), how much of
that is the engine's shared memory, and of how many numbers it keeps the optimizer's state. Writes
benchmarks/results/memory-several.json.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import harmony_ds
from benchmarks.common import MIB, answers_of, language_model, quiet, tokens, write_results
from harmony_ds.decomposer.graph import piece_of

SIZES = (1, 2, 4)
ROWS, TOKENS, VOCABULARY, WIDTH, LAYERS = 1, 32, 1024, 1024, 6


def work() -> None:
    """Train in one of the processes."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    model = language_model(
        "llama", **sizes, num_attention_heads=8, vocab_size=VOCABULARY, max_position_embeddings=TOKENS
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "harmony": {"device": "cpu", "pack_layers": 1},
    }
    engine, *_ = harmony_ds.initialize(model=model.to(torch.bfloat16), config=config)
    rank, size = engine.global_rank, engine.world_size
    for batch in islice(tokens(VOCABULARY, ROWS, TOKENS, seed=rank), 2):
        engine.train_batch([batch])
    engine.finish_updates()
    numels = [p.numel() for p in engine.module.parameters()]
    pieces = [piece_of(numel, rank, size) for numel in numels]
    state_numbers = sum(piece.stop - piece.start for piece in pieces)
    told = {**_memory(), "state_numbers": state_numbers, "parameters": sum(numels)}
    everybody: list[Any] = [told] * size
    if size > 1:
        dist.all_gather_object(everybody, told)
    engine.destroy()
    if rank == 0:
        print(json.dumps(everybody), flush=True)


def _memory() -> dict[str, int]:
    """Return the bytes of this process: all of them, and those that processes of one training share."""
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="utf-8"))
    pss = {"pss": 0, "shared": 0}
    for one in maps:
        nbytes = 1024 * sum(int(n) for n in re.findall(r"^Pss:\s+(\d+)", one, re.MULTILINE))
        pss["pss"] += nbytes
        pss["shared"] += nbytes if "memfd:harmony_ds" in one.partition("\n")[0] else 0
    return pss


def main() -> None:
    quiet()
    if sys.argv[1:] == ["--work"]:
        work()
        return
    rows = []
    print("processes | all MiB | shared MiB | most of one for itself MiB | state numbers of each / parameters")
    for size in SIZES:
        (told,) = answers_of("benchmarks.memory.several", "--work", processes=size)
        rows.append({"processes": size, "ranks": told})
        own = max(one["pss"] - one["shared"] for one in told)
        most, parameters = max(one["state_numbers"] for one in told), told[0]["parameters"]
        total, shared = (sum(one[key] for one in told) for key in ("pss", "shared"))
        print(
            f"{size} | {total / MIB:,.0f} | {shared / MIB:,.0f} | {own / MIB:,.0f} | {most:,} / {parameters:,}"
            f" = 1/{parameters / most:.3f}"
        )
    write_results("memory-several", {"width": WIDTH, "layers": LAYERS, "rows": rows})


if __name__ == "__main__":
    main()
