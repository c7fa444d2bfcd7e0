"""What the engine itself takes of a layer call, of two checkouts of harmony_ds side by side.

    python benchmarks/overhead/compare.py ../before .
    python benchmarks/overhead/compare.py ../before . --plan fused --output fused.json
    python benchmarks/overhead/compare.py ../before . --accumulation 4 --layers 8 --width 256 --tokens 64

A layer call is one layer run for one micro-batch, forward and back. The plan is given, so that both checkouts run the same:

    recomputed  packs of four layer calls, all of them swapped; but for the last pack, whose two decoder layers are fused,
                each layer is run again before its backward pass
    fused       one pack: each layer is run once

Beside them the same layers run in plain PyTorch, and what those take is taken off: forward twice (in the last pack once)
and backward once, layer by layer, or (fused) forward and backward once. Every side has a process of its own, and all take
turns, so that they meet the same machine. Printed are medians over rounds, of wall and of processor time, and how many of
Python's and C's functions are called in a layer call (these are the same in every run).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

PLAIN = "plain"
PACK = 4
PLANS = {"recomputed": {"pack_layers": PACK, "residency": "off"}, "fused": {}}


class Side:
    """One process: of a checkout, or (no checkout) of plain PyTorch."""

    def __init__(self, checkout: Path | None, options: argparse.Namespace) -> None:
        self.name = PLAIN if checkout is None else str(checkout)
        names = ("plan", "layers", "accumulation", "width", "tokens")
        words = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
        path = Path() if checkout is None else checkout.resolve()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", PLAIN if checkout is None else "engine", *words],
            env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str) -> dict[str, float]:
        """What one step took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                raise SystemExit(f"{self.name}: the process ended.")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ---- in a process of its own


def model_of(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A Llama of layers that take microseconds, and a micro-batch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    shape: dict[str, Any] = {"hidden_size": options.width, "intermediate_size": 2 * options.width, "vocab_size": 64}
    shape |= {"num_attention_heads": options.width // 16, "num_key_value_heads": options.width // 16}
    words = torch.arange(options.tokens)[None] % 64
    batch = {"input_ids": words, "labels": words}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, use_cache=False, **shape)), batch


def engine_step(options: argparse.Namespace) -> Callable[[], None]:
    """A step of harmony_ds."""
    import harmony_ds

    model, batch = model_of(options)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "harmony": {"device": "cpu", **PLANS[options.plan]},
    }
    engine, *_ = harmony_ds.initialize(model=model, config=config)

    def step() -> None:
        for _ in range(options.accumulation):
            engine.backward(engine(**batch).loss)
            engine.step()

    return step


def plain_step(options: argparse.Namespace) -> Callable[[], None]:
    """The layers of a step in plain PyTorch, as the plan runs them, and nothing else."""
    import torch

    model, batch = model_of(options)
    seen: list[Any] = []
    layers = list(model.model.layers)
    hook = layers[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    model(**batch)
    hook.remove()
    (hidden, *_), arguments = seen[0]
    hidden, gradient = hidden.detach(), torch.ones_like(hidden)

    def recomputed() -> None:
        for layer in layers[: 2 - PACK]:  # norm and head end the last pack
            for _ in range(options.accumulation):
                layer(hidden.detach().requires_grad_(), **arguments)
        for layer in reversed(layers):
            for _ in range(options.accumulation):
                layer(hidden.detach().requires_grad_(), **arguments).backward(gradient)

    def fused() -> None:
        for _ in range(options.accumulation):
            output = hidden.detach().requires_grad_()
            for layer in layers:
                output = layer(output, **arguments)
            output.backward(gradient)

    return {"recomputed": recomputed, "fused": fused}[options.plan]


def counted(step: Callable[[], None]) -> dict[str, float]:
    """How many functions a step calls, on all threads."""
    calls = {"call": 0, "c_call": 0}

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        if event in calls:
            calls[event] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    step()
    sys.setprofile(None)
    threading.setprofile(None)
    return {"calls": float(sum(calls.values()))}


def child(options: argparse.Namespace) -> None:
    """Steps once for every line on standard input."""
    step = {PLAIN: plain_step, "engine": engine_step}[options.child](options)
    for line in sys.stdin:
        if line.strip() == "count":
            answer = counted(step)
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            answer = {"wall": (time.perf_counter() - wall) * 1e6, "processor": (time.process_time() - cpu) * 1e6}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Prints what each side takes for a layer call, and what of it is the engine's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="two folders")
    parser.add_argument("--plan", choices=PLANS, default="recomputed")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8, help="in a micro-batch")
    parser.add_argument("--output", type=Path, help="a JSON file for what is printed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if len(options.checkouts) != 2:
        parser.error("name two checkouts")
    sides = [Side(checkout, options) for checkout in (None, *options.checkouts)]
    for side in sides:
        for _ in range(options.warm_up):
            side.ask("step")
    rounds = []
    for number in range(options.rounds):
        first = number % len(sides)
        answers = {side.name: side.ask("step") for side in (*sides[first:], *sides[:first])}
        rounds.append([answers[side.name] for side in sides])
    calls = [side.ask("count")["calls"] for side in sides]
    for side in sides:
        side.close()
    rows = _rows(rounds, calls, options.layers * options.accumulation)
    print(
        f"{options.plan}: {options.layers} layers of width {options.width}, {options.accumulation} micro-batches of 1 x "
        f"{options.tokens} tokens, fp32, CPU, clipping 1.0; of a layer call, median of {options.rounds} rounds:"
    )
    print(f"{'':22}{'plain PyTorch':>14}{'first':>9}{'second':>9}   engine's own: first, second, ratio")
    for row in rows:
        plain, before, after, first, second, ratio = row.values()
        print(f"{row.what:22}{plain:14.1f}{before:9.1f}{after:9.1f}{first:24.1f}{second:8.1f}{ratio:7.2f}")
    if options.output:
        content = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "rows": [asdict(r) for r in rows],
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """Of a layer call: what the plain layers and both checkouts take, and what of it is the engine's own."""

    what: str
    plain: float
    first: float
    second: float
    own_first: float
    own_second: float
    own_ratio: float

    def values(self) -> tuple[float, ...]:
        """All numbers."""
        return self.plain, self.first, self.second, self.own_first, self.own_second, self.own_ratio


def _rows(rounds: list[list[dict[str, float]]], calls: list[float], per_step: int) -> list[Row]:
    rows = []
    for what in ("wall", "processor"):
        times = [median(one[place][what] for one in rounds) / per_step for place in range(3)]
        own = [median(one[place][what] - one[0][what] for one in rounds) / per_step for place in (1, 2)]
        rows.append(Row(f"{what} time, us", *times, *own, own[1] / own[0]))
    each = [one / per_step for one in calls]
    own = [one - each[0] for one in each[1:]]
    return [*rows, Row("functions called", *each, *own, own[1] / own[0])]


if __name__ == "__main__":
    main()
