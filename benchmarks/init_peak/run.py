"""How much host memory does `initialize` take on its way?

    OMP_NUM_THREADS=1 python -m benchmarks.init_peak.run                # 325M parameters, every source, fp32 and bf16
    OMP_NUM_THREADS=1 python -m benchmarks.init_peak.run --layers 8 --width 512 --vocabulary 256

A Llama is built in host memory, or comes from `from_pretrained` (safetensors of its dtype, mapped). In a process of its
own each, the kernel's high-water mark of resident memory is reset before `initialize` and read after it. Less what the
process had before the model was there, and less the mapped files (the page cache's, which gives them back), it may be at
most the final state (weights in slabs, fp32 masters) plus twice the state of the largest layer. The optimizer's state is
made by the first update, and gradients by the first step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import harmony_ds
from benchmarks.common import MIB, answers_of, language_model, quiet, status_bytes, write_results

_MODULE = "benchmarks.init_peak.run"
SOURCES = ("host", "from_pretrained")
_STATE_BYTES = {"fp32": 4, "bf16": 6}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ALLOWED_LAYERS = 2
COLUMNS = ("before", "peak", "after", "state", "layer")


def llama(layers: int, width: int, vocabulary: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_attention_heads": 8}
    return language_model("llama", **sizes, num_hidden_layers=layers, vocab_size=vocabulary)


def engine_over(model: nn.Module, dtype: str) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    config = {
        "train_batch_size": 1,
        "optimizer": optimizer,
        "bf16": {"enabled": dtype == "bf16"},
        "harmony": {"device": "cpu"},
    }
    return harmony_ds.initialize(model=model, config=config)[0]


def build(source: str, sizes: tuple[int, int, int], folder: Path, dtype: str) -> nn.Module:
    if source == "host":
        return llama(*sizes)
    return AutoModelForCausalLM.from_pretrained(folder / dtype, dtype=_DTYPES[dtype])


def measure(source: str, dtype: str, sizes: tuple[int, int, int], folder: Path) -> dict[str, Any]:
    """Return bytes, less what the process had before the model; `layer` is the largest layer's share of `state`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base = status_bytes("VmRSS")
    model: Any = build(source, sizes, folder, dtype)
    before = status_bytes("VmRSS") - base
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    engine = engine_over(model, dtype)
    files = (folder / dtype).iterdir() if source == "from_pretrained" else ()
    peak = status_bytes("VmHWM") - base - sum(file.stat().st_size for file in files)
    after = status_bytes("VmRSS") - base
    parts = [model, model.model.embed_tokens, *model.model.layers, model.lm_head]
    count, *layers = [sum(p.numel() for p in part.parameters()) for part in parts]
    state, layer = count * _STATE_BYTES[dtype], max(layers) * _STATE_BYTES[dtype]
    engine.destroy()
    measured = dict(zip(COLUMNS, (before, peak, after, state, layer), strict=True))
    return {"source": source, "dtype": dtype, "parameters": count, **measured}


def child(options: argparse.Namespace) -> None:
    """Print a line for each case; without any, make the files."""
    sizes = options.layers, options.width, options.vocabulary
    for name, dtype in _DTYPES.items():
        if not (options.folder / name).exists():
            llama(*sizes).to(dtype).save_pretrained(options.folder / name)
    engine_over(llama(1, 64, 64), "bf16").destroy()  # modules that are loaded on first use are there now
    for case in options.cases:
        print(json.dumps(measure(*case.split(":"), sizes, options.folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet()
    if options.folder is not None:
        child(options)
        return
    words = ["--layers", options.layers, "--width", options.width, "--vocabulary", options.vocabulary]
    print(f"{'MiB':<22}" + " ".join(f"{name:>10}" for name in COLUMNS) + "   over, layers")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        answers_of(_MODULE, *words, "--folder", folder)
        for source, dtype in product(SOURCES, _STATE_BYTES):
            (row,) = answers_of(_MODULE, *words, "--folder", folder, "--cases", f"{source}:{dtype}")
            row["layers_over"] = (row["peak"] - row["state"]) / row["layer"]
            mib = " ".join(f"{row[name] / MIB:10,.1f}" for name in COLUMNS)
            print(f"{source:<16}{dtype:<6}{mib} {row['layers_over']:9.2f}", flush=True)
            rows.append(row)
    write_results("init_peak", {"rows": rows})
    over = [f"{row['source']} {row['dtype']}" for row in rows if row["layers_over"] > _ALLOWED_LAYERS]
    if over:
        sys.exit(f"more than {_ALLOWED_LAYERS} layers above the final state: {', '.join(over)}")


if __name__ == "__main__":
    main()
