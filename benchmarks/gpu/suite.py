"""Parts that the suite's commands share: the point that is measured, the device, and the folder of results."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harmony_ds.bench.results import environment

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"gpt2-1.5b": "gpt2_1b5", "llama-3b": "llama_3b", "llama-6b": "llama_6b", "llama-8b": "llama_8b"}
DEFAULT_SEQUENCE = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """One step of one model: what `--model`, `--cap-gib`, `--tokens` and so on say; on a CPU a small one in its place.

    Attributes:
        model: as `harmony-ds` takes it.
        accumulation: micro-batches of `rows` rows in a step.
        joins: whether the engine may choose how many rows a layer call takes (`"micro_batch": "auto"`).
        state_16_bit: whether masters and moments are bf16, too: 6 bytes of host memory per parameter, not 14.
        disk: the folder of a file that masters and moments lie in; None: they lie in host memory.
    """

    model: str
    sequence: int
    tokens: int
    cap_gib: float
    rows: int
    accumulation: int
    clip: bool
    joins: bool = False
    state_16_bit: bool = False
    disk: str | None = None

    def ds_config(self) -> dict[str, object]:
        """Return the ds_config, which all engines read alike but for its section "harmony"."""
        bf16: dict[str, object] = {"enabled": device() == "cuda" or self.state_16_bit}
        if not self.clip:
            # Without this DeepSpeed looks for inf and NaN in bf16 gradients, for which updates wait as for a norm.
            bf16["check_grad_overflow"] = False
        if self.state_16_bit:
            bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        zero: dict[str, object] = {"stage": 2} if self.state_16_bit else {}
        if self.disk is not None:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": self.disk}
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0 if self.clip else 0.0,
            "bf16": bf16,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
            },
            **({"zero_optimization": zero} if zero else {}),
            **({"harmony": {"micro_batch": "auto"}} if self.joins else {}),
        }

    @property
    def variant(self) -> str:
        """The end of the name of its results."""
        words = ["clip" if self.clip else "noclip"]
        words += ["auto"] if self.joins else []
        words += ["16-bit-state"] if self.state_16_bit else []
        words += ["disk"] if self.disk is not None else []
        words += [f"rows-of-{self.sequence}"] if self.sequence != DEFAULT_SEQUENCE and device() == "cuda" else []
        return "-".join(words)


def add_point_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `point` reads."""
    parser.add_argument("--model", choices=MODELS, default="llama-6b")
    parser.add_argument("--cap-gib", type=float, default=24)
    parser.add_argument("--tokens", type=int, default=32768, help="of one optimizer step")
    parser.add_argument("--sequence", type=int, default=DEFAULT_SEQUENCE, help="tokens in a row (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=1, help="rows")
    parser.add_argument("--clip", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--joins", action="store_true", help='"micro_batch": "auto": layer calls of more rows')
    parser.add_argument("--state-16-bit", action="store_true", help="masters and moments in bf16")
    parser.add_argument("--disk", help="a folder for masters and moments")


def point(args: argparse.Namespace) -> Point:
    """Return the point of the grid, whose model `harmony-ds` can import from now on."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    function, sequence, tokens, cap = MODELS[args.model], args.sequence, args.tokens, args.cap_gib
    if device() == "cpu":
        function, sequence, tokens, cap = "llama_7m", 64, 512, 0.025
    rows = args.micro_batch
    accumulation = max(1, tokens // sequence // rows)
    return Point(
        model=f"benchmarks.gpu.models:{function}",
        sequence=sequence,
        tokens=tokens,
        cap_gib=cap,
        rows=rows,
        accumulation=accumulation,
        clip=args.clip,
        joins=args.joins,
        state_16_bit=args.state_16_bit,
        disk=args.disk,
    )


def device() -> str:
    """Return "cuda", or "cpu", where every command runs at a small size."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def results_folder() -> Path:
    """Return `benchmarks/results/gpu`, or `.../gpu-dry-run` without a GPU; below $OUT if it is set."""
    folder = Path(os.environ.get("OUT") or RESULTS) / ("gpu" if device() == "cuda" else "gpu-dry-run")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(name: str, content: dict[str, Any]) -> Path:
    """Write JSON with the environment it was measured in."""
    path = results_folder() / f"{name}.json"
    script = " ".join(["python", *sys.argv])
    found = {**environment(device()), "command": script}
    path.write_text(json.dumps({"environment": found, **content}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return path
