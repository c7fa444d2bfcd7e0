"""Do Hugging Face families train grouped, and as in plain PyTorch? Train tiny variants by the loop and by `train_batch`.

    python -m benchmarks.families.run                      # all: a table, and benchmarks/results/families.json
    python -m benchmarks.families.run --only qwen2-vl swin
    python -m benchmarks.families.run --devices 3          # as a pipeline over three devices

Each variant takes two steps of three clipped micro-batches (SGD, fp32, dropout as configured), in plain PyTorch and on the
CPU device in packs of one layer; the swap ratio (bytes of weights and gradients over the least possible) is that of a
third step of 16 micro-batches (below 1.0 where weights are not used). "off" is the largest difference of any weight, over
its tensor's largest value, or 0.001 if that is less (biases of keys, whose gradients are nothing but rounding).
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np
import torch
from torch import nn

import harmony_ds
from benchmarks.common import quiet, write_results
from benchmarks.families.variants import Batch, Variant, variants

STEPS, GROUP, LARGE = 2, 3, 16
LEARNING_RATE, CLIP, SEED = 0.05, 1.0, 5
_LEAST = 1e-3


@dataclass(frozen=True)
class Row:
    """Measurement of one variant, by one way of training; `error`: why there is none."""

    name: str
    kind: str
    way: str
    off: float = 0.0
    ratio: float = 0.0
    seconds: float = 0.0
    error: str = ""


def groups_of(variant: Variant) -> list[list[Batch]]:
    return [[variant.batch(GROUP * step + index) for index in range(GROUP)] for step in range(STEPS)]


def train_plainly(variant: Variant) -> dict[str, torch.Tensor]:
    """Return the weights after plain gradient accumulation."""
    model = variant.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    for step, group in enumerate(groups_of(variant)):
        for index, batch in enumerate(group):
            seed = harmony_ds.micro_batch_seed(SEED, step, index)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            (model(**{k: v.clone() for k, v in batch.items()}).loss / GROUP).backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def try_out(variant: Variant, way: str, expected: dict[str, torch.Tensor], devices: int) -> Row:
    begin = perf_counter()
    model = variant.build()
    engine, *_ = harmony_ds.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": GROUP,
            "gradient_clipping": CLIP,
            "harmony": {"device": "cpu", "devices": devices, "pack_layers": 1, "seed": SEED},
        },
    )
    try:
        for group in groups_of(variant):
            step(engine, group, way)
        off = largest_difference(expected, dict(model.named_parameters()))
        engine.set_train_batch_size(2 * LARGE)
        step(engine, [variant.batch(index) for index in range(LARGE)], way)
        return Row(variant.name, variant.kind, way, off, engine.swap_report().ratio, perf_counter() - begin)
    finally:
        engine.destroy()


def step(engine: harmony_ds.HarmonyEngine, group: list[Batch], way: str) -> None:
    if way == "train_batch":
        engine.train_batch(iter(group))
        return
    for batch in group:
        engine.backward(engine(**batch).loss)
        engine.step()


def largest_difference(expected: dict[str, torch.Tensor], actual: dict[str, nn.Parameter]) -> float:
    return max(
        ((actual[name].detach() - one).abs().max() / one.abs().max().clamp(min=_LEAST)).item()
        for name, one in expected.items()
    )


def rows_of(variant: Variant, devices: int) -> list[Row]:
    rows, way = [], "plain"
    try:
        expected = train_plainly(variant)
        for way in ("loop", "train_batch"):
            rows.append(try_out(variant, way, expected, devices))
    except Exception as error:  # noqa: BLE001 - it is the row
        rows.append(Row(variant.name, variant.kind, way, error=f"{type(error).__name__}: {error}"[:300]))
    return rows


def line(row: Row) -> str:
    said = row.error.replace("|", "/").replace("\n", " ") or f"{row.off:.1e} | {row.ratio:.4f} | {row.seconds:.1f}"
    return f"| {row.name} | {row.kind} | {row.way} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants alone; nothing is written")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="as a pipeline over N devices")
    given = parser.parse_args()
    quiet()
    rows: list[Row] = []
    print("| family | trained on | by | off | ratio | s |\n|---|---|---|---|---|---|")
    for variant in variants():
        if not given.only or variant.name in given.only:
            for row in rows_of(variant, given.devices):
                rows.append(row)
                print(line(row), flush=True)
    good = sum(not row.error and row.off < 1e-5 and row.ratio < 1.001 for row in rows)
    print(f"\n{len(rows)} rows: {good} equal to 1e-5 and with a swap ratio of 1.0 at most")
    if not given.only:
        several = f"-{given.devices}-devices" if given.devices > 1 else ""
        write_results(f"families{several}", {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
