"""How much host memory does saving take, and how fast is it?

    OMP_NUM_THREADS=1 python -m benchmarks.save_peak.run                # 350M parameters
    OMP_NUM_THREADS=1 python -m benchmarks.save_peak.run --layers 4 --width 256

A transformer-like model in bf16 with fp32 masters and AdamW takes a step, then saves. Measured is
the growth of the process's peak resident memory over what it had before the save, without pages of files. It must be less
than what two layers take (weights, masters and optimizer state: 14 bytes per parameter). The same for loading.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

import harmony_ds
from benchmarks.common import MIB, Stack, quiet, status_bytes

_STATE_BYTES = 2 + 4 + 8
_ALLOWED_LAYERS = 2


def block(width: int) -> nn.Module:
    between = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
    return nn.Sequential(nn.LayerNorm(width), *between)


def peak_of(act: Callable[[], object]) -> int:
    """Return the most anonymous memory while `act` runs, sampled every millisecond."""
    done, peak = threading.Event(), [0]

    def sample() -> None:
        while not done.wait(0.001):
            peak.append(status_bytes("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        act()
    finally:
        done.set()
        thread.join()
    return max(peak)


def measured(what: str, act: Callable[[], object], layer_bytes: int, all_bytes: int) -> None:
    before, begin = status_bytes("RssAnon"), time.perf_counter()
    growth = max(peak_of(act) - before, 0)
    seconds = time.perf_counter() - begin
    print(
        f"{what}: host memory grew by {growth / MIB:.1f} MiB over {before / MIB:.0f} MiB; {growth / layer_bytes:.2f} "
        f"layers of {layer_bytes / MIB:.1f} MiB. {seconds:.1f} s, {all_bytes / seconds / 1e9:.2f} GB/s."
    )
    if growth > _ALLOWED_LAYERS * layer_bytes:
        sys.exit(f"{what} took more than {_ALLOWED_LAYERS} layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--residency", type=int, default=0, help="packs that live on the device")
    options = parser.parse_args()
    quiet()
    model = Stack(block(options.width) for _ in range(options.layers))
    count = sum(p.numel() for p in model.parameters())
    layer_bytes, all_bytes = count // options.layers * _STATE_BYTES, count * _STATE_BYTES
    harmony = {"device": "cpu", "pack_layers": 1, **({"residency": options.residency} if options.residency else {})}
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "harmony": harmony}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config)
    engine.train_batch(iter([torch.randn(1, 4, options.width).bfloat16()]))
    engine.finish_updates()  # the first update makes the optimizer's state; that is not the save's memory
    print(f"{count / 1e6:.0f}M parameters in {options.layers} layers, bf16 with fp32 masters and AdamW:")
    with tempfile.TemporaryDirectory() as folder:
        measured("save", lambda: engine.save_checkpoint(folder), layer_bytes, all_bytes)
        measured("save again", lambda: engine.save_checkpoint(folder), layer_bytes, all_bytes)
        measured("load", lambda: engine.load_checkpoint(folder), layer_bytes, all_bytes)
    engine.destroy()


if __name__ == "__main__":
    main()
