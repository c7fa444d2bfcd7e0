"""Pre-train a small GPT-2 from scratch under a device budget that its training state exceeds eightfold.

    python examples/pretrain_gpt2/train.py            two minutes on two CPU cores; on a GPU, a larger model
    python examples/pretrain_gpt2/train.py --check    and the same steps in plain PyTorch, compared

Enters: text (data.py) and a ds_config. Leaves: the losses, the engine's swap and memory reports, and loss.png and
losses.json in the output folder.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from check import Comparison, compare, train_plain
from data import Corpus, DataError, load_corpus, micro_batches
from display import Display
from transformers import GPT2Config, GPT2LMHeadModel

import harmony_ds

SEQUENCE_TOKENS = 128
HEAD_WIDTH = 64
EVAL_GROUPS = 2
STATE_BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, two moments; bf16 and fp16 add up to the same
GIB = 2**30

Batches = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the least budget that the default run gives it: an eighth of its training state."""

    layers: int
    hidden: int
    budget_gib: float


ON_CPU = Size(layers=12, hidden=256, budget_gib=0.0)  # the ds_config's is meant for it
# Workspaces of cuBLAS and the allocator's segments take up to 0.38 GiB, whatever the model: docs/memory.md.
ON_CUDA = Size(layers=43, hidden=1024, budget_gib=1.0)


@dataclass(frozen=True, slots=True)
class Result:
    """Training losses by step, and the held-out loss before and after."""

    losses: list[float]
    held_out_before: float
    held_out_after: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, report, and return the exit status."""
    options = parse_options(arguments)
    try:
        config = load_config(options)
        corpus = load_corpus(options.text)
        comparison = run(options, config, corpus)
    except (DataError, OSError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if comparison is None or comparison.agrees else 1


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    configs = Path(__file__).resolve().parents[2] / "ds_configs"
    parser = argparse.ArgumentParser(
        description="Pre-train a small GPT-2 under a device budget that its training state exceeds."
    )
    parser.add_argument("--config", type=Path, default=configs / "pretrain_gpt2.json", help="ds_config JSON")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the scheduler's total_num_steps)")
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="text to train on")
    layers, hidden = (
        f"(default: {getattr(ON_CPU, of)}, on a GPU {getattr(ON_CUDA, of)})" for of in ("layers", "hidden")
    )
    least = f"(default: the config's, on a GPU at least {ON_CUDA.budget_gib})"
    parser.add_argument("--layers", type=int, help=f"transformer layers {layers}")
    parser.add_argument("--hidden", type=int, help=f"width, a multiple of {HEAD_WIDTH} {hidden}")
    parser.add_argument("--budget-gib", type=float, help=f"device memory budget {least}")
    parser.add_argument("--out", type=Path, default=Path("outputs/pretrain_gpt2"), help="folder for plot and losses")
    parser.add_argument("--seed", type=int, help="of weights, data order and dropout (default: the config's)")
    parser.add_argument("--check", action="store_true", help="train the same steps in plain PyTorch and compare (fp32)")
    options = parser.parse_args(arguments)
    if options.hidden is not None and (options.hidden < 1 or options.hidden % HEAD_WIDTH):
        parser.error(f"--hidden {options.hidden} is not a multiple of {HEAD_WIDTH}, the width of an attention head")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    return options


def load_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the ds_config with the command line's wishes written into it.

    Raises:
        DataError: an entry is missing that this example needs, or --check cannot be had with this config.
    """
    config: dict[str, Any] = json.loads(options.config.read_text())
    harmony = config.setdefault("harmony", {})
    size = size_for(harmony.get("device", "auto"))
    options.layers, options.hidden = options.layers or size.layers, options.hidden or size.hidden
    schedule = config.get("scheduler", {}).get("params", {})
    options.steps = options.steps or schedule.get("total_num_steps", 50)
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = options.steps
    if options.budget_gib is not None:
        harmony["device_memory_gib"] = options.budget_gib
    options.seed = harmony["seed"] = options.seed if options.seed is not None else harmony.get("seed", 0)
    if "device_memory_gib" not in harmony:
        raise DataError(
            f'{options.config} sets no "harmony": {{"device_memory_gib": ...}}: add it or give --budget-gib'
        )
    if options.budget_gib is None:
        harmony["device_memory_gib"] = max(harmony["device_memory_gib"], size.budget_gib)
    if options.check and any(config.get(key, {}).get("enabled") for key in ("bf16", "fp16")):
        raise DataError("--check compares with plain fp32 PyTorch: take a config without bf16 and fp16")
    return config


def size_for(device: str) -> Size:
    """Return the default for `device`, as the ds_config names it."""
    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return ON_CUDA if on_cuda else ON_CPU


