"""(c) Where does one step's time go? A Perfetto trace, and what each stream achieved.

    python benchmarks/gpu/one_step.py --model llama-6b --cap-gib 24 --tokens 32768

Prints and saves, for a step of median time: how long each stream worked; bandwidth of swap-in and swap-out while they
worked; the update's memory traffic per second beside that of a STREAM-like triad on the same cores; the share of the
step in which the device computed. Without a GPU a small model runs on the CPU device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from head_to_head import MODELS, SMALL, SMALL_CAP_GIB, SMALL_TOKENS
from suite import ROOT, device, results_folder, write

import harmony_ds
from harmony_ds.bench.task import Task
from harmony_ds.scheduler.simulate import COMPUTE, SWAP_IN, SWAP_OUT, UPDATE

_TRIAD_ELEMENTS = 2**26
_WARM_UP, _RECORDED = 3, 5


def main() -> None:
    args = _arguments()
    on_cuda = device() == "cuda"
    sys.path.insert(0, str(ROOT))
    function, sequence = MODELS[args.model] if on_cuda else SMALL
    tokens, cap = (args.tokens, args.cap_gib) if on_cuda else (SMALL_TOKENS, SMALL_CAP_GIB)
    ds_config = {
        "gradient_clipping": 1.0 if args.clip else 0.0,
        "bf16": {"enabled": on_cuda, **({} if args.clip else {"check_grad_overflow": False})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "harmony": {"device": device(), "device_memory_gib": cap},
    }
    rows = args.micro_batch
    model = f"benchmarks.gpu.models:{function}"
    task = Task(model, ds_config, rows, rows, max(1, tokens // sequence // rows), sequence, device(), cap)
    triad = _triad_bytes_per_s()
    engine, *_ = harmony_ds.initialize(model=task.subject.model, config=task.config())
    for step in range(_WARM_UP):
        engine.train_batch(task.batches(step))
    with engine.record_steps() as recorded:
        for step in range(_RECORDED):
            engine.train_batch(task.batches(_WARM_UP + step))
    middle = statistics.median_low(step.step_ms for step in recorded)
    shown = next(step for step in recorded if step.step_ms == middle)
    swaps, busy = engine.swap_report(), shown.busy_ms
    elements = sum(p.numel() for p in task.subject.model.parameters())
    update_bytes = elements * (4 + 24 + (2 if on_cuda else 0))  # gradient; master and two moments, both ways; bf16 copy
    found = {
        "task": task.as_json(),
        "plan": engine.plan_report().choices[0].reason,
        "step_ms": [step.step_ms for step in recorded],
        "busy_ms": dict(busy),
        "tokens_per_s": task.items / middle * 1e3,
        "computing_share": busy[COMPUTE] / middle,
        "to_device_gb_per_s": _rate(sum(swaps.host_to_device.values()), busy[SWAP_IN]),
        "to_host_gb_per_s": _rate(sum(swaps.device_to_host.values()), busy[SWAP_OUT]),
        "update_gb_per_s": _rate(update_bytes, busy[UPDATE]),
        "triad_gb_per_s": triad / 1e9,
    }
    for name, value in found.items():
        if isinstance(value, (float, str)):
            print(f"{name:<22}{value if isinstance(value, str) else format(value, ',.3f')}")
    print(engine.plan_report(), engine.memory_report(), swaps, sep="\n")
    name = f"step-{args.model if on_cuda else 'small'}-{tokens}tok-{'clip' if args.clip else 'noclip'}"
    trace = results_folder() / f"{name}.trace.json"
    trace.write_text(json.dumps(engine.trace(shown)), encoding="utf-8")
    print(f"{trace}: open it in https://ui.perfetto.dev")
    write(name, found)
    engine.destroy()


def _rate(nbytes: float, ms: float) -> float:
    return nbytes / ms / 1e6 if ms else 0.0


def _triad_bytes_per_s() -> float:
    """A = b + s * c in fp32 on all cores: two reads and a write for each element."""
    a, b, c = (torch.ones(_TRIAD_ELEMENTS) for _ in range(3))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        seconds.append(time.perf_counter() - start)
    return 12 * _TRIAD_ELEMENTS / statistics.median(seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-6b")
    parser.add_argument("--cap-gib", type=float, default=24)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--clip", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse_args()


if __name__ == "__main__":
    main()
