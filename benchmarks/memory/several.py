"""How much host memory do several processes take together?

    OMP_NUM_THREADS=1 python benchmarks/memory/several.py

One Llama is trained for two steps by 1, 2 and 4 processes of this machine, each with a micro-batch of its own, under
torchrun. Every process tells its proportional set size (what it has for itself, and a part of what it shares), how much of
that is the engine's shared memory, and of how many numbers it keeps the optimizer's state. Writes
benchmarks/results/memory-several.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "memory-several.json"
MIB = 2**20
SIZES = (1, 2, 4)
ROWS, TOKENS = 1, 32


def work(width: int, layers: int) -> None:
    """Train in one of the processes."""
    import torch
    import transformers
    from torch import distributed as dist

    import harmony_ds

    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=1024,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "harmony": {"device": "cpu", "pack_layers": 1},
    }
    engine, *_ = harmony_ds.initialize(model=model, config=settings)
    rank, size = engine.global_rank, engine.world_size
    ids = torch.randint(0, 1024, (ROWS, TOKENS), generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        engine.train_batch([{"input_ids": ids, "labels": ids}])
    engine.finish_updates()
    told = {**_memory(), "state_numbers": _own_numbers(engine, rank, size), "parameters": parameters}
    everybody: list[Any] = [told]
    if size > 1:
        everybody = [None] * size
        dist.all_gather_object(everybody, told)
    engine.destroy()
    if rank == 0:
        print("TOLD" + json.dumps(everybody), flush=True)


def _own_numbers(engine: Any, rank: int, size: int) -> int:
    """Return how many numbers' optimizer state this process keeps."""
    from harmony_ds.decomposer.graph import piece_of

    pieces = (piece_of(p.numel(), rank, size) for p in engine.module.parameters())
    return sum(piece.stop - piece.start for piece in pieces)


def _memory() -> dict[str, int]:
    """Return the bytes of this process: all of them, and those that processes of one training share."""
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="utf-8"))
    pss = {"pss": 0, "shared": 0}
    for one in maps:
        nbytes = 1024 * sum(int(n) for n in re.findall(r"^Pss:\s+(\d+)", one, re.MULTILINE))
        pss["pss"] += nbytes
        pss["shared"] += nbytes if "memfd:harmony_ds" in one.partition("\n")[0] else 0
    return pss


def measured(size: int, arguments: list[str]) -> list[dict[str, int]]:
    """Measure `size` processes, and return their answers by rank."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)] if size > 1 else []
    command = [sys.executable, *launch, __file__, "--work", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in run.stdout.splitlines() if line.startswith("TOLD")), None)
    if line is None:
        raise RuntimeError(run.stderr[-2000:])
    told: list[dict[str, int]] = json.loads(line[4:])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.width, options.layers)
        return
    rows = []
    print("processes | all MiB | shared MiB | most of one for itself MiB | state numbers of each / parameters")
    for size in SIZES:
        told = measured(size, ["--width", str(options.width), "--layers", str(options.layers)])
        rows.append({"processes": size, "ranks": told})
        own = max(one["pss"] - one["shared"] for one in told)
        most, parameters = max(one["state_numbers"] for one in told), told[0]["parameters"]
        total, shared = (sum(one[key] for one in told) for key in ("pss", "shared"))
        print(
            f"{size} | {total / MIB:,.0f} | {shared / MIB:,.0f} | {own / MIB:,.0f} | {most:,} / {parameters:,}"
            f" = 1/{parameters / most:.3f}"
        )
    RESULTS.write_text(json.dumps({"width": options.width, "layers": options.layers, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