def build_model(options: argparse.Namespace, vocab_size: int) -> GPT2LMHeadModel:
    """Return a randomly initialized GPT-2 in training mode.

    Without a key/value cache: training never reads it, and it would keep every layer's keys alive.
    """
    torch.manual_seed(options.seed)
    shape = GPT2Config(
        vocab_size=vocab_size,
        n_positions=SEQUENCE_TOKENS,
        n_layer=options.layers,
        n_embd=options.hidden,
        n_head=options.hidden // HEAD_WIDTH,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(shape)
    model.loss_type = "ForCausalLM"  # what it would fall back to, with a warning
    return model.train()


def run(options: argparse.Namespace, config: dict[str, Any], corpus: Corpus) -> Comparison | None:
    """Train with the engine, report, and compare with plain PyTorch if asked to."""
    model = build_model(options, corpus.vocab_size)
    initial = copy.deepcopy(model) if options.check else None
    print(corpus.source)
    print(describe(model, options, config))
    engine, _, _, _ = harmony_ds.initialize(model=model, config=config)
    try:
        result = train(engine, corpus, options)
        report(engine, result)
        comparison = None
        if initial is not None:
            batches = batches_for(engine, corpus.split()[0], options.seed)
            engine.destroy()  # on a GPU its budget is for all of this process, and the plain model is larger
            comparison = check(initial.to(engine.device), model, config, batches, options.steps, result)
            print(f"\n{comparison}")
    finally:
        engine.destroy()
    save(result, comparison, options.out)
    return comparison


def describe(model: GPT2LMHeadModel, options: argparse.Namespace, config: dict[str, Any]) -> str:
    """Say how large the model is, and how many times its training state exceeds the device budget."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state_gib = parameters * STATE_BYTES_PER_PARAMETER / GIB
    budget_gib = config["harmony"]["device_memory_gib"]
    return (
        f"GPT-2: {options.layers} layers x {options.hidden}, {parameters:,} parameters, "
        f"sequences of {SEQUENCE_TOKENS} tokens\n"
        f"training state {state_gib:.3f} GiB (weights, gradients, moments), device budget {budget_gib:.3f} GiB: "
        f"{state_gib / budget_gib:.1f} times the budget"
    )


def train(engine: Any, corpus: Corpus, options: argparse.Namespace) -> Result:
    """Run the optimizer steps, with the held-out loss measured before and after them."""
    training, held_out = corpus.split()
    batches = batches_for(engine, training, options.seed)
    before = held_out_loss(engine, batches_for(engine, held_out, options.seed))
    group_tokens = engine.gradient_accumulation_steps() * engine.train_micro_batch_size_per_gpu() * SEQUENCE_TOKENS
    losses: list[float] = []
    with Display(options.steps, group_tokens) as display:
        engine.on_progress(display.position)
        for _ in range(options.steps):
            learning_rate = engine.get_lr()[0]
            losses.append(engine.train_batch(batches).item())
            display.step(losses[-1], learning_rate, float(engine.get_global_grad_norm()))
    after = held_out_loss(engine, batches_for(engine, held_out, options.seed))
    return Result(losses, before, after)


def batches_for(engine: Any, token_ids: torch.Tensor, seed: int) -> Batches:
    """Return the micro-batches of a text, in the engine's size; the same for the same seed.

    Several processes (torchrun) take them in turn.
    """
    batches = micro_batches(token_ids, engine.train_micro_batch_size_per_gpu(), SEQUENCE_TOKENS, seed)
    return itertools.islice(batches, engine.global_rank, None, engine.world_size)


def held_out_loss(engine: Any, batches: Batches) -> float:
    """Return the mean loss over a few groups of held-out micro-batches, without dropout."""
    engine.module.eval()
    losses: list[float] = [engine.eval_batch(batches).item() for _ in range(EVAL_GROUPS)]
    engine.module.train()
    return sum(losses) / len(losses)


def report(engine: Any, result: Result) -> None:
    """Print what the run reached and what it moved."""
    print(f"\nheld-out loss {result.held_out_before:.4f} before, {result.held_out_after:.4f} after")
    print(f"\n{engine.swap_report()}\n\n{engine.memory_report()}")


def check(
    initial: GPT2LMHeadModel,
    trained: GPT2LMHeadModel,
    config: dict[str, Any],
    batches: Batches,
    steps: int,
    result: Result,
) -> Comparison:
    """Train `initial` through the same steps in plain PyTorch; return how far it and `trained` are apart."""
    print("\nThe same steps in plain PyTorch:")
    group_tokens = config["gradient_accumulation_steps"] * config["train_micro_batch_size_per_gpu"] * SEQUENCE_TOKENS
    with Display(steps, group_tokens) as display:
        losses = train_plain(initial, config, batches, steps, display.step)
    return compare(result.losses, losses, trained, initial)


def save(result: Result, comparison: Comparison | None, folder: Path) -> None:
    """Write losses.json and loss.png."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "losses": result.losses,
        "held_out_loss": {"before": result.held_out_before, "after": result.held_out_after},
        "plain_losses": comparison.plain_losses if comparison else None,
    }
    (folder / "losses.json").write_text(json.dumps(record, indent=2) + "\n")
    from matplotlib.figure import Figure  # only now: the losses are kept where it is missing

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(result.losses) + 1)
    axes.plot(steps, result.losses, label="training, harmony_ds")
    if comparison:
        axes.plot(steps, comparison.plain_losses, linestyle=":", linewidth=3, label="training, plain PyTorch")
    held_out = (result.held_out_before, result.held_out_after)
    axes.plot((0, len(result.losses)), held_out, marker="o", linestyle="none", label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss", title="GPT-2 from scratch, training state beyond device memory")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=150)
    print(f"\nwrote {folder / 'loss.png'} and {folder / 'losses.json'}")


if __name__ == "__main__":
    sys.exit(main())
