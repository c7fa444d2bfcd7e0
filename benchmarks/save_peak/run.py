"""How much host memory does saving take, and how fast is it?

    OMP_NUM_THREADS=1 python benchmarks/save_peak/run.py                # 350M parameters
    OMP_NUM_THREADS=1 python benchmarks/save_peak/run.py --layers 4 --width 256 --limit-layers 2

In a process of its own: a transformer-like model in bf16 with fp32 masters and AdamW takes a step, then saves. Measured is
the growth of the process's peak resident memory over what it had before the save, without pages of files. It must be less
than what two layers take (weights, masters and optimizer state: 14 bytes per parameter). The same for loading.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import harmony_ds

_MIB = 2**20
_STATE_BYTES = 2 + 4 + 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def anonymous_bytes() -> int:
    """Return the resident memory of this process that is not pages of files."""
    rows = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss")
    )
    return int(rows["RssAnon"].split()[0]) * 1024


class Peak:
    """Maximum of `anonymous_bytes` while it is watched, sampled every millisecond."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.is_set():
                self.bytes = max(self.bytes, anonymous_bytes())
                time.sleep(0.001)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def measured(what: str, act: Callable[[], object], layer_bytes: int, all_bytes: int, limit_layers: float) -> None:
    before = anonymous_bytes()
    peak = Peak()
    begin = time.perf_counter()
    with peak.watched():
        act()
    seconds = time.perf_counter() - begin
    growth = max(peak.bytes - before, 0)
    print(
        f"{what}: host memory grew by {growth / _MIB:.1f} MiB over {before / _MIB:.0f} MiB; {growth / layer_bytes:.2f} "
        f"layers of {layer_bytes / _MIB:.1f} MiB. {seconds:.1f} s, {all_bytes / seconds / 1e9:.2f} GB/s."
    )
    if growth > limit_layers * layer_bytes:
        sys.exit(f"{what} took more than {limit_layers:g} layers")


def child(options: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    model = Net(options.layers, options.width)
    count = sum(p.numel() for p in model.parameters())
    layer_bytes = count // options.layers * _STATE_BYTES
    harmony = {"device": "cpu", "pack_layers": 1, **({"residency": options.residency} if options.residency else {})}
    engine, *_ = harmony_ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "harmony": harmony,
        },
    )
    engine.train_batch(iter([torch.randn(1, 4, options.width).bfloat16()]))
    engine.finish_updates()  # the first update makes the optimizer's state; that is not the save's memory
    print(f"{count / 1e6:.0f}M parameters in {options.layers} layers, bf16 with fp32 masters and AdamW:")
    total = count * _STATE_BYTES
    measured("save", lambda: engine.save_checkpoint(folder), layer_bytes, total, options.limit_layers)
    measured("save again", lambda: engine.save_checkpoint(folder), layer_bytes, total, options.limit_layers)
    measured("load", lambda: engine.load_checkpoint(folder), layer_bytes, total, options.limit_layers)
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--limit-layers", type=float, default=2.0)
    parser.add_argument("--residency", type=int, default=0, help="packs that live on the device")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options, options.child)
        return
    folder = Path(tempfile.mkdtemp())
    try:
        run = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", str(folder)], check=False)
    finally:
        shutil.rmtree(folder)
    sys.exit(run.returncode)


if __name__ == "__main__":
    main()
