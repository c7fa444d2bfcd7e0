"""Two checkouts of harmony_ds side by side: time and processor time of a step, on a model of layers that take microseconds.

    python benchmarks/overhead/compare.py ../before .
    python benchmarks/overhead/compare.py ../before . --accumulation 4 --layers 8 --width 256 --tokens 64

Each runs in a process of its own and steps in turn with the other, so that both meet the same machine. The ratio is the
median over rounds of the second's time to the first's; below 1 the second is faster. A layer here takes as long as a
Python call or two, so this is what the engine itself takes: with layers of milliseconds a difference is as many times
smaller as the layers are larger.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any


class Side:
    """One checkout's process."""

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        self.checkout = checkout
        names = ("layers", "accumulation", "width", "tokens")
        sizes = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", *sizes],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> dict[str, float]:
        """One step's milliseconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                raise SystemExit(f"{self.checkout}: the process ended.")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def child(options: argparse.Namespace) -> None:
    """Steps once for every line on standard input."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import harmony_ds

    torch.set_num_threads(1)
    shape: dict[str, Any] = {"hidden_size": options.width, "intermediate_size": 2 * options.width, "vocab_size": 64}
    shape |= {"num_attention_heads": options.width // 16, "num_key_value_heads": options.width // 16}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, use_cache=False, **shape))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "harmony": {"device": "cpu"},
    }
    engine, *_ = harmony_ds.initialize(model=model, config=config)
    words = torch.arange(options.tokens)[None] % 64
    batch = {"input_ids": words, "labels": words}
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(options.accumulation):
            engine.backward(engine(**batch).loss)
            engine.step()
        answer = {"ms": (time.perf_counter() - wall) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}
        print(json.dumps(answer), flush=True)
    engine.destroy()


def main() -> None:
    """Prints medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="two folders")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8, help="in a micro-batch")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if len(options.checkouts) != 2:
        parser.error("name two checkouts")
    sides = [Side(checkout, options) for checkout in options.checkouts]
    for side in sides:
        for _ in range(options.warm_up):
            side.step()
    rounds = [[side.step() for side in (sides if number % 2 else sides[::-1])] for number in range(options.rounds)]
    ordered = [one if number % 2 else one[::-1] for number, one in enumerate(rounds)]
    for side in sides:
        side.close()
    print(
        f"{options.layers} layers of width {options.width}, {options.accumulation} micro-batches of 1 x {options.tokens} "
        "tokens, fp32, CPU, clipping 1.0"
    )
    for what in ("ms", "cpu_ms"):
        first, second = (median(one[place][what] for one in ordered) for place in (0, 1))
        ratio = median(one[1][what] / one[0][what] for one in ordered)
        print(f"{what:7} {first:8.2f} {second:8.2f}   ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
