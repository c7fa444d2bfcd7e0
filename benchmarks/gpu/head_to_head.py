"""(b) Which engine? One comparison of `harmony-ds bench` per call, within ten minutes; `--resume` goes on with it.

    python benchmarks/gpu/head_to_head.py --model llama-6b --cap-gib 24 --tokens 32768 --micro-batch 1 --no-clip
    python benchmarks/gpu/head_to_head.py --list        the whole grid, a command per line

All engines get the same cap by `set_per_process_memory_fraction`, but plain PyTorch, which runs uncapped: what no
offload reaches on the same card. Without a GPU a small model runs on the CPU device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys

from suite import ROOT, device, results_folder

from harmony_ds.cli.app import app

MODELS = {"gpt2-1.5b": ("gpt2_1b5", 1024), "llama-3b": ("llama_3b", 1024), "llama-6b": ("llama_6b", 1024)}
CAPS, TOKENS, MICRO_BATCHES = (8, 16, 24), (8192, 32768, 131072), (1, 4, 8)
SMALL = ("llama_7m", 64)
SMALL_CAP_GIB, SMALL_TOKENS = 0.025, 512


def main() -> None:
    args = _arguments()
    if args.list:
        for command in _grid():
            print(command)
        return
    on_cuda = device() == "cuda"
    function, sequence = MODELS[args.model] if on_cuda else SMALL
    tokens, cap = (args.tokens, args.cap_gib) if on_cuda else (SMALL_TOKENS, SMALL_CAP_GIB)
    name = f"{args.model}-{args.cap_gib:g}gib-{args.tokens}tok-mb{args.micro_batch}-{'clip' if args.clip else 'noclip'}"
    config = results_folder() / f"{name}.ds_config.json"
    config.write_text(json.dumps(_ds_config(args, tokens // sequence, on_cuda), indent=1) + "\n", encoding="utf-8")
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = ["bench", f"benchmarks.gpu.models:{function}", "--ds-config", config, "--sequence", sequence]
    command += ["--device-memory-gib", cap, "--uncapped", "torch,torch-checkpoint", "--rounds", args.rounds]
    command += ["--steps", args.steps, "--warmup-steps", 1, "--limit-s", args.limit_s]
    command += ["--output", results_folder() / f"{name}.json"]
    if args.engines:
        command += ["--engines", args.engines]
    if args.sweep is not None:
        command += ["--sweep" if args.sweep else "--no-sweep"]
    if args.resume:
        command += ["--resume"]
    app([str(part) for part in command], prog_name="harmony-ds")


def _ds_config(args: argparse.Namespace, samples: int, on_cuda: bool) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": max(1, samples // args.micro_batch),
        "gradient_clipping": 1.0 if args.clip else 0.0,
        # Without this DeepSpeed looks for inf and NaN in bf16 gradients, for which the update has to wait as for a norm.
        "bf16": {"enabled": on_cuda, **({} if args.clip else {"check_grad_overflow": False})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    }


def _grid() -> list[str]:
    """One command per point. The first answers the question the project exists for."""
    points = [("llama-6b", 24, 32768, 1, False)]
    points += [
        point for point in itertools.product(MODELS, CAPS, TOKENS, MICRO_BATCHES, (False, True)) if point not in points
    ]
    return [
        f"python benchmarks/gpu/head_to_head.py --model {model} --cap-gib {cap} --tokens {tokens} --micro-batch {rows} "
        f"{'--clip' if clip else '--no-clip'}"
        for model, cap, tokens, rows, clip in points
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-6b")
    parser.add_argument("--cap-gib", type=float, default=24)
    parser.add_argument("--tokens", type=int, default=32768, help="of one optimizer step")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of 1024 tokens")
    parser.add_argument("--clip", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--engines", help="as harmony-ds bench takes them (default: all that can run)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=420, help="begin no turn later")
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, help="the others' best micro-batch too")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
