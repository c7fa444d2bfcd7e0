"""How much host memory does `initialize` take on its way?

    OMP_NUM_THREADS=1 python benchmarks/init_peak/run.py                # 325M parameters, every source, fp32 and bf16
    OMP_NUM_THREADS=1 python benchmarks/init_peak/run.py --layers 8 --width 512 --vocabulary 256 --together

A Llama comes from four sources: built in host memory; `from_pretrained` (bf16 safetensors, mapped); the meta device with
`load_weights` (the same files); the meta device alone (initialized by its own modules). In a process of its own each, the
kernel's high-water mark of resident memory is reset before `initialize` and read after it. Less what the process had before
the model was there, and less the mapped files (the page cache's, which gives them back), it may be at most the final state
(weights in slabs, fp32 masters) plus twice the state of the largest layer. The optimizer's state is made by the first
update, and gradients by the first step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import harmony_ds

_MIB = 2**20
SOURCES = ("host", "from_pretrained", "load_weights", "meta")
DTYPES = ("fp32", "bf16")
_ALLOWED_LAYERS = 2


@dataclass(frozen=True)
class Measured:
    """Bytes, less what the process had before the model; `layer` is the largest layer's share of `state`."""

    source: str
    dtype: str
    parameters: int
    before: int
    peak: int
    after: int
    state: int
    layer: int
    seconds: float

    @property
    def layers_over(self) -> float:
        return (self.peak - self.state) / self.layer

    def __str__(self) -> str:
        mib = (f"{nbytes / _MIB:10,.1f}" for nbytes in (self.before, self.peak, self.after, self.state, self.layer))
        return f"{self.source:<16}{self.dtype:<6}{' '.join(mib)} {self.layers_over:9.2f} {self.seconds:8.1f}"


HEADER = (
    f"{'MiB':<22}"
    + " ".join(f"{word:>10}" for word in ("before", "peak", "after", "state", "layer"))
    + "   over, layers  s"
)


def llama(options: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        intermediate_size=11 * options.width // 4,
        num_attention_heads=8,
        vocab_size=options.vocabulary,
        use_cache=False,
    )


def ds_config(dtype: str) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bf16"},
        "harmony": {"device": "cpu"},
    }


def build(source: str, config: LlamaConfig, folder: Path, dtype: str) -> nn.Module:
    if source == "host":
        return LlamaForCausalLM(config)
    if source == "from_pretrained":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if source == "load_weights":
        harmony_ds.load_weights(model, folder)
    return model


def resident(which: str = "VmRSS") -> int:
    """Return the resident memory of this process, or its high-water mark (VmHWM), pages of files included."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[which].split()[0]) * 1024


def settle() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def state_bytes(model: nn.Module, dtype: str) -> int:
    return sum(p.numel() for p in model.parameters()) * (4 if dtype == "fp32" else 6)


def measure(source: str, dtype: str, options: argparse.Namespace) -> Measured:
    base = settle()
    model = build(source, llama(options), options.folder, dtype)
    before = resident() - base
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    begin = time.perf_counter()
    engine, *_ = harmony_ds.initialize(model=model, config=ds_config(dtype))
    seconds = time.perf_counter() - begin
    files = options.folder.iterdir() if source in ("from_pretrained", "load_weights") else ()
    peak, after = resident("VmHWM") - base - sum(file.stat().st_size for file in files), resident() - base
    layers = [model.model.embed_tokens, *model.model.layers, model.lm_head]
    state, layer = state_bytes(model, dtype), max(state_bytes(one, dtype) for one in layers)
    count = sum(p.numel() for p in model.parameters())
    engine.destroy()
    return Measured(source, dtype, count, before, peak, after, state, layer, seconds)


def child(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if not any(options.folder.iterdir()):
        LlamaForCausalLM(llama(options)).to(torch.bfloat16).save_pretrained(options.folder)
    small = argparse.Namespace(layers=1, width=64, vocabulary=64)
    engine, *_ = harmony_ds.initialize(model=LlamaForCausalLM(llama(small)), config=ds_config("bf16"))
    engine.destroy()  # modules that are loaded on first use are there now
    for case in options.cases:
        print(json.dumps(asdict(measure(*case.split(":"), options))))


def run_child(options: argparse.Namespace, folder: Path, cases: list[str]) -> list[Measured]:
    sizes = ["--layers", options.layers, "--width", options.width, "--vocabulary", options.vocabulary]
    command = [sys.executable, __file__, *map(str, sizes), "--folder", str(folder), "--cases", *cases]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [Measured(**json.loads(line)) for line in run.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--together", action="store_true", help="all in one process")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        child(options)
        return
    cases = [f"{source}:{dtype}" for source in options.sources for dtype in options.dtypes]
    folder = Path(tempfile.mkdtemp())
    try:
        if options.together:
            rows = run_child(options, folder, cases)
        else:
            run_child(options, folder, [])
            rows = [row for case in cases for row in run_child(options, folder, [case])]
    finally:
        shutil.rmtree(folder)
    print(f"{rows[0].parameters / 1e6:.0f}M parameters\n{HEADER}", *rows, sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    over = [f"{row.source} {row.dtype}" for row in rows if row.layers_over > _ALLOWED_LAYERS]
    if over:
        sys.exit(f"more than {_ALLOWED_LAYERS} layers above the final state: {', '.join(over)}")


if __name__ == "__main__":
    main()
