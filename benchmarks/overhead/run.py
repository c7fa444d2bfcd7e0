"""What does the engine itself cost a layer call? Time and function calls, of one checkout of harmony_ds or two.

    python benchmarks/overhead/run.py                          this checkout
    python benchmarks/overhead/run.py ../before . --plan fused
    python benchmarks/overhead/run.py --accumulation 4 --layers 8 --width 256 --tokens 64

A layer call is one layer run for one micro-batch, forward and back. The plan is given, so that all checkouts run the same:

    recomputed  packs of four layer calls, all of them swapped; but for the last pack, whose two decoder layers are fused,
                each layer is run again before its backward pass
    fused       one pack: each layer is run once
    joined      as recomputed, and calls take the rows of all micro-batches (a layer call is still counted for each)

Beside them the same layers run in plain PyTorch, whose time is taken off: forward twice (in the last pack once) and
backward once, layer by layer, or (fused) forward and backward once. Every side has a process of its own, and all take
turns. Medians over rounds, of wall and of processor time, and the number of functions of Python and C called (the same in
every run), are printed per layer call.
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
from pathlib import Path
from statistics import median
from typing import Any

PLAIN = "plain PyTorch"
PACK = 4
_PACKS = {"pack_layers": PACK, "residency": "off"}
PLANS: dict[str, dict[str, Any]] = {"recomputed": _PACKS, "fused": {}, "joined": _PACKS}


def started(checkout: Path | None, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Return the process of a checkout, or (no checkout) of plain PyTorch: it takes a step for each line that it reads."""
    names = ("plan", "layers", "accumulation", "width", "tokens")
    words = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    return subprocess.Popen(
        [sys.executable, __file__, "--child", "engine" if checkout else "plain", *words],
        env={**os.environ, "PYTHONPATH": str((checkout or Path()).resolve()), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def ask(process: subprocess.Popen[str], request: str) -> dict[str, float]:
    """Run one step, and return what it took."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{request}\n")
    answer: dict[str, float] = json.loads(next(line for line in process.stdout if line.startswith("{")))
    return answer


def model_of(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return a Llama of layers that take microseconds, and a micro-batch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    shape: dict[str, Any] = {"hidden_size": options.width, "intermediate_size": 2 * options.width, "vocab_size": 64}
    shape |= {"num_attention_heads": options.width // 16, "num_key_value_heads": options.width // 16}
    words = torch.arange(options.tokens)[None] % 64
    batch = {"input_ids": words, "labels": words}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, use_cache=False, **shape)), batch


def engine_step(options: argparse.Namespace) -> Callable[[], None]:
    """Return a step of harmony_ds."""
    import harmony_ds

    model, batch = model_of(options)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "harmony": {"device": "cpu", **PLANS[options.plan]},
    }
    if options.plan == "joined":
        config["harmony"]["micro_batch"] = options.accumulation
    engine, *_ = harmony_ds.initialize(model=model, config=config)

    def step() -> None:
        for _ in range(options.accumulation):
            engine.backward(engine(**batch).loss)
            engine.step()

    return step


def plain_step(options: argparse.Namespace) -> Callable[[], None]:
    """Return the layers of a step in plain PyTorch, as the plan runs them, and nothing else."""
    import torch

    model, batch = model_of(options)
    seen: list[Any] = []
    layers = list(model.model.layers)
    hook = layers[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    model(**batch)
    hook.remove()
    (hidden, *_), arguments = seen[0]
    calls = 1 if options.plan == "joined" else options.accumulation
    hidden = hidden.detach().repeat(options.accumulation // calls, 1, 1)
    gradient = torch.ones_like(hidden)

    def recomputed() -> None:
        for layer in layers[: 2 - PACK]:  # norm and head end the last pack
            for _ in range(calls):
                layer(hidden.detach().requires_grad_(), **arguments)
        for layer in reversed(layers):
            for _ in range(calls):
                layer(hidden.detach().requires_grad_(), **arguments).backward(gradient)

    def fused() -> None:
        for _ in range(options.accumulation):
            output = hidden.detach().requires_grad_()
            for layer in layers:
                output = layer(output, **arguments)
            output.backward(gradient)

    return fused if options.plan == "fused" else recomputed


def count_calls(step: Callable[[], None]) -> dict[str, float]:
    """Count the functions that a step calls, on all threads."""
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
    """Take one step for every line on standard input."""
    step = {"plain": plain_step, "engine": engine_step}[options.child](options)
    for line in sys.stdin:
        if line.strip() == "count":
            answer = count_calls(step)
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            answer = {
                "wall, us": (time.perf_counter() - wall) * 1e6,
                "processor, us": (time.process_time() - cpu) * 1e6,
            }
        print(json.dumps(answer), flush=True)


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return by side the answers of all rounds, the counted one last."""
    sides = {PLAIN: started(None, options)} | {str(path): started(path, options) for path in options.checkouts}
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(-options.warm_up, options.rounds):
        turns = [*sides]
        first = number % len(turns)
        for name in turns[first:] + turns[:first]:
            answer = ask(sides[name], "step")
            answers[name] += [answer] if number >= 0 else []
    for name, process in sides.items():
        answers[name].append(ask(process, "count"))
        process.communicate()
    return answers


def main() -> None:
    """Print by side and quantity the cost of a layer call, and the engine's own part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()], help="folders (default: this one)")
    parser.add_argument("--plan", choices=PLANS, default="recomputed")
    for name, default in (("rounds", 40), ("warm-up", 6), ("layers", 32), ("accumulation", 8), ("width", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=8, help="in a micro-batch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    answers, per_step = measure(options), options.layers * options.accumulation
    for what in ("wall, us", "processor, us", "calls"):
        plain = [answer[what] for answer in answers[PLAIN] if what in answer]
        for name, all_of in answers.items():
            values = [answer[what] for answer in all_of if what in answer]
            own = median(one - other for one, other in zip(values, plain, strict=True)) / per_step
            of_engine = "" if name == PLAIN else f"{own:>9.1f} its own"
            print(f"{name:<24}{what:<16}{median(values) / per_step:>9.1f}{of_engine}")


if __name__ == "__main__":
    main()
