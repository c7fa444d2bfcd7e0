"""How long DeepSpeed's CPU Adam keeps Python's lock: as it comes, and as the engine calls it.

python benchmarks/overhead/gil.py

A thread wakes up as often as it can while another one updates; the longest it had to wait is printed. What is left with
the lock released is the operating system's scheduling (on a busy machine some milliseconds).
"""

from __future__ import annotations

import statistics
import threading
import time

import torch

from harmony_ds.offload.native import gil_free_op, make_native

PARAMETERS = 20_000_000
UPDATES = 5


def longest_wait_ms(optimizer: torch.optim.Optimizer) -> float:
    """Return the longest time between two turns of a thread, while another thread updates."""
    done = threading.Event()

    def update() -> None:
        for _ in range(UPDATES):
            optimizer.step()
        done.set()

    thread = threading.Thread(target=update)
    longest = 0.0
    thread.start()
    last = time.perf_counter()
    while not done.is_set():
        time.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    return 1000 * longest


def main() -> None:
    """Print the median of three runs of each kind, interleaved."""
    parameter = torch.nn.Parameter(torch.randn(PARAMETERS))
    parameter.grad = torch.randn(PARAMETERS)
    optimizer = make_native("DeepSpeedCPUAdam", [parameter], {"lr": 1e-3})
    attribute, released = gil_free_op(optimizer)
    as_it_comes = getattr(optimizer, attribute)
    optimizer.step()
    waits: dict[str, list[float]] = {"as DeepSpeed binds it": [], "as the engine binds it": []}
    for _ in range(3):
        for name, op in zip(waits, (as_it_comes, released), strict=True):
            setattr(optimizer, attribute, op)
            waits[name].append(longest_wait_ms(optimizer))
    print(f"longest wait for Python's lock during updates of {PARAMETERS:,} parameters, median of 3:")
    for name, values in waits.items():
        print(f"  {name:<24}{statistics.median(values):8.1f} ms")


if __name__ == "__main__":
    main()
