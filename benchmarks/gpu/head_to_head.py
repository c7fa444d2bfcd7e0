"""(b) Which engine? One comparison of `harmony-ds bench` per call, within ten minutes; `--resume` goes on with it.

    python benchmarks/gpu/head_to_head.py --model llama-6b --cap-gib 24 --tokens 32768 --micro-batch 1 --no-clip

All engines get the same cap by `set_per_process_memory_fraction`, but plain PyTorch, which runs uncapped: what no
offload reaches on the same card. Without a GPU a small model runs on the CPU device.
"""

from __future__ import annotations

import argparse
import json
import sys

from suite import add_point_options, point, results_folder

from harmony_ds.cli.app import run


def main() -> None:
    args = _arguments()
    chosen = point(args)
    name = f"{args.model}-{args.cap_gib:g}gib-{args.tokens}tok-mb{args.micro_batch}-{chosen.variant}"
    name += "-ablations" if args.ablate else ""
    config = results_folder() / f"{name}.ds_config.json"
    config.write_text(json.dumps(chosen.ds_config(), indent=1) + "\n", encoding="utf-8")
    command = ["bench", chosen.model, "--ds-config", config, "--sequence", chosen.sequence]
    command += ["--device-memory-gib", chosen.cap_gib, "--rounds", args.rounds]
    command += ["--steps", args.steps, "--warmup-steps", 1, "--limit-s", args.limit_s]
    command += ["--output", results_folder() / f"{name}.json"]
    if args.ablate:
        command += ["--ablate"]
    elif args.uncapped:
        command += ["--uncapped", args.uncapped]
    if args.engines:
        command += ["--engines", args.engines]
    if args.sweep is not None:
        command += ["--sweep" if args.sweep else "--no-sweep"]
    if args.resume:
        command += ["--resume"]
    sys.exit(run([str(part) for part in command]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_point_options(parser)
    parser.add_argument("--engines", help="as harmony-ds bench takes them (default: all that can run)")
    parser.add_argument(
        "--uncapped", default="torch,torch-checkpoint", help="engines without the cap, beside the others"
    )
    parser.add_argument("--ablate", action="store_true", help="harmony alone, each of its mechanisms switched off")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=420, help="begin no turn later")
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, help="the others' best micro-batch too")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
